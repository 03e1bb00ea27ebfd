"""Metrics of a run as one JSON object per line; a resumed run first drops what lies past its checkpoint."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint.weights import disk_full_as_capacity_error, write_text_atomic


class MetricsFile:
    """Appends rows to `metrics.jsonl`, flushed one by one.

    Args:
        path: the file; its folder exists.
        resume_step: keep only rows up to this step of an earlier attempt; None starts afresh.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._path = path
        kept = _rows_up_to(path, resume_step) if resume_step is not None else []
        write_text_atomic(path, "".join(line + "\n" for line in kept))

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row; it is on its way to disk when this returns.

        Raises:
            CapacityError: the disk is full.
        """
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        with disk_full_as_capacity_error(self._path), self._path.open("ab", buffering=0) as file:
            whole = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                with contextlib.suppress(OSError):  # a device cannot be cut back
                    file.truncate(whole)
                raise


def _rows_up_to(path: Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break  # a line cut short by the end of the earlier attempt
        if row["step"] <= step:
            kept.append(line)
    return kept
