"""The metrics file: whole rows, cut back to the resumed step, and a full disk is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.configuration.run import TrackingSettings
from paceline.errors import CapacityError, MissingExtraError
from paceline.training import event_file, tracking
from paceline.training.step import StepResult
from paceline.training.tracking import Meter, MetricsFile, open_sinks


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_readable_at_once(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append({"kind": "train", "step": 20, "loss": 1.5})
    assert rows(tmp_path / "metrics.jsonl") == [{"kind": "train", "step": 20, "loss": 1.5}]
    metrics.append({"kind": "evaluate", "step": 20})
    assert [row["kind"] for row in rows(tmp_path / "metrics.jsonl")] == ["train", "evaluate"]


def test_a_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 20}\n')
    MetricsFile(path)
    assert path.read_text() == ""


def test_a_resumed_run_keeps_rows_up_to_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 20}\n{"step": 40}\n{"kind": "evaluate", "step": 40}\n{"step": 60}\n')
    MetricsFile(path, resume_step=40).append({"step": 60, "new": True})
    assert rows(path) == [{"step": 20}, {"step": 40}, {"kind": "evaluate", "step": 40}, {"step": 60, "new": True}]


@pytest.mark.parametrize("tail", ['{"step": 4', "{", '{"step": 40, "loss": 1.'])
def test_a_line_cut_short_is_dropped(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 20}\n' + tail)
    MetricsFile(path, resume_step=100).append({"step": 40})
    assert rows(path) == [{"step": 20}, {"step": 40}]


def test_resuming_without_a_file_starts_one(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl", resume_step=5).append({"step": 6})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 6}]


def test_a_number_that_json_does_not_have_is_refused(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        metrics.append({"step": 1, "loss": float("nan")})
    assert rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_a_capacity_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(CapacityError, match="disk is full"):
        metrics.append({"step": 1})


# --- what a row says ---


def step_result(correct: list[int], counted: list[int], loss: float = 2.0, num_tokens: int = 10) -> StepResult:
    return StepResult(
        loss=torch.tensor(loss),
        gradient_norm=torch.tensor(0.5),
        correct_Q=torch.tensor(correct),
        counted_Q=torch.tensor(counted),
        is_finite=torch.tensor(loss == loss),
        num_tokens=num_tokens,
    )


def test_a_row_pools_counts_and_takes_no_mean_of_means() -> None:
    meter = Meter(0, 10)
    meter.add(
        step_result([0, 9, 1], [0, 10, 2]), {"num_anchors": torch.tensor(10), "num_dummy_anchors": torch.tensor(0)}
    )
    meter.add(step_result([0, 0, 0], [0, 2, 0]), {"num_anchors": torch.tensor(2), "num_dummy_anchors": torch.tensor(8)})
    row = meter.row(2, 1e-3)
    assert row["correct_by_row"] == [9, 1]
    assert row["counted_by_row"] == [12, 2]
    assert row["accuracy_by_row"] == [0.75, 0.5]  # the mean of both steps would be 0.45
    assert (row["num_anchors"], row["num_dummy_anchors"], row["num_tokens"], row["num_rows"]) == (12, 8, 20, 14)
    json.dumps(row, allow_nan=False)


def test_the_next_row_begins_at_nothing() -> None:
    meter = Meter(0, 10)
    meter.add(step_result([0, 1], [0, 1]))
    meter.row(1, 1e-3)
    meter.add(step_result([0, 0], [0, 4]))
    assert meter.row(2, 1e-3)["accuracy_by_row"] == [0.0]


def test_ranks_meet_once_per_row_with_all_counts() -> None:
    calls: list[Tensor] = []

    def total(sums: Tensor) -> Tensor:
        calls.append(sums)
        return sums + torch.tensor([0.0, 0.0, 0.0, 30.0, 40.0, 5.0], dtype=torch.float64)  # the other rank's

    meter = Meter(0, 10, total=total)
    meter.add(step_result([0, 1], [0, 1]), {"num_anchors": torch.tensor(3)})
    row = meter.row(1, 1e-3)
    assert len(calls) == 1
    assert calls[0].dtype == torch.float64
    assert (row["counted_by_row"], row["num_tokens"], row["num_anchors"]) == ([31], 50, 8)


def test_a_step_without_a_finite_loss_is_counted_and_not_averaged() -> None:
    meter = Meter(0, 10)
    meter.add(step_result([0, 1], [0, 1], loss=3.0))
    meter.add(step_result([0, 1], [0, 1], loss=float("nan")))
    row = meter.row(2, 1e-3)
    assert (row["loss"], row["num_bad_steps"], row["num_steps"]) == (3.0, 1, 2)


def test_speed_and_time_left_are_those_of_the_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An evaluation of 50 seconds makes no step slow; what is left goes on to cost such pauses."""
    clock = [100.0]
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: clock[0])
    meter = Meter(10, 20)
    found = []
    for step in (12, 14):
        for _ in range(2):
            clock[0] += 2.0
            meter.add(step_result([0, 1], [0, 1], num_tokens=30))
        with caplog.at_level("INFO"):
            found.append(meter.row(step, 1e-3))
        with meter.paused():
            clock[0] += 50.0
    assert [(row["seconds"], row["num_tokens"], row["tokens_per_second"]) for row in found] == [(4.0, 60, 15.0)] * 2
    left = [record.getMessage().rsplit(" tok/s, ", 1)[1] for record in caplog.records]
    assert left == ["16 s left", "87 s left"]  # 8 steps at 4 s for 2; 6 steps at 58 s for 4


# --- every place that rows go to ---


def events(folder: Path) -> list[tuple[int, str, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    (file,) = folder.iterdir()
    read = accumulator.LegacyEventFileLoader(str(file)).Load()
    return [(event.step, value.tag, value.simple_value) for event in read for value in event.summary.value]


def test_without_tensorboard_there_is_one_file(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, TrackingSettings(), None)
    sinks.append({"kind": "train", "step": 1, "loss": 1.5})
    sinks.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert len(rows(tmp_path / "metrics.jsonl")) == 1


def test_the_event_file_is_read_by_tensorboard_and_a_resume_cuts_it_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = TrackingSettings(tensorboard=True)
    sinks = open_sinks(tmp_path, settings, None)
    for step in (20, 40, 60):
        sinks.append({"kind": "train", "step": step, "loss": step / 10, "accuracy_by_row": [0.5, None]})
    sinks.append({"kind": "evaluate", "step": 60, "chats.npz": {"acceptance_length": 2.5}})
    sinks.close()
    file = tmp_path / "tensorboard" / "events.out.tfevents.paceline"
    file.write_bytes(file.read_bytes()[:-3])  # the process was killed in the middle of a write
    sinks = open_sinks(tmp_path, settings, 40)
    sinks.append({"kind": "train", "step": 60, "loss": 9.0})
    assert events(tmp_path / "tensorboard") == [
        (20, "train/loss", 2.0),
        (20, "train/accuracy_by_row/1", 0.5),
        (40, "train/loss", 4.0),
        (40, "train/accuracy_by_row/1", 0.5),
        (60, "train/loss", 9.0),
    ]
    open_sinks(tmp_path, settings, None)
    assert events(tmp_path / "tensorboard") == []


def test_without_the_package_nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n')
    monkeypatch.setattr(event_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="tensorboard") as error:
        open_sinks(tmp_path, TrackingSettings(tensorboard=True), None)
    assert "paceline[train]" in str(error.value)
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 20}]


def test_event_files_need_no_tensorflow(tmp_path: Path) -> None:
    """A tensorflow that is installed by chance takes seconds to import and writes a page of its own."""
    pytest.importorskip("tensorboard")
    code = (
        "import sys; from pathlib import Path; from paceline.training.event_file import EventFile;"
        f"EventFile(Path({str(tmp_path)!r})).append({{'kind': 'train', 'step': 1, 'loss': 1.0}});"
        "sys.exit('tensorflow' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
