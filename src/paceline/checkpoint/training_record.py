"""What `provenance.json` says of the runs that a drafter comes from: which files they read and what they held out.

Training writes the record (`training/provenance.py`); going on from a drafter and measuring one read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.checkpoint.export import PROVENANCE_FILE
from paceline.checkpoint.locate import read_json


def recorded_runs(history: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """A record and those of the runs before it."""
    while history:
        yield history
        before = history.get("start")
        history = before if isinstance(before, Mapping) else {}


def data_of_run(record: Mapping[str, object]) -> tuple[Mapping[str, str], int] | None:
    """SHA-256 of a run's data files by name, and how many conversations at the end of each it held out.

    None where the record does not say it, as that of a converted drafter from elsewhere.
    """
    files, held_out = record.get("data.files"), record.get("data.hold_out")
    if isinstance(files, Mapping) and isinstance(held_out, int):
        return files, held_out
    return None


def num_held_out(folder: Path, sha256: str) -> int | None:
    """How many conversations at the end of a data file no run of a drafter has learnt.

    Args:
        folder: of the drafter.
        sha256: of the file.
    Returns:
        None where no recorded run has read the file, or nothing is recorded.
    Raises:
        CheckpointError: the record is no JSON object.
    """
    file = folder / PROVENANCE_FILE
    data = map(data_of_run, recorded_runs(read_json(file) if file.is_file() else {}))
    kept = [held_out for files, held_out in filter(None, data) if sha256 in files.values()]
    return min(kept, default=None)
