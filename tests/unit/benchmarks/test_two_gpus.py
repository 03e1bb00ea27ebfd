"""Several GPUs against one: tokens are compared, launches that fail are told, and a real trial over gloo."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import two_gpus, two_gpus_work
from benchmarks.random_dense import DENSE_SHAPES

from paceline.checkpoint.target_config import read_target_contract
from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

TRIAL = ["--device", "cpu", "--shapes", "tiny-qwen3", "--new-tokens", "3", "--num-prompts", "2", "--drafters", "none"]
Found = tuple[list[dict[str, Any]], bool]


def told(spread: str, tokens: list[list[int]]) -> dict[str, Any]:
    head = {"part": "tokens", "shape": "tiny-qwen3", "spread": spread, "drafter": "none"}
    return {**head, "num_prompts": len(tokens), "num_passes": 3, "ms_per_pass": 1.0, "token_ids": tokens}


def canned(patch: pytest.MonkeyPatch, found: dict[int, Found]) -> None:
    def launch(num_ranks: int, _folder: Path, _options: argparse.Namespace) -> Found:
        return found[num_ranks]

    patch.setattr(two_gpus_work, "write_models", lambda *_arguments: None)
    patch.setattr(two_gpus, "launch", launch)


def test_tokens_are_compared_with_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ([told("one", [[1, 2], [3]])], True)
    canned(monkeypatch, {1: one, 2: ([told("tp 2", [[1, 2], [3]]), told("pp 2", [[1, 2], [4]])], True)})
    assert two_gpus.main([*TRIAL, "--out", str(tmp_path)]) == EXIT_CHECK_SAYS_NO
    rows = json.loads((tmp_path / "gpu-two.json").read_text())["rows"]
    assert [(row["spread"], row["num_equal"]) for row in rows] == [("one", 2), ("pp 2", 1), ("tp 2", 2)]
    canned(monkeypatch, {1: one, 2: ([told("tp 2", [[1, 2], [3]])], True)})
    assert two_gpus.main(TRIAL) == EXIT_DONE


def test_a_launch_that_fails_is_told_and_its_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canned(monkeypatch, {1: ([told("one", [[1]])], False), 2: ([told("tp 2", [[1]])], True)})
    assert two_gpus.main([*TRIAL, "--out", str(tmp_path)]) == EXIT_CHECK_SAYS_NO
    rows = json.loads((tmp_path / "gpu-two.json").read_text())["rows"]
    assert [(row["spread"], row["num_equal"]) for row in rows] == [("one", 1), ("tp 2", 1)]
    step = {"part": "steps", "shape": "qwen3-8b", "spread": "tp 2", "drafter": "none", "error": "it broke"}
    canned(monkeypatch, {1: ([], True), 2: ([step], True)})
    assert two_gpus.main(TRIAL) == EXIT_CHECK_SAYS_NO


def test_what_is_written_is_what_was_made(tmp_path: Path) -> None:
    two_gpus_work.write_models(tmp_path / "tiny-qwen3", "tiny-qwen3")
    read = read_target_contract(tmp_path / "tiny-qwen3" / "target", "random")
    shape = DENSE_SHAPES["tiny-qwen3"]
    for field in ("num_layers", "num_kv_heads", "head_size", "rope", "tie_word_embeddings", "has_qk_norm"):
        assert getattr(read, field) == getattr(shape, field), field


def test_heads_that_do_not_halve_are_not_shared() -> None:
    assert not two_gpus_work.can_share("smollm2-135m", 2) and two_gpus_work.can_share("smollm2-135m", 3)
    assert all(two_gpus_work.can_share(shape, 2) for shape in ("slim-qwen3", "qwen3-8b", "k3-mini"))


@pytest.mark.slow
def test_a_trial_over_gloo(tmp_path: Path) -> None:
    more = ["--shapes", "tiny-qwen3", "tiny-k3", "--step-shapes", "tiny-qwen3", "--timed", "3", "--batches", "2"]
    assert two_gpus.main([*TRIAL, *more, "--drafters", "none", "dflash", "--out", str(tmp_path)]) == EXIT_DONE
    rows = json.loads((tmp_path / "gpu-two.json").read_text())["rows"]
    compared = [row for row in rows if row["part"] == "tokens"]
    assert len(compared) == 12 and all(row["num_equal"] == 2 for row in compared)
    assert {(row["spread"], row["mode"]) for row in rows if row["part"] == "steps"} == {
        ("one", "recorded"),
        ("one", "eager"),
        ("tp 2", "recorded"),
        ("tp 2", "eager"),
        ("pp 2", "eager"),
    }
