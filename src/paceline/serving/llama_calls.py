"""Calls in the form of Llama 3: `{"name": ..., "parameters": {...}}`, which is all of an answer.

Source: the chat templates of Llama 3.1 to 3.3.
"""

from __future__ import annotations

import json

from paceline.checkpoint.answer_parts import FoundCall, Part, refuse_constant

_BETWEEN = " \t\r\n;"  # what may stand between two calls
_MOST_BLANKS = 64  # before the first; an answer that begins with more is not held back
_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


class LlamaCallReader:
    """Reads an answer that is nothing but calls; see `AnswerReader`.

    What begins like a call is held back to its end. It is text if any part of it is no call.

    Args:
        takes_several: else calls behind the first are left out.
    """

    def __init__(self, *, takes_several: bool = True) -> None:
        self._takes_several = takes_several
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        """Take in what came; nothing is clear before the end, unless it is text."""
        self._held += text
        begun = self._held.lstrip()
        if not begun.startswith("{") and (begun or len(self._held) > _MOST_BLANKS):
            self._is_text = True
        return self._released() if self._is_text else []

    def finish(self) -> list[Part]:
        """The calls, or the text that is none."""
        calls = [] if self._is_text else _calls_of(self._held)
        if not calls:
            return self._released()
        return list(calls if self._takes_several else calls[:1])

    def _released(self) -> list[Part]:
        text, self._held = self._held, ""
        return [text] if text else []


def _calls_of(text: str) -> list[FoundCall]:
    """All calls of a text; none where a part of it is no call."""
    calls: list[FoundCall] = []
    place = 0
    while rest := text[place:].lstrip(_BETWEEN):
        try:
            value, place = _DECODER.raw_decode(text, len(text) - len(rest))
        except (ValueError, RecursionError):
            return []
        call = _call_of(value)
        if call is None:
            return []
        calls.append(call)
    return calls


def _call_of(value: object) -> FoundCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("parameters", value.get("arguments"))
    return made_call(value["name"], arguments) if isinstance(arguments, dict) else None


def made_call(name: str, arguments: object, identity: str | None = None) -> FoundCall | None:
    """A call whose arguments can be sent on; None where they cannot.

    Args:
        name: of the function.
        arguments: a value, or JSON text of one.
        identity: that the target gave the call.
    """
    try:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        (name + written).encode()
    except (RecursionError, UnicodeEncodeError):  # or an escape of half a surrogate pair, which no answer can carry
        return None
    return FoundCall(name, written, identity)
