"""Real engines over tiny models must agree, and any planted difference must end in exit code 3."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest
import torch
from benchmarks import lossless
from benchmarks.lossless import Ids, compare, exit_code, generator, last_logits, main, untrained_like
from benchmarks.prompt_sets import PromptSet
from tests import tiny
from torch import Tensor

SETS = [PromptSet(name, tuple(map(tuple, tiny.tiny_prompts([5, 9], seed=seed)))) for seed, name in enumerate("ab")]
OPTIONS = argparse.Namespace(concurrency=4, max_tokens=12)


def never(_ids: Sequence[int]) -> Tensor:
    raise AssertionError("identical texts need no logits")


def test_any_drafter_leaves_the_text_alone() -> None:
    target, trained = tiny.loaded()
    untrained = untrained_like(trained, target, seed=0)
    plain = generator(target, None, OPTIONS, "plain")
    speculative = {
        "trained": generator(target, trained, OPTIONS, "trained"),
        "untrained": generator(target, untrained, OPTIONS, "untrained"),
    }
    rows = compare(SETS, plain, speculative, never)
    assert rows == [
        {"drafter": drafter, "set": name, "num_prompts": 2, "num_identical": 2, "first_divergence_gaps": []}
        for drafter in speculative
        for name in "ab"
    ]
    assert exit_code(rows) == 0


def test_a_changed_token_is_found_and_judged() -> None:
    target, _ = tiny.loaded()
    plain = generator(target, None, OPTIONS, "plain")

    def broken(prompt_set: PromptSet) -> Ids:
        texts = plain(prompt_set)
        wrong = (texts[1][3] + 1) % target.contract.vocab_size
        return [texts[0], (*texts[1][:3], wrong, *texts[1][4:])]

    rows = compare(SETS[:1], plain, {"broken": broken}, lambda ids: last_logits(target, ids))
    assert rows[0]["num_identical"] == 1 and exit_code(rows) == 3
    gaps = rows[0]["first_divergence_gaps"]
    assert isinstance(gaps, list) and len(gaps) == 1 and gaps[0] > 0


def test_untrained_drafter_has_other_weights_and_the_same_dtype() -> None:
    target, trained = tiny.loaded(dtype=torch.bfloat16)
    untrained = untrained_like(trained, target, seed=0)
    fc, norm = untrained.model.backbone.fc.weight, untrained.model.backbone.norm.weight
    assert fc.dtype == torch.bfloat16 and not torch.equal(fc, trained.model.backbone.fc.weight)
    assert torch.equal(norm, torch.ones_like(norm))
    assert untrained.model.backbone.position_table.dtype == torch.float32
    assert torch.equal(fc, untrained_like(trained, target, seed=0).model.backbone.fc.weight)
    assert not torch.equal(fc, untrained_like(trained, target, seed=1).model.backbone.fc.weight)


@pytest.mark.parametrize(("num_identical", "code"), [(16, 0), (15, 3)])
def test_the_command_says_no(
    num_identical: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(dtype: str, _options: argparse.Namespace) -> list[dict[str, object]]:
        found = {
            "num_prompts": 16,
            "num_identical": num_identical,
            "first_divergence_gaps": [0.5] * (16 - num_identical),
        }
        return [{"dtype": dtype, "drafter": "trained", "set": "a", **found}]

    monkeypatch.setattr(lossless, "check_dtype", fake)
    threads = str(torch.get_num_threads())
    assert main(["--set", "a=a.jsonl", "--dtype", "bfloat16", "float32", "--threads", threads]) == code
    printed = capsys.readouterr().out
    assert f"{2 * num_identical} of 32 texts identical" in printed and "float32" in printed
