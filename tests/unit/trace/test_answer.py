"""Schema 2: what was asked, what tokens read as, of which run, and details of steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.trace.answer import PromptFacts, TracedAnswer, hash_ids, ids_of
from paceline.trace.reader import line_from_json, read_answers, read_traces
from paceline.trace.step import RequestTrace, StepDetails, StepRecord
from paceline.trace.writer import TraceWriter, trace_to_json

DETAILS = StepDetails(
    (-0.5, -1.0),
    (0.1, 0.2),
    (0.9, 0.8),
    (-0.25, -100.0),
    (0.5, 0.75),
    (((5, -0.25), (7, -2.0)), ((8, -0.1),)),
    -0.1,
    6.0,
)
RECORD = StepRecord("r0", 0, 4, 1, (5, 6), 1, 1, (5, 8), 8, 2.25, DETAILS)
TRACE = RequestTrace("r0", 4, 1, [RECORD], "stop", 3.0, 12.5, True, "dflash/greedy")
PROMPT = PromptFacts("q", "first", "prose", 1, 2, 3, hash_ids([1, 2]), "why?\n")
TOKENS = {1: b" a", 5: "é".encode(), 6: b"\xc3", 8: b"<b>"}
RUN = {"command": "paceline generate", "versions": {"paceline": "1"}}


def test_an_answer_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, RUN) as writer:
        writer.write(TRACE, PROMPT, TOKENS)
    with TraceWriter(path) as writer:  # another run, which says nothing of itself
        writer.write(TRACE)
    first, second = read_answers(path)
    assert first == TracedAnswer(TRACE, PROMPT, TOKENS, RUN)
    assert second == TracedAnswer(TRACE, None, {}, RUN), "up to the next run that does"
    assert list(read_traces(path)) == [TRACE, TRACE]
    assert [json.loads(line).get("kind") for line in path.read_text().splitlines()] == ["run", None, None]


def test_a_run_that_answers_nothing_leaves_no_line(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.jsonl", RUN):
        pass
    assert (tmp_path / "trace.jsonl").read_text() == ""


def test_files_of_schema_1_are_read(tmp_path: Path) -> None:
    plain = replace(TRACE, records=[replace(RECORD, details=None)])
    values = {**json.loads(trace_to_json(plain)), "schema": 1}
    assert line_from_json(json.dumps(values), place="here") == TracedAnswer(plain)
    with pytest.raises(DataError, match="has unknown prompt"):
        line_from_json(json.dumps({**values, "prompt": {"id": "q"}}), place="here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": {"id": 3}}, "prompt: id should be text, found 3"),
        ({"prompt": {}}, "prompt lacks id"),
        ({"prompt": {"id": "q", "colour": 1}}, "prompt has unknown colour"),
        ({"prompt": {"id": "q", "seed": "x"}}, "seed should be an integer"),
        ({"tokens": {"five": "a"}}, "'five' should be a token id with a text or a list of bytes"),
        ({"tokens": {"5": [256]}}, "'5' should be a token id"),
        ({"tokens": []}, "tokens should be an object"),
        (
            {"details": {"confidences": [float("nan")]}},
            "step 0, details: confidences should be a list of finite numbers",
        ),
        ({"details": {"target_top": [[[1, 2, 3]]]}}, "target_top should be a list of lists of pairs"),
        ({"details": {"verify_ms": -1}}, "verify_ms should be a finite number >= 0"),
        ({"details": {"speed": 1}}, "details has unknown speed"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    values = json.loads(trace_to_json(TRACE, PROMPT, TOKENS))
    if "details" in changes:
        values["records"][0]["details"] |= changes["details"]
    else:
        values |= changes
    with pytest.raises(DataError, match=message):
        line_from_json(json.dumps(values), place="here")


def test_a_run_has_to_be_a_table() -> None:
    with pytest.raises(DataError, match="run should be an object"):
        line_from_json('{"schema": 2, "kind": "run", "run": 3}', place="here")


def test_text_comes_from_bytes_or_is_an_id() -> None:
    known = TracedAnswer(TRACE, PROMPT, TOKENS)
    assert known.decode([1, 5, 8]) == " aé<b>"
    assert known.decode([6]) == "\ufffd"
    assert known.decode([77]) == "<77>"


def test_names_and_ids() -> None:
    assert TracedAnswer(TRACE, PROMPT).name == "q, turn 1, sample 2"
    assert TracedAnswer(TRACE).name == "r0"
    assert ids_of(TRACE) == {1, 5, 6, 7, 8}
    assert hash_ids([1, 2]) != hash_ids([12])


def test_plain_answers_are_told_from_drafted_ones() -> None:
    assert not TracedAnswer(TRACE).is_plain
    assert TracedAnswer(replace(TRACE, method="plain")).is_plain
    assert TracedAnswer(replace(TRACE, records=[StepRecord("r0", 0, 4, 1, (), 0, 0, (8,), 8, 2.0)])).is_plain
    assert not TracedAnswer(replace(TRACE, records=[])).is_plain, "one token, of a method that drafts"
