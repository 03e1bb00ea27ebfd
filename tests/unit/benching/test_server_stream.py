"""Streams of both kinds of completion, read line by line at made-up times."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from paceline.benching.server_stream import HeardAnswer, complaint, drafting_of, hear_stream, lines_of, shortened
from paceline.errors import ServerError
from paceline.trace.acceptance import DraftTotals


def data(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}"


def chat(content: str | None = None, finish_reason: str | None = None, **delta: Any) -> str:
    told = ({} if content is None else {"content": content}) | delta
    return data(choices=[{"index": 0, "delta": told, "finish_reason": finish_reason}])


def hear(lines: Sequence[str]) -> HeardAnswer:
    ticks = itertools.count(1)

    async def told() -> AsyncIterator[str]:
        for line in lines:
            yield line

    return asyncio.run(hear_stream(told(), clock=lambda: float(next(ticks))))


def test_a_chat() -> None:
    told = {"acceptance_histogram": [1, 0, 1], "num_draft_tokens": 4}
    heard = hear(
        [
            ": ping",
            chat("", role="assistant"),  # tick 1: a role is no output
            "",
            chat("Pa"),
            "event: message",
            chat("ris"),
            chat(finish_reason="stop"),
            data(
                choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3}, metrics={"speculative_decoding": told}
            ),
            "data: [DONE]",
            "data: what comes behind is not read",
        ]
    )
    assert heard.delta_s == [2.0, 3.0] and heard.last_s == 4.0  # usage comes later, and is no part of the answer
    assert (heard.text, heard.finish_reason) == ("Paris", "stop")
    assert (heard.num_prompt_tokens, heard.num_tokens) == (9, 3)
    assert heard.drafting == DraftTotals(2, 4, 2, (1, 1), None)


def test_reasoning_and_calls_are_output() -> None:
    heard = hear([chat(reasoning_content="hm"), chat(tool_calls=[{"index": 0}]), chat(finish_reason="tool_calls")])
    assert heard.delta_s == [1.0, 2.0] and heard.text.startswith("hm[")


def test_a_completion_without_usage() -> None:
    heard = hear(['data:{"choices":[{"text":"a","finish_reason":"length"}]}', "data: [DONE]"])
    assert (heard.text, heard.num_tokens, heard.drafting, heard.delta_s) == ("a", None, None, [1.0])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([chat("a")], "ended before its answer did"),
        ([chat("a"), "data: [DONE]"], "ended before its answer did"),
        ([], "ended before its answer did"),
        ([chat("a"), data(error={"message": "the engine is dead"})], "mid-stream: the engine is dead"),
        (["data: {oops"], "not JSON: {oops"),
        (["data: 3"], "no object: 3"),
    ],
)
def test_streams_that_are_no_answer(lines: list[str], said: str) -> None:
    with pytest.raises(ServerError, match=said):
        hear(lines)


def test_steps_are_counted_one_by_one_where_they_are_told() -> None:
    told = {"acceptance_histogram": [1, 0, 1], "num_draft_tokens": 4, "num_spec_steps": 2}
    detailed = told | {"per_step_accepted": [2, 0], "per_step_drafted": [3, 1]}
    assert drafting_of(detailed) == DraftTotals(2, 4, 2, (1, 1, 0), (2, 1, 1))
    assert drafting_of(detailed | {"per_step_drafted": [3]}) == DraftTotals(2, 4, 2, (1, 1), None)
    for nothing in (
        None,
        [],
        {},
        {"acceptance_histogram": [1.5], "num_draft_tokens": 1},
        {"acceptance_histogram": [1]},
    ):
        assert drafting_of(nothing) is None


def test_what_servers_say_of_faults() -> None:
    assert complaint({"error": {"message": "too long", "code": 400}}) == "too long"
    assert complaint({"error": "too long"}) == complaint("too long") == "too long"
    assert complaint({"detail": [1]}) == '{"detail": [1]}'
    assert shortened("a\n b") == "a b" and len(shortened("x" * 999)) == 304


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_end_at_line_feeds_alone(size: int) -> None:
    """A text may hold a line separator of Unicode as it is; who splits there breaks its chunk in two."""
    body = "data: a\u2028b\x85c\r\n\ndata: ü\nlast".encode()

    async def read() -> list[str]:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), size):
                yield body[start : start + size]

        return [line async for line in lines_of(pieces())]

    assert asyncio.run(read()) == ["data: a\u2028b\x85c", "", "data: ü", "last"]
