"""Answers that begin with what the target thought, between `<think>` and `</think>`, as those of Qwen3 and others do.

Some templates open the tag in the prompt, so that an answer begins inside it. White space at the borders is left out.
"""

from __future__ import annotations

from paceline.checkpoint.answer_parts import AnswerReader, Part, Reasoning, length_of_beginning

OPEN, CLOSE = "<think>", "</think>"


class ThinkTags:
    """Tells thoughts from what is said behind them.

    Only what an answer begins with is thought; a tag further on is text.

    Args:
        inner: reads what is said.
        begins_inside: whether the prompt has opened the tag.
    """

    def __init__(self, inner: AnswerReader, *, begins_inside: bool) -> None:
        self._inner = inner
        self._state = "inside" if begins_inside else "before"
        self._held = ""
        self._blank = ""  # white space behind a thought, which is part of it if more follows
        self._has_thought = self._has_said = False

    def feed(self, text: str) -> list[Part]:
        """See `AnswerReader`."""
        self._held += text
        return self._settled(is_whole=False)

    def finish(self) -> list[Part]:
        """See `AnswerReader`."""
        return [*self._settled(is_whole=True), *self._inner.finish()]

    def _settled(self, *, is_whole: bool) -> list[Part]:
        found: list[Part] = []
        if self._state == "before":
            self._look_for_opening(is_whole=is_whole)
        if self._state == "inside":
            self._think(found, is_whole=is_whole)
        if self._state in ("behind", "without"):
            self._say(found)
        return found

    def _look_for_opening(self, *, is_whole: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._held, self._state = begun[len(OPEN) :], "inside"
        elif is_whole or not OPEN.startswith(begun):
            self._state = "without"

    def _think(self, found: list[Part], *, is_whole: bool) -> None:
        end = self._held.find(CLOSE)
        is_open = end < 0
        if is_open:
            end = len(self._held) - (0 if is_whole else length_of_beginning(self._held, (CLOSE,)))
        text = self._blank + self._held[:end]
        if not self._has_thought:
            text = text.lstrip()
        stripped = text.rstrip()
        self._blank = text[len(stripped) :]
        if stripped:
            self._has_thought = True
            found.append(Reasoning(stripped))
        self._held = self._held[end:]
        if not is_open:
            self._held, self._state = self._held[len(CLOSE) :], "behind"

    def _say(self, found: list[Part]) -> None:
        text, self._held = self._held, ""
        if self._state == "behind" and not self._has_said:
            text = text.lstrip()
        if text:
            self._has_said = True
            found += self._inner.feed(text)
