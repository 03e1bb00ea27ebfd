"""The metrics file: whole rows, cut back to the resumed step, and a full disk is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import CapacityError
from paceline.training.tracking import MetricsFile


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
