"""Several GPUs against one: tokens are compared, launches that fail are told, and a real trial over gloo."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import two_gpus

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

TRIAL = ["--device", "cpu", "--shape", "tiny-k3", "--new-tokens", "3", "--num-prompts", "2"]


def told(tokens: list[list[int]]) -> dict[str, Any]:
    return {"num_prompts": len(tokens), "num_passes": 3, "ms_per_pass": 1.0, "token_ids": tokens}


def canned(patch: pytest.MonkeyPatch, found: dict[str, dict[str, Any] | None]) -> None:
    def launch(spread: str, _folder: Path, _options: argparse.Namespace) -> dict[str, dict[str, Any]] | None:
        tokens = found[spread]
        return None if tokens is None else {drafter: told(ids) for drafter, ids in tokens.items()}

    patch.setattr(two_gpus, "write_models", lambda *_arguments: None)
    patch.setattr(two_gpus, "launch", launch)


def test_tokens_are_compared_with_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"none": [[1, 2], [3]], "dflash": [[1, 2], [3]]}
    canned(monkeypatch, {"one": same, "tp 2": same, "pp 2": {**same, "dflash": [[1, 2], [4]]}})
    assert two_gpus.main([*TRIAL, "--out", str(tmp_path)]) == EXIT_CHECK_SAYS_NO
    rows = json.loads((tmp_path / "gpu-two.json").read_text())["rows"]
    assert [row["num_equal"] for row in rows] == [2, 2, 2, 2, 2, 1]
    canned(monkeypatch, {"one": same, "tp 2": same, "pp 2": same})
    assert two_gpus.main(TRIAL) == EXIT_DONE


def test_a_launch_that_fails_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canned(monkeypatch, {"one": {"none": [[1]]}, "tp 2": None, "pp 2": {"none": [[1]]}})
    assert two_gpus.main([*TRIAL, "--out", str(tmp_path)]) == EXIT_CHECK_SAYS_NO
    rows = json.loads((tmp_path / "gpu-two.json").read_text())["rows"]
    assert [(row["spread"], row["num_equal"]) for row in rows] == [("one", 1), ("pp 2", 1)]


@pytest.mark.slow
def test_a_trial_over_gloo(tmp_path: Path) -> None:
    assert two_gpus.main([*TRIAL, "--out", str(tmp_path)]) == EXIT_DONE
    rows = json.loads((tmp_path / "gpu-two.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["num_equal"] == 2 for row in rows)
