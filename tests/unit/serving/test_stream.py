"""Frames of a stream: their order and form, silence, failures in the middle, and readers that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from tests.served import byte_level_tokenizer

from paceline.checkpoint.answer_parts import PlainText
from paceline.checkpoint.think_tags import ThinkTags
from paceline.engine.request import RequestDelta, RequestResult, TokenLogprobs
from paceline.errors import NumericError
from paceline.serving.answers import usage_of
from paceline.serving.call_forms import HERMES_TAGS
from paceline.serving.call_reader import CallReader
from paceline.serving.samples import Event
from paceline.serving.stream import DONE, PING, ChunkWriter, EventStream, frame, frames_of, kept_alive
from paceline.serving.token_texts import TokenTexts
from paceline.trace.step import RequestTrace

HEAD = {"id": "x-1", "object": "chat.completion.chunk", "created": 5, "model": "tiny"}


def writer(**changes: Any) -> ChunkWriter:
    values: dict[str, Any] = {
        "head": HEAD,
        "is_chat": True,
        "texts": TokenTexts(byte_level_tokenizer()),
        "hidden_ids": frozenset({2}),
        "num_prompt_tokens": (3,),
    }
    return ChunkWriter(**(values | changes))


def delta(text: str, ids: Sequence[int] = (9,), reason: Any = None, *, has_logprobs: bool = False) -> RequestDelta:
    entries = tuple(TokenLogprobs(token, -0.5, (), "raw") for token in ids) if has_logprobs else None
    return RequestDelta("r", tuple(ids), text, reason, None, entries)


def result(ids: Sequence[int] = (9, 9), reason: Any = "length", stop_reason: Any = None) -> RequestResult:
    return RequestResult("r", (4, 5, 6), tuple(ids), "text", reason, stop_reason, RequestTrace("r", 3))


async def replay(events: Sequence[Event | Exception]) -> AsyncGenerator[Event, None]:
    for event in events:
        if isinstance(event, Exception):
            raise event
        yield event


def told(events: Sequence[Event | Exception], made: ChunkWriter) -> list[Any]:
    """What a reader gets: parsed frames, and "[DONE]"."""

    async def read() -> bytes:
        frames = frames_of(
            replay(events),
            made,
            lambda results: usage_of(results, made.n),
            lambda _results: {"metrics": 1},
            lambda error: {"error": {"message": str(error)}},
        )
        return b"".join([data async for data in frames])

    *lines, rest = asyncio.run(read()).decode().split("\n\n")
    assert rest == "" and all(line.startswith("data: ") for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def test_a_choice_begins_with_its_role_and_ends_with_a_reason() -> None:
    found = told(
        [(0, delta("Hi", (8, 9))), (0, delta("", (7,))), (0, delta("!", (1,), "length")), (0, result())], writer()
    )
    assert found[-1] == "[DONE]"
    assert all({key: chunk[key] for key in HEAD} == HEAD for chunk in found[:-1])
    assert [chunk["choices"] for chunk in found[:-1]] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "!"}, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "length"}],
    ]
    assert not any("usage" in chunk for chunk in found[:-1])


def test_a_completion_has_no_role() -> None:
    found = told([(0, delta("Hi", reason="stop")), (0, result(reason="stop", stop_reason="!"))], writer(is_chat=False))
    assert [chunk["choices"][0] for chunk in found[:-1]] == [
        {"index": 0, "text": "Hi", "finish_reason": None},
        {"index": 0, "text": "", "finish_reason": "stop", "stop_reason": "!"},
    ]


def test_choices_of_several_prompts_keep_their_index() -> None:
    events: list[Event] = [(1, delta("b")), (0, delta("a")), (1, result()), (0, result())]
    found = told(events, writer(is_chat=False, num_prompt_tokens=(3, 3), includes_usage=True))
    assert [chunk["choices"][0]["index"] for chunk in found[:4]] == [1, 0, 1, 0]
    assert found[4]["choices"] == [] and found[4]["metrics"] == 1
    assert found[4]["usage"]["prompt_tokens"] == 6 and found[4]["usage"]["completion_tokens"] == 4
    assert [chunk["usage"] for chunk in found[:4]] == [None] * 4


def test_usage_of_every_chunk_counts_up() -> None:
    events: list[Event] = [(0, delta("a", (1, 2))), (0, delta("b", (3,))), (0, result())]
    found = told(events, writer(has_usage_everywhere=True, includes_usage=True))
    counts = [chunk["usage"]["completion_tokens"] for chunk in found[:-1]]
    assert counts == [2, 2, 3, 3, 2]
    assert all(chunk["usage"]["total_tokens"] == 3 + count for chunk, count in zip(found, counts, strict=False))


def test_log_probabilities_come_with_tokens_whose_text_is_held_back() -> None:
    events: list[Event] = [
        (0, delta("", (20,), has_logprobs=True)),
        (0, delta("ab", (30,), has_logprobs=True)),
        (0, delta("", (2,), "stop", has_logprobs=True)),
        (0, result(reason="stop", stop_reason=2)),
    ]
    found = told(events, writer())
    told_of = [chunk["choices"][0].get("logprobs") for chunk in found[:-1]]
    assert [None if each is None else len(each["content"]) for each in told_of] == [None, 1, 1, None]
    in_completions = told(events, writer(is_chat=False))
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in in_completions[:2]]
    assert offsets == [[0], [1]]


def test_calls_come_whole_and_in_order() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    text = f"So: {call}\n{call}"
    events: list[Event] = [(0, delta(character)) for character in text]
    events += [(0, delta("", (2,), "stop")), (0, result(reason="stop"))]
    found = told(events, writer(make_reader=lambda: CallReader(HERMES_TAGS)))
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
    assert "".join(each.get("content", "") for each in deltas) == "So: "
    calls = [each["tool_calls"][0] for each in deltas if "tool_calls" in each]
    assert [each["index"] for each in calls] == [0, 1]
    assert [each["function"] for each in calls] == [{"name": "f", "arguments": '{"x": 1}'}] * 2
    assert len({each["id"] for each in calls}) == 2
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_thoughts_come_in_a_field_of_their_own() -> None:
    events: list[Event] = [(0, delta("<think>h", (5,), has_logprobs=True)), (0, delta("m</think>Yes.", (6,)))]
    events += [(0, delta("", (2,), "stop")), (0, result(reason="stop"))]
    found = told(events, writer(make_reader=lambda: ThinkTags(PlainText(), begins_inside=False)))
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
    assert [each.get("reasoning_content") for each in deltas[1:4]] == ["h", "m", None]
    assert "".join(each.get("content", "") for each in deltas) == "Yes."
    assert len(found[1]["choices"][0]["logprobs"]["content"]) == 1


def test_a_call_that_was_cut_off_is_text() -> None:
    events: list[Event] = [(0, delta('<tool_call>{"name', reason="length")), (0, result())]
    found = told(events, writer(make_reader=lambda: CallReader(HERMES_TAGS)))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found[:-1]) == '<tool_call>{"name'
    assert found[-2]["choices"][0]["finish_reason"] == "length"


def test_a_failure_in_the_middle_is_said_before_the_end() -> None:
    found = told([(0, delta("a")), NumericError("NaN in the logits")], writer())
    assert found[-2:] == [{"error": {"message": "NaN in the logits"}}, "[DONE]"]
    assert found[1]["choices"][0]["delta"] == {"content": "a"}


def test_frames_are_one_line_of_utf8() -> None:
    assert frame({"text": "a\nb é \U0001f642"}) == 'data: {"text":"a\\nb é \U0001f642"}\n\n'.encode()


class Slow:
    """Frames with pauses, and whether they were closed."""

    def __init__(self, pauses_s: Sequence[float]) -> None:
        self.pauses_s, self.is_closed = pauses_s, False

    async def frames(self) -> AsyncGenerator[bytes, None]:
        try:
            for index, pause_s in enumerate(self.pauses_s):
                await asyncio.sleep(pause_s)
                yield str(index).encode()
            yield DONE
        finally:
            self.is_closed = True


def test_silence_is_broken_by_comments_that_lose_nothing() -> None:
    async def read() -> list[bytes]:
        slow = Slow([0, 0.2, 0])
        found = [data async for data in kept_alive(slow.frames(), 0.05)]
        assert slow.is_closed
        return found

    found = asyncio.run(read())
    assert [data for data in found if data != PING] == [b"0", b"1", b"2", DONE]
    assert found.index(PING) == 1 and found.count(PING) >= 2


def test_a_stream_that_is_left_is_closed() -> None:
    async def leave() -> bool:
        slow = Slow([0, 60])
        frames = kept_alive(slow.frames(), 30)
        assert await anext(frames) == b"0"
        waiting = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await frames.aclose()
        return slow.is_closed

    assert asyncio.run(leave())


def respond(slow: Slow, receive: Any, *, fails_after: int | None = None) -> list[dict[str, Any]]:
    """What a response sends."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        if fails_after is not None and len(sent) >= fails_after:
            raise OSError("gone")
        sent.append(message)

    async def run() -> None:
        await EventStream(kept_alive(slow.frames(), 30))({"type": "http"}, receive, send)

    asyncio.run(asyncio.wait_for(run(), 20))
    return sent


async def stays() -> dict[str, Any]:
    await asyncio.sleep(3600)
    raise AssertionError("nobody waits so long")


def test_the_response_says_what_it_is() -> None:
    slow = Slow([0, 0])
    start, *bodies, end = respond(slow, stays)
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache" and headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers
    assert [body["body"] for body in bodies] == [b"0", b"1", DONE] and all(body["more_body"] for body in bodies)
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}
    assert slow.is_closed


def test_a_reader_who_hangs_up_ends_it() -> None:
    async def leaves() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    slow = Slow([0, 60])
    sent = respond(slow, leaves)
    assert [message["body"] for message in sent[1:]] == [b"0"]
    assert slow.is_closed


def test_a_socket_that_is_gone_ends_it() -> None:
    slow = Slow([0, 0, 60])
    assert len(respond(slow, stays, fails_after=2)) == 2
    assert slow.is_closed


def test_a_fault_of_ours_is_raised() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"0"
        raise ValueError("a bug")

    async def send(_message: Any) -> None:
        pass

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(EventStream(broken())({"type": "http"}, stays, send))
