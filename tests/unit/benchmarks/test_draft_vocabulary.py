"""The benchmark of short lists: a row per list, with what it covers and what its head costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import draft_vocabulary
from benchmarks.draft_vocabulary import Bench, main, make_bench, parse, with_counts
from tests import tiny
from tests.tiny_run import write_token_file


@pytest.fixture
def bench() -> Bench:
    target, drafter = tiny.loaded()
    counts_W = torch.arange(tiny.VOCAB_SIZE)
    prompts = tuple(map(tuple, tiny.tiny_prompts([5, 9])))
    return make_bench(target, replace(drafter, token_counts_W=counts_W), prompts, 20, (256, 64))


def test_table_and_result(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft_vocabulary, "prepare", lambda _options: bench)
    assert main(["--quick", "--threads", str(torch.get_num_threads()), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "draft-vocabulary.json").read_text())["rows"]
    by_mode = {row["mode"]: row for row in rows}
    assert list(by_mode) == ["plain", "full", "256", "64", "auto"]
    assert [by_mode[mode]["ids"] for mode in ("full", "256", "64", "auto")] == ["all", 256, 64, "all"]
    assert [by_mode[mode]["coverage"] for mode in ("full", "auto")] == [1.0, 1.0]
    assert 1 > by_mode["256"]["coverage"] > by_mode["64"]["coverage"] > 0
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(row["head_ms"] > 0 and row["acceptance_length"] >= 1 for row in rows[1:])
    assert "head_ms" in capsys.readouterr().out


def test_counts_of_other_text(tmp_path: Path) -> None:
    _, drafter = tiny.loaded()
    files = [write_token_file(tmp_path / f"{name}.npz", [[9, 9, 50, 60]], num_prompt_tokens=2) for name in "ab"]
    counts_W = with_counts(drafter, files).token_counts_W
    assert counts_W is not None and int(counts_W.sum()) == 4 and counts_W[[50, 60]].tolist() == [2, 2]


def test_options() -> None:
    options = parse(["--quick", "--counts-from", "a.npz", "b.npz"])
    assert (options.num_prompts, options.rounds, len(options.counts_from)) == (2, 1, 2)
    with pytest.raises(SystemExit, match="2"):
        parse(["--max-tokens", "1"])
