"""What a drafter's folder says of its training data, over all runs that it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.checkpoint.training_record import num_held_out
from paceline.errors import CheckpointError


def write(folder: Path, record: object) -> Path:
    (folder / "provenance.json").write_text(json.dumps(record))
    return folder


def run(held_out: object, *hashes: str, **more: object) -> dict[str, object]:
    return {"data.hold_out": held_out, "data.files": {f"{h}.npz": h for h in hashes}, **more}


def test_the_least_that_any_run_held_out_counts(tmp_path: Path) -> None:
    folder = write(tmp_path, run(512, "a", "b", start=run(256, "b", "c", start=run(1024, "d"))))
    found = {name: num_held_out(folder, name) for name in "abcde"}
    assert found == {"a": 512, "b": 256, "c": 256, "d": 1024, "e": None}


@pytest.mark.parametrize("record", [{}, {"data.files": ["a"]}, run("many", "a"), {"start": 3}, {"conversions": []}])
def test_what_is_not_recorded_is_not_known(tmp_path: Path, record: object) -> None:
    assert num_held_out(tmp_path, "a") is None
    assert num_held_out(write(tmp_path, record), "a") is None


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds a JSON list"):
        num_held_out(write(tmp_path, [1]), "a")
