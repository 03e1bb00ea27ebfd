"""Reads trace files line by line and refuses what is not one, naming file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from paceline.errors import DataError
from paceline.trace.answer import PromptFacts, RunFacts, TracedAnswer
from paceline.trace.step import RequestTrace, StepDetails, StepRecord

_SCHEMAS = (1, 2)
_LARGEST = 1e12  # milliseconds are 30 years; sums of such numbers are numbers


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_integer(value[0]) and _is_number(value[1])


def _is_duration(value: object) -> bool:
    return _is_number(value) and isinstance(value, int | float) and value >= 0


class _Kind(NamedTuple):
    description: str
    accepts: Callable[[object], bool]

    def or_null(self) -> _Kind:
        return _Kind(f"{self.description} or null", lambda value: value is None or self.accepts(value))


_INTEGER = _Kind("an integer", _is_integer)
_DURATION = _Kind("a finite number >= 0", _is_duration)
_TEXT = _Kind("text", lambda value: isinstance(value, str))
_TABLE = _Kind("an object", lambda value: isinstance(value, dict))
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
_NUMBERS = _Kind("a list of finite numbers", lambda value: isinstance(value, list) and all(map(_is_number, value)))
_TOP = _Kind(
    "a list of lists of pairs of token id and number",
    lambda value: isinstance(value, list) and all(isinstance(row, list) and all(map(_is_pair, row)) for row in value),
)
_DETAIL_FIELDS = {
    "draft_logprobs": _NUMBERS,
    "draft_entropies": _NUMBERS,
    "confidences": _NUMBERS,
    "target_logprobs": _NUMBERS,
    "target_entropies": _NUMBERS,
    "target_top": _TOP,
    "bonus_logprob": _Kind("a finite number", lambda value: _is_number(value)).or_null(),
    "verify_ms": _DURATION,
    "sampling_ms": _DURATION,
    "draft_ms": _DURATION,
    "host_ms": _DURATION,
}
_PROMPT_FIELDS = {"id": _TEXT}
_OPTIONAL_PROMPT_FIELDS = {
    "set": _TEXT,
    "category": _TEXT,
    "turn": _INTEGER,
    "sample_index": _INTEGER,
    "seed": _INTEGER,
    "sha256": _TEXT,
    "text": _TEXT,
}


def read_traces(path: Path, *, request_id: str | None = None) -> Iterator[RequestTrace]:
    """Read the steps of a file's answers, one answer at a time.

    Args:
        path: a JSONL file from `TraceWriter`.
        request_id: give only this request's traces; the other lines are checked all the same.

    Raises:
        DataError: as `read_answers`.
    """
    for answer in read_answers(path):
        if request_id is None or answer.trace.request_id == request_id:
            yield answer.trace


def read_answers(path: Path) -> Iterator[TracedAnswer]:
    """Read the answers of a file, one at a time.

    Args:
        path: a JSONL file from `TraceWriter`, of this version or an earlier one.

    Raises:
        DataError: the file cannot be read, or a line is not a trace; the message names `file:line`.
    """
    run: RunFacts | None = None
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                found = line_from_json(line, place=f"{path}:{number}")
                if isinstance(found, TracedAnswer):
                    yield replace(found, run=run)
                else:
                    run = found
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the trace file {path}: {error}", hint="check the path; a trace file is JSONL in UTF-8"
        ) from error


def line_from_json(line: str, *, place: str) -> TracedAnswer | RunFacts:
    """Parse and check one line, of an answer or of a run.

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
    if schema not in _SCHEMAS or isinstance(schema, bool):
        raise DataError(
            f"{place} has trace schema {schema!r}; this version reads schemas {' and '.join(map(str, _SCHEMAS))}"
        )
    if schema > 1 and values.get("kind") == "run":
        _check_fields(values, {"kind": _TEXT, "run": _TABLE}, place)
        run: RunFacts = values["run"]
        return run
    return _answer(values, place, {"prompt": _TABLE, "tokens": _TABLE} if schema > 1 else {})


def _answer(values: dict[str, Any], place: str, optional: Mapping[str, _Kind]) -> TracedAnswer:
    _check_fields(values, _REQUEST_FIELDS, place, optional)
    prompt, tokens = values.pop("prompt", None), values.pop("tokens", {})
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
    return TracedAnswer(
        RequestTrace(records=records, **values),
        None if prompt is None else _prompt(prompt, f"{place}, prompt"),
        _tokens(tokens, f"{place}, tokens"),
    )


def _step(values: object, place: str) -> StepRecord:
    if not isinstance(values, dict):
        raise DataError(f"{place} is not a JSON object but {type(values).__name__}")
    _check_fields(values, _STEP_FIELDS, place, {"details": _TABLE})
    ids = {key: tuple(values[key]) for key in ("proposed_ids", "emitted_ids")}
    details = {"details": _details(values["details"], f"{place}, details")} if "details" in values else {}
    return StepRecord(**{**values, **ids, **details})


def _details(values: dict[str, Any], place: str) -> StepDetails:
    _check_fields(values, _DETAIL_FIELDS, place)
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    top = tuple(tuple((token, logprob) for token, logprob in row) for row in values["target_top"])
    return StepDetails(**{**values, **lists, "target_top": top})


def _prompt(values: dict[str, Any], place: str) -> PromptFacts:
    _check_fields(values, _PROMPT_FIELDS, place, _OPTIONAL_PROMPT_FIELDS)
    return PromptFacts(**values)


def _tokens(values: Mapping[str, object], place: str) -> dict[int, bytes]:
    tokens: dict[int, bytes] = {}
    for key, value in values.items():
        data: bytes | None = None
        if isinstance(value, str):
            data = value.encode("utf-8", errors="replace")
        elif isinstance(value, list) and all(_is_integer(byte) and 0 <= byte < 256 for byte in value):
            data = bytes(value)
        if data is None or not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise DataError(f"{place}: {key!r} should be a token id with a text or a list of bytes")
        tokens[int(key)] = data
    return tokens


def _check_fields(
    values: Mapping[str, object],
    fields: Mapping[str, _Kind],
    place: str,
    optional: Mapping[str, _Kind] = MappingProxyType({}),
) -> None:
    missing, unknown = sorted(set(fields) - set(values)), sorted(set(values) - set(fields) - set(optional))
    if missing or unknown:
        parts = [f"{word} {', '.join(keys)}" for word, keys in (("lacks", missing), ("has unknown", unknown)) if keys]
        raise DataError(f"{place} {' and '.join(parts)}")
    for key, kind in (*fields.items(), *optional.items()):
        if key in values and not kind.accepts(values[key]):
            raise DataError(f"{place}: {key} should be {kind.description}, found {json.dumps(values[key])[:80]}")
