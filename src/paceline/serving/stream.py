"""Answers as server-sent events: chunks of both kinds of completion, the keep-alive, and the end of a reader.

Every chunk of a request has the same `id`, `created` and `model`. A choice begins with its role (in a chat), goes on
with text of whole characters, and ends with a chunk that has a reason; usage follows if it was asked for, then
`[DONE]`. A failure in mid-stream is a frame with `error`, before `[DONE]`.

Source: the OpenAI API reference, streaming; the comment line that keeps a connection open is from the HTML standard.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.checkpoint.answer_parts import AnswerReader, FoundCall, Part, PlainText, Reasoning
from paceline.engine.request import RequestDelta, RequestResult
from paceline.serving.answers import (
    answered_call,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    shown_entries,
)
from paceline.serving.protocol import Usage
from paceline.serving.samples import Event
from paceline.serving.token_texts import TokenTexts

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
DEFAULT_PING_S = 15.0


def frame(value: object) -> bytes:
    """One event."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


@dataclass
class _Told:
    """What a reader of one choice has got."""

    reader: AnswerReader
    has_begun: bool = False
    num_tokens: int = 0
    num_calls: int = 0
    num_characters: int = 0  # of the tokens that log-probabilities were told of


@dataclass
class ChunkWriter:
    """Turns what happens to a request into chunks.

    Attributes:
        head: `id`, `object`, `created` and `model` of every chunk.
        is_chat: whether chunks are those of a chat.
        texts: of tokens.
        hidden_ids: stop tokens whose text is not delivered.
        num_prompt_tokens: of each prompt.
        n: answers per prompt.
        num_top: how many of the likeliest tokens were asked for.
        make_reader: makes a reader of a chat's choice.
        includes_usage: whether a chunk with usage ends the stream.
        has_usage_everywhere: whether every chunk says how far its choice is.
    """

    head: dict[str, Any]
    is_chat: bool
    texts: TokenTexts
    hidden_ids: Collection[int]
    num_prompt_tokens: tuple[int, ...]
    n: int = 1
    num_top: int = 0
    make_reader: Callable[[], AnswerReader] = PlainText
    includes_usage: bool = False
    has_usage_everywhere: bool = False
    _told: dict[int, _Told] = field(default_factory=dict)

    def chunks(self, index: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """What a delta adds to a choice; nothing where its text is not complete yet."""
        told = self._told.setdefault(index, _Told(self.make_reader() if self.is_chat else PlainText()))
        told.num_tokens += len(delta.token_ids)
        made = []
        if self.is_chat and not told.has_begun:
            made.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}))
        told.has_begun = True
        pieces: list[Part] = told.reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += told.reader.finish()
        logprobs = self._logprobs(told, delta)
        if logprobs is not None and all(isinstance(piece, FoundCall) for piece in pieces):
            pieces.insert(0, "")  # tokens whose text is held back are told all the same
        for piece in pieces:
            if isinstance(piece, FoundCall):
                made.append(self._call(index, told, piece))
                continue
            body = self._text(piece) | ({} if logprobs is None else {"logprobs": logprobs})
            made.append(self._chunk(index, body))
            logprobs = None
        return made

    def last_chunk(self, index: int, result: RequestResult) -> dict[str, Any]:
        """The end of a choice."""
        reason = finish_reason(result.finish_reason, has_calls=self._told[index].num_calls > 0)
        body: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk(index, body, reason, result.stop_reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Behind all choices."""
        return {**self.head, "choices": [], "usage": usage.model_dump()}

    def _text(self, piece: str | Reasoning) -> dict[str, Any]:
        if isinstance(piece, Reasoning):
            return {"delta": {"reasoning_content": piece.text}}
        return {"delta": {"content": piece}} if self.is_chat else {"text": piece}

    def _call(self, index: int, told: _Told, call: FoundCall) -> dict[str, Any]:
        place = told.num_calls
        told.num_calls += 1
        answered = answered_call(call, f"{self.head['id']}-{index}-{place}").model_dump()
        return self._chunk(index, {"delta": {"tool_calls": [{"index": place, **answered}]}})

    def _logprobs(self, told: _Told, delta: RequestDelta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        entries = shown_entries(delta.logprobs, delta.finish_reason, self.hidden_ids)
        if not entries:
            return None
        if self.is_chat:
            return chat_logprobs(entries, self.texts).model_dump()
        found = completion_logprobs(entries, self.texts, num_top=self.num_top, offset=told.num_characters)
        told.num_characters += sum(self.texts.num_characters(entry.token_id) for entry in entries)
        return found.model_dump()

    def _chunk(
        self, index: int, body: dict[str, Any], reason: str | None = None, stop_reason: int | str | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, **body, "finish_reason": reason}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        chunk: dict[str, Any] = {**self.head, "choices": [choice]}
        if self.has_usage_everywhere:
            num_prompt, num_new = self.num_prompt_tokens[index // self.n], self._told[index].num_tokens
            chunk["usage"] = {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_new,
                "total_tokens": num_prompt + num_new,
            }
        elif self.includes_usage:
            chunk["usage"] = None  # the API says so of every chunk but the last
        return chunk


async def frames_of(
    events: AsyncGenerator[Event, None],
    writer: ChunkWriter,
    usage_of_all: Callable[[list[RequestResult]], Usage],
    last_words: Callable[[list[RequestResult]], dict[str, Any]],
    say_failure: Callable[[Exception], dict[str, Any]],
) -> AsyncGenerator[bytes, None]:
    """The frames of a request, to `[DONE]`.

    Args:
        events: what happens to its answers.
        writer: of its chunks.
        usage_of_all: counts the tokens of all results, in order.
        last_words: what the usage chunk says besides.
        say_failure: the body of an error in mid-stream.
    """
    results: dict[int, RequestResult] = {}
    try:
        async with contextlib.aclosing(events):
            async for index, news in events:
                if isinstance(news, RequestDelta):
                    made = writer.chunks(index, news)
                else:
                    results[index] = news
                    made = [writer.last_chunk(index, news)]
                if made:
                    yield b"".join(map(frame, made))
        if writer.includes_usage:
            in_order = [results[index] for index in sorted(results)]
            yield frame({**writer.usage_chunk(usage_of_all(in_order)), **last_words(in_order)})
    except Exception as error:  # the status is long sent, so it is said in the stream
        yield frame(say_failure(error))
    yield DONE


async def kept_alive(frames: AsyncIterator[bytes], ping_s: float) -> AsyncGenerator[bytes, None]:
    """The same frames, with a comment line wherever nothing came for a while, so that no proxy hangs up.

    Args:
        frames: of a stream.
        ping_s: seconds.
    """
    coming: asyncio.Task[bytes] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(frames))
            done, _ = await asyncio.wait({coming}, timeout=ping_s)
            if not done:
                yield PING
                continue
            finished, coming = coming, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        if isinstance(frames, AsyncGenerator):
            await frames.aclose()


class EventStream(Response):
    """Sends frames as they come, and closes their generator as soon as the reader has gone.

    Args:
        frames: to send.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._frames = frames
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        """Without a length: nobody knows it."""
        super().init_headers(headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as somebody reads."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            outcome, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._frames.aclose()
        if isinstance(outcome, Exception) and not isinstance(outcome, OSError):  # a socket that is gone is no fault
            raise outcome

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._frames:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Wait until the client has closed its connection. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
