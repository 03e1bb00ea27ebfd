from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.trace.answer import TracedAnswer
from paceline.trace.reader import line_from_json, read_traces
from paceline.trace.step import RequestTrace, StepRecord
from paceline.trace.writer import trace_to_json

RECORD = StepRecord("r0", 0, 4, 1, (5, 6), 1, 1, (5, 8), 8, 2.25)
TRACE = RequestTrace("r0", 4, 1, [RECORD], "stop", 3.0, 12.5, True, "dflash/greedy")


@st.composite
def traces(draw: st.DrawFn) -> RequestTrace:
    name = draw(st.text(max_size=8))
    token = st.integers(0, 200_000)
    records = []
    for index in range(draw(st.integers(0, 4))):
        proposed = tuple(draw(st.lists(token, max_size=5)))
        verified = draw(st.integers(0, len(proposed)))
        kept = draw(st.integers(0, verified))
        bonus = draw(token) if kept == verified else None
        emitted = proposed[:kept] + (() if bonus is None else (bonus,))
        duration = draw(st.floats(0, 1e6))
        records.append(StepRecord(name, index, index, 1, proposed, verified, kept, emitted, bonus, duration))
    first, reason = draw(st.none() | token), draw(st.sampled_from([None, "stop", "length"]))
    return RequestTrace(name, draw(st.integers(0, 9)), first, records, reason, 0.5, 1e3, draw(st.booleans()), "é\n")


@given(traces())
def test_what_is_written_is_read(trace: RequestTrace) -> None:
    line = trace_to_json(trace)
    assert "\n" not in line
    assert line_from_json(line, place="here") == TracedAnswer(trace)


def changed(**changes: Any) -> str:
    values = json.loads(trace_to_json(TRACE))
    step_changes = changes.pop("step", {})
    values.update(changes)
    values["records"] = [{**step, **step_changes} for step in values["records"]] if values["records"] else []
    return json.dumps({key: value for key, value in values.items() if value != "gone"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"schema": 1, "requ', "is not JSON: .* at column"),
        ("[1]", "is not a JSON object but list"),
        ("\n", "is not JSON"),
        ('{"schema": ' + "1" * 5000 + "}", "is not JSON that can be read: .*4300 digits"),
        ("[" * 100_000, "is not JSON that can be read: .*recursion"),
        (changed(schema=3), "has trace schema 3; this version reads schemas 1 and 2"),
        (changed(schema=True), "has trace schema true|has trace schema True"),
        (changed(method="gone"), "lacks method"),
        (changed(speed=3), "has unknown speed"),
        (changed(lossless=1), "lossless should be true or false, found 1"),
        (changed(num_prompt_tokens=True), "num_prompt_tokens should be an integer, found true"),
        (changed(total_ms=-1), "total_ms should be a finite number >= 0, found -1"),
        (changed(first_token_id="a"), 'first_token_id should be an integer or null, found "a"'),
        (changed(step={"proposed_ids": [5, 6.5]}), r"step 0: proposed_ids should be a list of token ids"),
        (changed(step={"num_accepted": 2}), "step 0 of request 'r0' accepted 2, verified 1"),
        (changed(step={"request_id": "r9"}), "step 0 belongs to request 'r9', its line to 'r0'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(trace_to_json(TRACE) + "\n" + line + "\n")
    entries = read_traces(path)
    assert next(entries) == TRACE
    with pytest.raises(DataError, match=message) as caught:
        next(entries)
    assert f"{path}:2" in str(caught.value)


def test_filters_by_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    other = RequestTrace("r1", 4)
    path.write_text("".join(trace_to_json(entry) + "\n" for entry in (TRACE, other, TRACE)))
    assert list(read_traces(path, request_id="r1")) == [other]
    assert len(list(read_traces(path))) == 3


def test_a_missing_or_binary_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the trace file .*nothing\.jsonl"):
        list(read_traces(tmp_path / "nothing.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read the trace file"):
        list(read_traces(tmp_path / "binary"))
