"""The engine on a GPU: the batched form of attention, real kernels, every drafter family."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import loaded, tiny_prompts, wrap_drafter, wrap_target
from tests.unit.engine.test_engine_families import FAMILIES

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.models.loading import LoadedDrafter, LoadedTarget

pytestmark = pytest.mark.gpu
LONG = SamplingParameters(max_tokens=40, ignore_eos=True)


def on_gpu(name: str, dtype: torch.dtype) -> tuple[LoadedTarget, LoadedDrafter]:
    target, drafter = loaded("qwen3", linear_mode="plain", dtype=dtype, **FAMILIES[name])
    moved = wrap_target(target.model.to("cuda"), "plain", target.tokenizer)
    return moved, wrap_drafter(drafter.model.to("cuda"), "plain")


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_are_those_of_plain_decoding(name: str) -> None:
    """In float32 the tiny target's margins are far wider than what the number of rows changes."""
    target, drafter = on_gpu(name, torch.float32)
    prompts = tiny_prompts([5, 31, 12, 70, 9])
    plain = Engine(target, settings=EngineSettings(max_num_seqs=3)).generate(prompts, LONG)
    found = Engine(target, drafter, EngineSettings(max_num_seqs=3)).generate(prompts, LONG)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_canary_finds_nothing(name: str, dtype: torch.dtype) -> None:
    target, drafter = on_gpu(name, dtype)
    report = Engine(target, drafter, EngineSettings(max_num_seqs=3)).canary()
    assert report.has_passed, report


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_text_repeats_under_its_seed(name: str) -> None:
    target, drafter = on_gpu(name, torch.float32)
    sampling = SamplingParameters(max_tokens=24, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)
    settings = EngineSettings(max_num_seqs=4, draft_sample_method="probabilistic")
    prompts = tiny_prompts([5, 31, 12])
    first = Engine(target, drafter, settings).generate(prompts, sampling)
    again = Engine(target, drafter, settings).generate(prompts, sampling)
    assert [result.token_ids for result in first] == [result.token_ids for result in again]
