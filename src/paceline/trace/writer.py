"""Appends request traces to a JSONL file, one line per finished request, each line flushed as it is written."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from paceline.errors import CapacityError, DataError
from paceline.trace.step import RequestTrace

SCHEMA_VERSION = 1


def trace_to_json(trace: RequestTrace) -> str:
    """Give the line that stands for a trace, without its newline.

    Raises:
        DataError: a time is NaN or infinite.
    """
    try:
        return json.dumps({"schema": SCHEMA_VERSION, **asdict(trace)}, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise DataError(
            f"the trace of request {trace.request_id!r} holds a number that JSON has no word for: {error}"
        ) from error


class TraceWriter:
    """Appends to one trace file; use as a context manager.

    A line is there in full or not at all: when the disk fills up in the middle of one, the file is cut back to the
    line before.

    Args:
        path: made if missing, its folder too; appended to otherwise.

    Raises:
        DataError: the file ends inside a line, as a killed process leaves it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a write reaches the operating system or raises, and nothing is left to fail in close().
        self._file: BinaryIO = open(path, "ab+", buffering=0)  # noqa: SIM115, closed by close()
        self._size = self._file.seek(0, os.SEEK_END)
        if self._size > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.close()
                raise DataError(
                    f"{path} ends inside a line; an earlier run was stopped while it wrote",
                    hint="remove the last line, or write to a new file",
                )

    def write(self, trace: RequestTrace) -> None:
        """Append one finished request.

        Raises:
            CapacityError: the disk is full.
            DataError: a time in the trace is NaN or infinite.
        """
        line = memoryview((trace_to_json(trace) + "\n").encode())
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(self._size)
            if error.errno == errno.ENOSPC:
                raise CapacityError(
                    f"no space left for the trace of request {trace.request_id!r} ({len(line)} bytes)",
                    origin={"trace": self.path},
                    hint="free some space; the lines written so far are complete",
                ) from error
            raise
        self._size += len(line)

    def close(self) -> None:
        """Close the file; further writes fail."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
