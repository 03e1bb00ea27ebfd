"""The benchmark of verification methods: its rows, on a target and drafter small enough to run it whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import verify_methods
from benchmarks.prompt_sets import PromptSet
from benchmarks.verify_methods import main, parse
from tests import tiny

from paceline.models import loading


def test_table_and_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = tiny.loaded()
    prompts = PromptSet("own", tuple(map(tuple, tiny.tiny_prompts([5, 9, 4]))))
    monkeypatch.setattr(loading, "load_target", lambda *_args, **_options: target)
    monkeypatch.setattr(loading, "load_drafter", lambda *_args, **_options: drafter)
    monkeypatch.setattr(verify_methods, "read_sets", lambda *_args, **_options: [prompts])
    arguments = ["--set", "own=x.jsonl", "--num-seeds", "2", "--max-tokens", "24", "--out", str(tmp_path)]
    assert main([*arguments, "--threads", str(torch.get_num_threads())]) == 0
    rows = json.loads((tmp_path / "verify-methods.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["standard", "block", "match", "coupled"]
    assert all(row["lossless"] and row["num_prompts"] == 3 and row["num_seeds"] == 2 for row in rows)
    assert all(1 <= row["low"] <= row["acceptance_length"] <= row["high"] <= 8 for row in rows)
    assert "over_standard" not in rows[0] and "over_standard" in rows[1]
    assert rows[3]["same_text"] == 1.0  # tiny targets are row-invariant
    assert "coupled" in capsys.readouterr().out


def test_greedy_text_has_nothing_to_compare() -> None:
    with pytest.raises(SystemExit):
        parse(["--set", "own=x.jsonl", "--temperature", "0"])
