"""Reads an answer of the OpenAI API as it comes: server-sent events of a chat or a completion, or one whole body.

What counts as output is text, reasoning, or a call of a tool; a chunk with a role alone, or with nothing, is no delta.
The answer is complete with its last chunk that has a choice. Usage and vLLM's `metrics.speculative_decoding`, which
paceline has too, are taken from whatever chunk brings them.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ServerError
from paceline.trace.acceptance import DraftTotals

_LONGEST_COMPLAINT = 300  # characters of a server's own words


@dataclass
class HeardAnswer:
    """What a server said.

    Attributes:
        delta_s: clock at each delta with output.
        last_s: clock at the last chunk with a choice.
        text: of the deltas, one after the other.
        finish_reason: None until it is said.
        num_prompt_tokens: by its usage.
        num_tokens: by its usage.
        drafting: by its metrics.
    """

    delta_s: list[float] = field(default_factory=list)
    last_s: float | None = None
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    drafting: DraftTotals | None = None

    def take(self, chunk: object, now_s: float) -> None:
        """Hear a chunk, or a whole answer.

        Raises:
            ServerError: it tells of an error, or is none that the API knows.
        """
        if not isinstance(chunk, dict):
            raise ServerError(f"a chunk is no object: {shortened(chunk)}")
        if chunk.get("error") is not None:
            raise ServerError(f"an error in mid-stream: {shortened(complaint(chunk))}")
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            piece = _output(choices[0])
            if piece:
                self.delta_s.append(now_s)
                self.text += piece
            self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
            self.last_s = now_s
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.num_prompt_tokens = _count(usage, "prompt_tokens", self.num_prompt_tokens)
            self.num_tokens = _count(usage, "completion_tokens", self.num_tokens)
        metrics = chunk.get("metrics")
        if isinstance(metrics, dict):
            self.drafting = drafting_of(metrics.get("speculative_decoding")) or self.drafting


async def hear_stream(lines: AsyncIterable[str], *, clock: Callable[[], float] = time.perf_counter) -> HeardAnswer:
    """Read server-sent events to their end.

    Args:
        lines: of the body, without their ends.
        clock: in seconds.

    Raises:
        ServerError: the stream tells of an error, holds no JSON, or ends before its answer does.
    """
    heard = HeardAnswer()
    async for line in lines:
        if not line.startswith("data:"):
            continue  # a comment, an event's name, or the blank line behind an event
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        now_s = clock()
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise ServerError(f"a chunk is not JSON: {shortened(data)}") from error
        heard.take(chunk, now_s)
    if heard.finish_reason is None:
        raise ServerError("the stream ended before its answer did: no chunk has a finish_reason")
    return heard


async def lines_of(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """Lines of a body as it comes, ended by a line feed alone: JSON may hold U+2028 and its like as they are.

    Args:
        pieces: of the body, cut anywhere.
    """
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")


def drafting_of(told: object) -> DraftTotals | None:
    """vLLM's statistics of one answer; None where they are not there or do not make sense.

    Steps are counted one by one where `per_step_accepted` and `per_step_drafted` are told, else by the histogram.
    """
    if not isinstance(told, Mapping):
        return None
    accepted, drafted = _counts(told.get("per_step_accepted")), _counts(told.get("per_step_drafted"))
    if accepted and drafted and len(accepted) == len(drafted):
        return DraftTotals.from_steps(zip(drafted, accepted, strict=True))
    histogram, num_draft_tokens = _counts(told.get("acceptance_histogram")), _count(told, "num_draft_tokens", None)
    if histogram and num_draft_tokens is not None:
        return DraftTotals.from_histogram(histogram, num_draft_tokens=num_draft_tokens)
    return None


def complaint(body: object) -> str:
    """The message of an error body, whatever form it has."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return message if isinstance(message, str) else json.dumps(message, ensure_ascii=False, default=str)


def shortened(said: object) -> str:
    """A server's words on one line, and not too many."""
    text = " ".join(str(said).split())
    return text if len(text) <= _LONGEST_COMPLAINT else f"{text[:_LONGEST_COMPLAINT]} ..."


def _output(choice: Mapping[str, Any]) -> str:
    """What a choice of a chunk, or of a whole answer, adds to the output."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    said = choice.get("delta") or choice.get("message")
    if not isinstance(said, dict):
        return ""
    parts = [said.get(key) for key in ("reasoning_content", "reasoning", "content")]
    calls = said.get("tool_calls")
    return "".join(part for part in parts if isinstance(part, str)) + (json.dumps(calls) if calls else "")


def _count(values: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = values.get(key)
    return value if _is_count(value) else default


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _counts(values: Any) -> list[int]:
    """A list of counts; empty where it is none."""
    return values if isinstance(values, list) and all(map(_is_count, values)) else []
