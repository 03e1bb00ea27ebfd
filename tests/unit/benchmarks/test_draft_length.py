"""The draft length benchmark: its rows, and what it calls the speed after the first steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import draft_length
from benchmarks.draft_length import Bench, later_speed, main, make_bench, parse, untrained
from benchmarks.paired_speeds import TimedRun
from tests import tiny

from paceline.engine import loop as loop_module
from paceline.engine.step_cost import StepCosts, StepCostTable
from paceline.trace.step import StepRecord


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    costs = StepCosts(StepCostTable({(1, 1): 1.0, (1, 2): 2.0}), StepCostTable({(1, 1): 1.0}))
    monkeypatch.setattr(loop_module, "measure_costs", lambda *_args, **_kwargs: costs)
    target, drafter = tiny.loaded()
    drafters = {"trained": drafter, "untrained": untrained(drafter, target)}
    return make_bench(target, drafters, tuple(map(tuple, tiny.tiny_prompts([5, 9]))), 60)


def test_table_and_result(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft_length, "prepare", lambda _options: bench)
    assert main(["--quick", "--threads", str(torch.get_num_threads()), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "draft-length.json").read_text())["rows"]
    modes = ["plain", "off", "fixed, trained", "adaptive, trained", "fixed, untrained", "adaptive, untrained"]
    assert [row["mode"] for row in rows] == modes
    assert all(mode in capsys.readouterr().out for mode in modes[:1])
    by_mode = {row["mode"]: row for row in rows}
    assert by_mode["off"]["drafts"] == by_mode["plain"]["drafts"] == 0
    assert by_mode["fixed, untrained"]["drafts"] == 7
    assert by_mode["adaptive, untrained"]["drafts"] < 3
    assert by_mode["adaptive, untrained"]["switched_off"] >= 1
    assert all(row["after_50"] > 0 for row in rows)


def step(index: int, num_tokens: int, step_ms: float) -> StepRecord:
    ids = tuple(range(num_tokens))
    return StepRecord("r", index, 0, 0, ids[:-1], num_tokens - 1, num_tokens - 1, ids, ids[-1], step_ms)


def test_the_first_fifty_steps_do_not_count() -> None:
    slow_start = [step(index, 1, 100.0) for index in range(50)]
    run = TimedRun((0, 1), 0.1, 0.1, (*slow_start, step(50, 3, 2.0), step(51, 1, 2.0)))
    assert later_speed([run]) == 1.0
    assert later_speed([TimedRun((0, 1), 0.1, 0.1, tuple(slow_start))]) is None


def test_quick_is_two_prompts() -> None:
    options = parse(["--quick"])
    assert (options.num_prompts, options.rounds) == (2, 1)
    with pytest.raises(SystemExit, match="2"):
        parse(["--max-tokens", "1"])
