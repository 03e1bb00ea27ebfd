"""Calls of functions that stand between two tags, told apart from text as an answer comes in.

Source: the chat templates of Qwen2.5, Qwen3, Kimi-K2 and Kimi-Linear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.checkpoint.answer_parts import FoundCall, Part, length_of_beginning, refuse_constant
from paceline.serving.llama_calls import made_call

KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_HEAD = re.compile(r"\s*((?:functions\.)?([A-Za-z0-9_.-]+):\d+)\s*")


@dataclass(frozen=True)
class CallTags:
    """What calls stand between.

    Attributes:
        opening: the tag before a call.
        closing: the tag behind it.
        parse: the call between the two, if it is one, and whether the text ends inside a string of it.
        around: tags around all calls, which say nothing.
    """

    opening: str
    closing: str
    parse: Callable[[str], tuple[FoundCall | None, bool]]
    around: tuple[str, ...] = ()


class CallReader:
    """Separates calls from text as an answer comes in; see `AnswerReader`.

    What looks like a call and is none stays text. Text that may be the beginning of a call is held back. White space
    behind a call is left out.

    Args:
        tags: around calls.
        takes_several: else what stands behind the first call is left out.
    """

    def __init__(self, tags: CallTags, *, takes_several: bool = True) -> None:
        self._tags, self._takes_several = tags, takes_several
        self._held = ""
        self._is_behind_call = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Take in what came, and give what is clear by now, in order."""
        self._held += text
        return self._settled(is_whole=False)

    def finish(self) -> list[Part]:
        """The answer has ended: what was held back is text, or a call whose end was cut off."""
        return self._settled(is_whole=True)

    def _settled(self, *, is_whole: bool) -> list[Part]:
        found: list[Part] = []
        marks = (self._tags.opening, *self._tags.around)
        while self._held:
            start, mark = min(((self._held.find(mark), mark) for mark in marks if mark in self._held), default=(-1, ""))
            if start < 0:
                self._release(found, len(self._held) - (0 if is_whole else length_of_beginning(self._held, marks)))
                break
            self._release(found, start)
            if mark != self._tags.opening:
                self._held, self._is_behind_call = self._held[len(mark) :], True
                continue
            size, call = self._first_call(is_whole=is_whole)
            if size == 0:
                break
            if call is None:
                self._release(found, size)
            else:
                self._take(found, size, call)
        return found

    def _first_call(self, *, is_whole: bool) -> tuple[int, FoundCall | None]:
        """The size of what is held from an opening tag to its end, and the call if it is one; 0 if that is open."""
        opening, closing = self._tags.opening, self._tags.closing
        first = end = self._held.find(closing)
        while end >= 0:
            call, is_inside = self._tags.parse(self._held[len(opening) : end])
            if not is_inside:
                return (end if call else first) + len(closing), call
            end = self._held.find(closing, end + 1)  # that one is part of an argument
        if not is_whole:
            return 0, None
        if first < 0:
            return len(self._held), self._tags.parse(self._held[len(opening) :])[0]
        return first + len(closing), None

    def _release(self, found: list[Part], size: int) -> None:
        text, self._held = self._held[:size], self._held[size:]
        if self._is_behind_call:
            text = text.lstrip()
        if text:
            self._is_behind_call = False
            if self._takes_several or self._num_calls == 0:
                found.append(text)

    def _take(self, found: list[Part], size: int, call: FoundCall) -> None:
        self._held = self._held[size:]
        self._is_behind_call = True
        if self._takes_several or self._num_calls == 0:
            found.append(call)
        self._num_calls += 1


def _loaded(text: str) -> tuple[object, bool]:
    """What JSON stands for, None where it is none, and whether it ends inside a string."""
    try:
        return json.loads(text, parse_constant=refuse_constant), False
    except json.JSONDecodeError as error:
        return None, error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):  # a number of thousands of digits, or as many brackets
        return None, False


def parse_hermes(text: str) -> tuple[FoundCall | None, bool]:
    """A JSON object with `name` and `arguments`."""
    call, is_inside = _loaded(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None, is_inside
    return made_call(call["name"], call.get("arguments", {})), False


def parse_kimi(text: str) -> tuple[FoundCall | None, bool]:
    """`functions.NAME:0`, the tag of arguments, and a JSON object."""
    head, mark, written = text.partition(KIMI_ARGUMENTS)
    named = _KIMI_HEAD.fullmatch(head)
    if named is None or not mark:
        return None, False
    arguments, is_inside = _loaded(written)
    if not isinstance(arguments, dict):
        return None, is_inside
    return made_call(named[2], arguments, named[1]), False
