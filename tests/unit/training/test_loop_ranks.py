"""Whole runs shared by two gloo processes: same results, one set of files, and decisions that all ranks take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.tiny_run import random_rows, write_token_file
from tests.unit.training.processes import run_ranks, values
from tests.unit.training.runs import differs, exported, files_below, metrics, state, timeless
from tests.unit.training.shared_runs import STEPS, run_all, run_three, settings, small_target, stop_alone

from paceline.configuration.run import TrainRun
from paceline.training.loop import Outcome, train


class Shared(NamedTuple):
    """What two ranks and one process did in a folder."""

    folder: Path
    data: Path
    strategy: str
    first: dict[str, Any]
    second: dict[str, Any]
    alone: TrainRun

    def run(self, name: str) -> TrainRun:
        return settings(self.folder / name, self.data, self.strategy)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp(request.param)
    data = write_token_file(folder / "data.npz", random_rows(40, 24, vocab_size=400), num_prompt_tokens=6)
    alone = settings(folder / "alone", data)
    train(alone, small_target())
    stop_alone(settings(folder / "of-one", data), 7)
    first, second = values(run_ranks(run_all, folder / "ranks", folder, data, request.param))
    return Shared(folder, data, request.param, first, second, alone)


def difference(left: TrainRun, right: TrainRun) -> float:
    """The largest relative difference of a master weight at the end."""
    a, b = state(left, STEPS), state(right, STEPS)
    assert a.keys() == b.keys()
    names = [name for name in a if name.startswith("master.")]
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in names)


def test_two_ranks_train_what_one_does(shared: Shared) -> None:
    whole = shared.run("whole")
    checkpoint = whole.output / "checkpoints" / f"step-{STEPS:07d}"
    for outcome, _ in (shared.first["whole"], shared.second["whole"]):
        assert outcome == Outcome(STEPS, True, checkpoint, whole.output / "drafter")
    assert difference(whole, shared.alone) < 2e-6
    assert files_below(whole.output) == files_below(shared.alone.output)
    assert len((whole.output / "command.txt").read_text().splitlines()) == 1


def test_metrics_are_of_all_ranks(shared: Shared) -> None:
    ours, theirs = timeless(shared.run("whole")), timeless(shared.alone)
    assert [(row["kind"], row["step"]) for row in ours] == [(row["kind"], row["step"]) for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        if one["kind"] == "evaluate":  # three conversations, of which the ranks walk two and one
            assert one.keys() == other.keys()
            for name, row in one.items():
                assert flat(row) == pytest.approx(flat(other[name]), rel=1e-4, abs=1e-6)
            continue
        assert one["num_rows"] == other["num_rows"] and one["num_tokens"] == other["num_tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def flat(value: object) -> dict[str, float]:
    """Numbers by their place; sums of several ranks are added in another order."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {f"{key}.{rest}": number for key, entry in inner for rest, number in flat(entry).items()}
    return {"": float(value)} if isinstance(value, int | float) else found


def test_the_first_rank_alone_tells_of_every_step(shared: Shared) -> None:
    _, told = shared.first["whole"]
    steps = [step for step, _ in told]
    assert sorted(set(steps)) == list(range(1, STEPS + 1)) and steps == sorted(steps)
    assert [(step, kind) for step, kind in told if kind == "evaluate"] == [(6, "evaluate"), (STEPS, "evaluate")]
    assert [step for step, kind in told if kind == "train"] == [5, 10, STEPS]
    assert shared.second["whole"][1] == []


def test_a_signal_to_one_rank_stops_all_at_the_same_border(shared: Shared) -> None:
    stopped = shared.run("stopped")
    outcome = Outcome(7, False, stopped.output / "checkpoints" / "step-0000007", None)
    assert shared.first["stopped"][0] == shared.second["stopped"][0] == outcome
    assert shared.first["resumed"][0].is_finished and shared.second["resumed"][0].is_finished
    whole = shared.run("whole")
    assert differs(state(stopped, STEPS), state(whole, STEPS)) == []
    assert exported(stopped)["model.safetensors"] == exported(whole)["model.safetensors"]
    assert timeless(stopped)[-1] == timeless(whole)[-1]


def test_another_number_of_ranks_resumes(shared: Shared) -> None:
    """Two ranks go on from what one saved, and one from what two saved."""
    assert shared.first["of one"][0].is_finished
    assert difference(shared.run("of-one"), shared.alone) < 2e-6
    run = shared.run("stopped-for-one")
    assert shared.first["stopped for one"][0].step == 7
    if not (run.output / "drafter").exists():
        assert train(run, small_target(), resume=True).is_finished
    assert difference(run, shared.alone) < 2e-6


def test_drafters_are_exported_on_the_way(shared: Shared) -> None:
    whole = shared.run("whole")
    assert sorted(path.name for path in (whole.output / "exports").iterdir()) == ["step-0000004", "step-0000008"]
    record = json.loads((whole.output / "exports" / "step-0000008" / "provenance.json").read_text())
    assert record["step"] == 8


def test_three_steps_that_are_not_finite_on_one_rank_end_all(shared: Shared) -> None:
    assert shared.first["poisoned"].startswith("NumericError: loss or gradient was not finite for 3 steps in a row")
    assert shared.second["poisoned"].startswith("OtherRankFailedError: rank 0 failed")
    run = shared.run("poisoned")
    (dump,) = run.output.glob("non-finite-step-*.json")
    ids = json.loads(dump.read_text())
    assert len(ids) == 1 and len(ids[0]) == 4, "the rows of all ranks"
    bad = [row["step"] for row in metrics(run) if row.get("num_bad_steps")]
    assert len(bad) == 3 and bad == list(range(bad[0], bad[0] + 3))


def test_a_failure_of_the_first_rank_is_one_of_all(shared: Shared) -> None:
    assert shared.first["full"] == "CapacityError: the disk is full"
    assert shared.second["full"].startswith("OtherRankFailedError: rank 0 failed")
    assert shared.first["uneven"].startswith("ConfigError: schedule.batch_size 3 cannot be shared")
    assert shared.second["uneven"].startswith("OtherRankFailedError")
    assert not (shared.folder / "uneven").exists()
    assert shared.first["again"].startswith("ConfigError") and "already holds a run" in shared.first["again"]
    assert shared.second["again"].startswith("OtherRankFailedError")


def test_the_target_stays_as_it_was(shared: Shared) -> None:
    assert shared.first["target"] and shared.second["target"]


def test_masters_are_saved_in_float32(shared: Shared) -> None:
    assert {value.dtype for value in state(shared.run("whole"), STEPS).values()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_three_ranks_resume_bitwise(tmp_path: Path, strategy: str) -> None:
    """Of three numbers, the order decides the last bits of the sum; new processes must add in the order of the old."""
    data = write_token_file(tmp_path / "data.npz", random_rows(40, 24, vocab_size=400), num_prompt_tokens=6)
    first = values(run_ranks(run_three, tmp_path / "ranks", tmp_path, data, strategy, False, size=3))
    assert first == [[STEPS, 7]] * 3
    rest = values(run_ranks(run_three, tmp_path / "new ranks", tmp_path, data, strategy, True, size=3))
    assert rest == [[STEPS]] * 3
    whole, parts = settings(tmp_path / "whole", data), settings(tmp_path / "parts", data)
    assert differs(state(whole, STEPS), state(parts, STEPS)) == []
