"""Answers of Kimi-K3: what was thought, what is said, and calls with typed arguments. The format: `kimi_k3_chat.py`.

Source: `encoding_k3.py` of the model's repository.
"""

from __future__ import annotations

import json
import re

from paceline.checkpoint.answer_parts import FoundCall, Part, Reasoning, length_of_beginning, refuse_constant
from paceline.checkpoint.kimi_k3_marks import CLOSE, END, OPEN, SEPARATOR

_ATTRIBUTE = re.compile(r'([^\s=]+)="([^"]*)"')
_CHANNELS = ("think", "response")


class KimiK3Answers:
    """Tells channels and calls apart.

    A call that has no end is text, and so is all of the tools' channel where no calls are looked for. What stands
    outside of every channel is said.

    Args:
        begins_in: the channel that the prompt has opened.
        reads_calls: look for calls.
        takes_several: else what stands behind the first call is left out.
    """

    def __init__(self, begins_in: str, *, reads_calls: bool = False, takes_several: bool = True) -> None:
        self._channel: str | None = begins_in
        self._reads_calls, self._takes_several = reads_calls, takes_several
        self._held = ""
        self._is_over = self._is_raw = False
        self._call: _OpenCall | None = None
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """See `AnswerReader`."""
        self._held += text
        return self._settled(is_whole=False)

    def finish(self) -> list[Part]:
        """See `AnswerReader`."""
        found = self._settled(is_whole=True)
        if self._call is not None and self._is_wanted:
            found.append(self._call.raw)
        return found

    @property
    def _is_wanted(self) -> bool:
        """Whether what comes now is part of the answer."""
        return self._takes_several or self._num_calls == 0

    def _settled(self, *, is_whole: bool) -> list[Part]:
        found: list[Part] = []
        while self._held and not self._is_over:
            start = _first_mark(self._held)
            if start is None:
                end = len(self._held) - (0 if is_whole else length_of_beginning(self._held, (OPEN, CLOSE, END)))
                self._text(found, self._taken(end))
                break
            self._text(found, self._taken(start))
            if self._held.startswith(END):
                self._is_over = True
                break
            end = self._held.find(SEPARATOR)
            if end < 0:  # a name whose end has not come yet, or never will
                if is_whole:
                    self._taken(len(self._held))
                break
            self._tag(found, self._taken(end + len(SEPARATOR)))
        return found

    def _taken(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _text(self, found: list[Part], text: str) -> None:
        if not text:
            return
        if self._call is not None:
            self._call.raw += text
            self._call.text += text
        elif self._channel == "think" and not self._is_raw:
            found.append(Reasoning(text))
        elif self._is_wanted and (self._is_raw or self._channel != "tools"):
            found.append(text)

    def _tag(self, found: list[Part], tag: str) -> None:
        """A mark, a name, and the mark behind it."""
        is_end = tag.startswith(CLOSE)
        name, _, attributes = tag[len(CLOSE if is_end else OPEN) : -len(SEPARATOR)].partition(" ")
        if is_end and name == "message":
            self._is_over = True
        elif self._is_raw:
            self._text(found, tag)
        elif self._call is not None:
            self._in_call(found, tag, name, dict(_ATTRIBUTE.findall(attributes)), is_end=is_end)
        elif is_end:
            self._channel = None
        elif name in _CHANNELS:
            self._channel = name
        elif name == "tools" and not self._reads_calls:
            self._is_raw = True
            self._text(found, tag)
        elif name == "tools":
            self._channel = "tools"
        elif name == "call" and self._channel == "tools":
            self._call = _OpenCall(tag, _unescaped(dict(_ATTRIBUTE.findall(attributes)).get("tool", "")))

    def _in_call(self, found: list[Part], tag: str, name: str, attributes: dict[str, str], *, is_end: bool) -> None:
        assert self._call is not None
        call = self._call
        call.raw += tag
        if not is_end:
            call.key, call.type, call.text = _unescaped(attributes.get("key", "")), attributes.get("type"), ""
        elif name == "argument":
            call.arguments[call.key] = _value(call.text, call.type)
        elif name == "json":
            call.written = call.text
        elif name == "call":
            self._call = None
            if self._is_wanted:
                found.append(call.found())
            self._num_calls += 1


class _OpenCall:
    """A call whose end has not come yet."""

    def __init__(self, raw: str, name: str) -> None:
        self.raw, self.name = raw, name
        self.key, self.type, self.text = "", None, ""  # type: str, str | None, str
        self.arguments: dict[str, object] = {}
        self.written: str | None = None  # arguments that are one block of JSON

    def found(self) -> FoundCall:
        written = json.dumps(self.arguments, ensure_ascii=False) if self.written is None else self.written
        try:
            written.encode()
        except UnicodeEncodeError:  # an escape of half a surrogate pair, which no answer can carry
            written = json.dumps(self.arguments)
        return FoundCall(self.name, written)


def _first_mark(text: str) -> int | None:
    places = [place for place in (text.find(mark) for mark in (OPEN, CLOSE, END)) if place >= 0]
    return min(places, default=None)


def _value(text: str, kind: str | None) -> object:
    """What an argument's text stands for; one that is not of its type stays text."""
    if kind in (None, "string"):
        return text
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return text


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")
