"""Reads trace files line by line and refuses what is not one, naming file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.errors import DataError
from paceline.trace.step import RequestTrace, StepRecord
from paceline.trace.writer import SCHEMA_VERSION


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


class _Kind(NamedTuple):
    description: str
    accepts: Callable[[object], bool]

    def or_null(self) -> _Kind:
        return _Kind(f"{self.description} or null", lambda value: value is None or self.accepts(value))


_INTEGER = _Kind("an integer", _is_integer)
_DURATION = _Kind("a finite number >= 0", _is_duration)
_TEXT = _Kind("text", lambda value: isinstance(value, str))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_IDS = _Kind("a list of token ids", lambda value: isinstance(value, list) and all(map(_is_integer, value)))

_STEP_FIELDS = {
    "request_id": _TEXT,
    "step_index": _INTEGER,
    "anchor_position": _INTEGER,
    "anchor_id": _INTEGER,
    "proposed_ids": _IDS,
    "num_verified_accepted": _INTEGER,
    "num_accepted": _INTEGER,
    "emitted_ids": _IDS,
    "bonus_id": _INTEGER.or_null(),
    "step_ms": _DURATION,
}
_REQUEST_FIELDS = {
    "request_id": _TEXT,
    "num_prompt_tokens": _INTEGER,
    "first_token_id": _INTEGER.or_null(),
    "records": _LIST,
    "finish_reason": _TEXT.or_null(),
    "prefill_ms": _DURATION,
    "total_ms": _DURATION,
    "lossless": _FLAG,
    "method": _TEXT,
}


def read_traces(path: Path, *, request_id: str | None = None) -> Iterator[RequestTrace]:
    """Read the traces of a file, one at a time.

    Args:
        path: a JSONL file from `TraceWriter`.
        request_id: give only this request's traces; the other lines are checked all the same.

    Raises:
        DataError: the file cannot be read, or a line is not a trace; the message names `file:line`.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                trace = trace_from_json(line, place=f"{path}:{number}")
                if request_id is None or trace.request_id == request_id:
                    yield trace
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the trace file {path}: {error}", hint="check the path; a trace file is JSONL in UTF-8"
        ) from error


def trace_from_json(line: str, *, place: str) -> RequestTrace:
    """Parse and check one line.

    Args:
        line: the JSON text.
        place: where it stands, for the error message.

    Raises:
        DataError: not JSON, of another schema, a key missing, unknown or of the wrong type, or counts that contradict.
    """
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place} is not JSON: {error.msg} at column {error.colno}",
            hint="remove this line; a run that was stopped while it wrote leaves a torn last line",
        ) from error
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise DataError(f"{place} is not JSON that can be read: {error}", hint="remove this line") from error
    if not isinstance(values, dict):
        raise DataError(f"{place} is not a JSON object but {type(values).__name__}")
    schema = values.pop("schema", None)
    if schema != SCHEMA_VERSION:
        raise DataError(f"{place} has trace schema {schema!r}; this version reads schema {SCHEMA_VERSION}")
    _check_fields(values, _REQUEST_FIELDS, place)
    steps = values.pop("records")
    try:
        records = [_step(step, f"{place}, step {index}") for index, step in enumerate(steps)]
    except DataError as error:
        if error.message.startswith(place):
            raise
        raise DataError(f"{place}: {error.message}", hint=error.hint) from error
    for record in records:
        if record.request_id != values["request_id"]:
            raise DataError(
                f"{place}: step {record.step_index} belongs to request {record.request_id!r}, "
                f"its line to {values['request_id']!r}"
            )
    return RequestTrace(records=records, **values)


def _step(values: object, place: str) -> StepRecord:
    if not isinstance(values, dict):
        raise DataError(f"{place} is not a JSON object but {type(values).__name__}")
    _check_fields(values, _STEP_FIELDS, place)
    ids = {key: tuple(values[key]) for key in ("proposed_ids", "emitted_ids")}
    return StepRecord(**{**values, **ids})


def _check_fields(values: Mapping[str, object], fields: Mapping[str, _Kind], place: str) -> None:
    missing, unknown = sorted(set(fields) - set(values)), sorted(set(values) - set(fields))
    if missing or unknown:
        parts = [f"{word} {', '.join(keys)}" for word, keys in (("lacks", missing), ("has unknown", unknown)) if keys]
        raise DataError(f"{place} {' and '.join(parts)}")
    for key, kind in fields.items():
        if not kind.accepts(values[key]):
            raise DataError(f"{place}: {key} should be {kind.description}, found {json.dumps(values[key])[:80]}")
