from __future__ import annotations

import pytest
import torch
from benchmarks.serving import serve
from tests import tiny

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.errors import NumericError
from paceline.models.layers import set_linear_mode


def test_results_come_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = tiny.loaded()
    prompts = tiny.tiny_prompts([5, 7, 6])
    samplings = [SamplingParameters(max_tokens=count, ignore_eos=True) for count in (9, 1, 4)]
    results = serve(Engine(target, drafter, EngineSettings(max_num_seqs=2)), prompts, samplings, "tiny")
    assert [list(result.prompt_ids) for result in results] == prompts
    assert [len(result.token_ids) for result in results] == [9, 1, 4]
    captured = capsys.readouterr()
    assert captured.out == "" and "tiny: 3 of 3 prompts" in captured.err


def test_broken_numbers_end_the_run() -> None:
    target, _ = tiny.loaded()
    with torch.no_grad():
        target.model.norm.weight.fill_(torch.nan)
    set_linear_mode(target.model, target.linear_mode)  # what serving prepared from the weights follows them
    engine = Engine(target, None, EngineSettings(max_num_seqs=2))
    with pytest.raises(NumericError, match="tiny: a request ended in an error"):
        serve(engine, tiny.tiny_prompts([5]), [SamplingParameters(max_tokens=4)], "tiny")
