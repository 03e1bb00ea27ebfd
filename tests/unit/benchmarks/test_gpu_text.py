from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import gpu_text
from benchmarks.gpu_text import (
    Cell,
    believed_text,
    lengths_of,
    make_row,
    num_prompts,
    parse,
    read_prompts,
    reader_speeds,
)
from benchmarks.growing_result import read_growing
from benchmarks.peers.closed_loop import TimedAnswer
from benchmarks.serving_rows import Loop
from tests import tiny

from paceline.capture.token_file import Conversation, write_token_file
from paceline.engine.draft_length import BelievedStep
from paceline.trace.step import StepRecord

SMALL = ["--device", "cpu", "--dtype", "float32", "--concurrency", "1", "2", "--num-prompts", "3", "--max-tokens", "6"]


def conversations(path: Path, first_id: int, count: int) -> Path:
    """A token file whose prompts begin with ids that count up."""
    starts = range(first_id, first_id + count)
    write_token_file(path, [Conversation(np.arange(start, start + 4), np.array([7, 8])) for start in starts])
    return path


@pytest.fixture
def _tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = tiny.loaded()
    monkeypatch.setattr("paceline.models.loading.load_target", lambda *_names, **_options: target)
    monkeypatch.setattr("paceline.models.loading.load_drafter", lambda *_names, **_options: drafter)


@pytest.mark.usefixtures("_tiny_models")
def test_rows_have_the_keys_that_readers_expect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = conversations(tmp_path / "texts.npz", 10, 3)
    arguments = ["--set", f"a={file}", "--set", f"b={file}", "--out", str(tmp_path), "--draft-length", "fixed"]
    assert gpu_text.main([*SMALL, *arguments]) == 0
    result = read_growing(tmp_path / "gpu-text.json")
    assert result["complete"] and len(result["rows"]) == 2 * 2 * 2
    wanted = {"drafter", "set", "temperature", "concurrency", "plain_tokens_per_second"}
    wanted |= {"speculative_tokens_per_second", "ratio", "low", "high", "acceptance_length", "noise"}
    for row in result["rows"]:
        assert wanted <= row.keys()
        assert 0 < row["low"] <= row["ratio"] <= row["high"] and row["acceptance_length"] >= 1
        assert row["num_same"] == (3 if row["temperature"] == 0 else None), "float32, row-invariant"
        assert row["drafted_share"] == 1.0 and row["num_replayed"] == 0 < row["num_steps"]
        assert row["num_prompts_replayed"] == row["num_prompt_passes"] == row["num_late_recordings"] == 0
        assert row["plain_step_ms"] > 0 and row["lengths"].startswith(("0: ", "7: ")) and row["believed"] == ""
    assert "total_ratio" in capsys.readouterr().out


@pytest.mark.usefixtures("_tiny_models")
def test_a_row_says_which_lengths_were_taken_and_what_was_believed_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = conversations(tmp_path / "texts.npz", 10, 3)
    arguments = ["--set", f"a={file}", "--temperatures", "1", "--concurrency", "2", "--out", str(tmp_path)]
    assert gpu_text.main([*SMALL, *arguments]) == 0
    (row,) = read_growing(tmp_path / "gpu-text.json")["rows"]
    assert row["believed"].startswith("0: ") and row["believed"].count(" ms ") >= 2
    assert f"believed: {row['believed']}" in capsys.readouterr().err
    assert row["num_switched_off"] >= 0 and row["num_probes"] >= 0


def test_lengths_and_beliefs_are_told_in_a_line() -> None:
    slow = replace(record(4, 1), step_ms=5.0)
    assert lengths_of([record(4, 3), slow, slow, record(0, 0)]) == "0: 25% 1.000 ms, 4: 75% 5.000 ms"
    steps = [BelievedStep(0, 1.0, 1.0), BelievedStep(1, 2.0, 1.5), BelievedStep(2, 3.0, 1.7), BelievedStep(3, 3.0, 1.8)]
    assert believed_text(steps) == "0: 1.000 ms 1.00, 1: 2.000 ms 1.50, 3: 3.000 ms 1.80"
    assert believed_text([]) == ""


@pytest.mark.usefixtures("_tiny_models")
def test_time_runs_out_between_cells_and_a_cell_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = conversations(tmp_path / "texts.npz", 10, 3)
    measured = gpu_text.measure

    def fails_alone(engines: Any, cell: Cell, options: Any) -> Any:
        if cell.concurrency == 1:
            raise RuntimeError("planted")
        return measured(engines, cell, options)

    monkeypatch.setattr(gpu_text, "measure", fails_alone)
    arguments = ["--set", f"a={file}", "--out", str(tmp_path), "--temperatures", "0"]
    assert gpu_text.main([*SMALL, *arguments]) == 0
    result = read_growing(tmp_path / "gpu-text.json")
    assert [row["concurrency"] for row in result["rows"]] == [2] and not result["complete"]
    assert gpu_text.main([*SMALL, *arguments, "--seconds", "0"]) == 0
    captured = capsys.readouterr()
    assert "T 0, 1 at once FAILED" in captured.err and "no time was left for a, T 0, 2 at once" in captured.err


def test_few_requests_come_before_many_and_both_temperatures_before_more_requests() -> None:
    options = parse([*SMALL, "--temperatures", "0", "1"])
    order = [
        (cell.concurrency, cell.temperature, cell.set_name)
        for cell in gpu_text.cells({"a": [[1]], "b": [[2]]}, options)
    ]
    assert order == [(c, t, name) for c in (1, 2) for t in (0.0, 1.0) for name in "ab"]


@pytest.mark.parametrize(("new_shapes", "num_loops"), [([0], 1), ([4, 0], 2), ([4, 2, 1, 1], 3)])
def test_warming_up_ends_once_nothing_is_new(
    new_shapes: list[int], num_loops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = SimpleNamespace(num_recordings=3, num_unrecorded_steps=5, num_unrecorded_prompts=0)
    left, tokens = list(new_shapes), []

    def run_loop(_engine: Any, _prompts: Any, _cell: Cell, max_tokens: int) -> None:
        counts.num_unrecorded_prompts += left.pop(0)
        tokens.append(max_tokens)

    monkeypatch.setattr(gpu_text, "run_loop", run_loop)
    engine: Any = SimpleNamespace(stats=lambda: SimpleNamespace(**vars(counts)))
    assert gpu_text.warm_up(engine, Cell("s", [[1]], 0.0, 1), 128) == num_loops
    assert tokens == [16] * num_loops
    left[:] = [0]
    gpu_text.warm_up(engine, Cell("s", [[1]], 0.0, 8), 128)
    assert tokens[-1] == 128


def test_files_of_one_name_are_taken_in_turn(tmp_path: Path) -> None:
    target, _ = tiny.loaded()
    paths = [conversations(tmp_path / f"{first_id}.npz", first_id, 3) for first_id in (10, 20)]
    options = parse([*SMALL, *(f"--set=s={path}" for path in paths)])
    prompts = read_prompts(options, target)["s"]
    assert [prompt[0] for prompt in prompts] == [10, 20, 11, 21, 12, 22]


def test_loops_are_as_long_as_their_concurrency_asks_for() -> None:
    options = parse([])
    assert [num_prompts(options, concurrency) for concurrency in (1, 8, 32, 128, 4, 64)] == [32, 64, 128, 256, 32, 128]
    assert [file.name for file in options.sets] == ["first"]


def record(num_drafts: int, num_accepted: int) -> StepRecord:
    drafts = tuple(range(num_drafts))
    emitted = (*drafts[:num_accepted], 99)
    return StepRecord("0", 0, 0, 0, drafts, num_accepted, num_accepted, emitted, 99, 1.0)


def test_ratios_are_of_readers_and_acceptance_is_of_steps_that_drafted() -> None:
    plain = [Loop([TimedAnswer([1] * 11, 0.0, 1.0, 2.0), TimedAnswer([1], 0.0, 1.0, 1.0)])] * 2
    records = [record(4, 3), record(4, 1), record(0, 0), record(0, 0)]
    fast = [Loop([TimedAnswer([1] * 11, 0.0, 1.0, 1.5), TimedAnswer([1] * 5, 0.0, 1.0, 1.5)], records)] * 2
    assert reader_speeds(plain) == [10.0, None]
    row = make_row(Cell("s", [[1], [2]], 0.0, 1), plain, fast)
    assert (row["ratio"], row["low"], row["high"]) == (2.0, 2.0, 2.0)
    assert row["acceptance_length"] == 3.0 and row["drafts_per_step"] == 4.0 and row["drafted_share"] == 0.5
    assert row["num_same"] == 1 and row["plain_ttft_ms_p50"] == 1e3
    assert row["plain_tpot_ms_p50"] == pytest.approx(100) and row["speculative_tpot_ms_p50"] == pytest.approx(87.5)
    assert row["plain_tokens_per_second"] == 6.0 and row["total_ratio"] == pytest.approx(16 / 1.5 / 6)


def test_answers_that_come_in_one_piece_have_no_speed() -> None:
    loops = [Loop([TimedAnswer([1, 2], 0.0, 1.0, 1.0)])] * 2
    row = make_row(Cell("s", [[1]], 1.0, 1), loops, loops)
    assert row["ratio"] is None and row["plain_decode_tokens_per_second"] is None and row["num_same"] is None
