from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.errors import CapacityError, DataError
from paceline.trace.reader import read_traces
from paceline.trace.step import RequestTrace, StepRecord
from paceline.trace.writer import TraceWriter, trace_to_json


def trace(request_id: str = "r0", *, total_ms: float = 12.5) -> RequestTrace:
    record = StepRecord(request_id, 0, 4, 1, (5, 6), 1, 1, (5, 8), 8, 2.25)
    return RequestTrace(request_id, 4, 1, [record], "stop", 3.0, total_ms, True, "dflash/greedy")


def test_each_line_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "trace.jsonl"
    with TraceWriter(path) as writer:
        for number in range(3):
            writer.write(trace(f"r{number}"))
            assert len(path.read_text().splitlines()) == number + 1
    assert [entry.request_id for entry in read_traces(path)] == ["r0", "r1", "r2"]


def test_appends_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for name in ("a", "b"):
        with TraceWriter(path) as writer:
            writer.write(trace(name))
    assert [entry.request_id for entry in read_traces(path)] == ["a", "b"]


def test_a_torn_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(trace_to_json(trace()) + "\n" + trace_to_json(trace())[:40])
    before = path.read_bytes()
    with pytest.raises(DataError, match="ends inside a line"):
        TraceWriter(path)
    assert path.read_bytes() == before


class FullDisk:
    """Takes a few bytes of the second line, then nothing."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 30

    def write(self, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return int(taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as writer:
        writer.write(trace("r0"))
        whole_file = writer._file
        writer._file = cast(Any, FullDisk(whole_file))
        with pytest.raises(CapacityError, match="no space left for the trace of request 'r1'"):
            writer.write(trace("r1"))
        writer._file = whole_file
        writer.write(trace("r2"))
    assert [entry.request_id for entry in read_traces(path)] == ["r0", "r2"]


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(DataError, match="'r0' holds a number that JSON has no word for"):
        trace_to_json(trace(total_ms=math.nan))


def test_keys_are_the_field_names() -> None:
    values = json.loads(trace_to_json(trace()))
    assert set(values) == {"schema", *RequestTrace.__dataclass_fields__}
    assert set(values["records"][0]) == set(StepRecord.__dataclass_fields__) - {"details"}, "nobody asked for any"
