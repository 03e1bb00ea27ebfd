"""Appends answers to a JSONL file, one line per finished request, each line flushed as it is written.

What the lines hold stands in `answer.py`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from paceline.errors import CapacityError, DataError
from paceline.trace.answer import PromptFacts, RunFacts
from paceline.trace.step import RequestTrace, StepRecord

SCHEMA_VERSION = 2


def trace_to_json(
    trace: RequestTrace, prompt: PromptFacts | None = None, tokens: Mapping[int, bytes] | None = None
) -> str:
    """Give the line that stands for an answer, without its newline.

    Args:
        trace: its steps.
        prompt: what was asked, if that is known.
        tokens: bytes of the tokens that it names, if they are known.

    Raises:
        DataError: a time is NaN or infinite.
    """
    values: dict[str, object] = {"schema": SCHEMA_VERSION, **vars(trace)}
    values["records"] = [_step_values(record) for record in trace.records]
    if prompt is not None:
        values["prompt"] = {key: value for key, value in asdict(prompt).items() if value is not None}
    if tokens:
        values["tokens"] = {str(token): _text_or_bytes(tokens[token]) for token in sorted(tokens)}
    return _line(values, f"the trace of request {trace.request_id!r}")


def run_to_json(run: RunFacts) -> str:
    """Give the line that stands for a run, without its newline.

    Args:
        run: plain JSON values.

    Raises:
        DataError: a number is NaN or infinite.
    """
    return _line({"schema": SCHEMA_VERSION, "kind": "run", "run": dict(run)}, "what is said of the run")


def _step_values(record: StepRecord) -> dict[str, object]:
    values = asdict(record)
    if record.details is None:
        del values["details"]
    return values


def _text_or_bytes(data: bytes) -> str | list[int]:
    """A token's text, or the bytes of one that is a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _line(values: Mapping[str, object], what: str) -> str:
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise DataError(f"{what} holds a number that JSON has no word for: {error}") from error


class TraceWriter:
    """Appends answers to one trace file; use as a context manager.

    A line is there in full or not at all: when the disk fills up in the middle of one, the file is cut back to the
    line before.

    Args:
        path: made if missing, its folder too; appended to otherwise.
        run: what its answers come from, written before the first of them; None says nothing.

    Raises:
        DataError: the file ends inside a line, as a killed process leaves it.
    """

    def __init__(self, path: Path, run: RunFacts | None = None) -> None:
        self.path, self._run = path, run
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

    def write(
        self, trace: RequestTrace, prompt: PromptFacts | None = None, tokens: Mapping[int, bytes] | None = None
    ) -> None:
        """Append one finished request.

        Args:
            trace: its steps.
            prompt: what was asked, if that is known.
            tokens: bytes of the tokens that it names, if they are known.

        Raises:
            CapacityError: the disk is full.
            DataError: a time in the trace is NaN or infinite.
        """
        text = trace_to_json(trace, prompt, tokens)
        if self._run is not None:
            self._append(run_to_json(self._run), "what is said of the run")
            self._run = None
        self._append(text, f"the trace of request {trace.request_id!r}")

    def _append(self, text: str, what: str) -> None:
        line = memoryview(f"{text}\n".encode())
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(self._size)
            if error.errno == errno.ENOSPC:
                raise CapacityError(
                    f"no space left for {what} ({len(line)} bytes)",
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
