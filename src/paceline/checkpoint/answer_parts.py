"""What an answer is made of: what the target thought, what it says, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the target thought."""

    text: str


@dataclass(frozen=True)
class FoundCall:
    """One call in an answer.

    Attributes:
        name: of the function.
        arguments: JSON text.
        id: that the target gave it itself, by which its results are known; None where it gives none.
    """

    name: str
    arguments: str
    id: str | None = None


Part = str | Reasoning | FoundCall
"""A text is what the target says."""


def refuse_constant(name: str) -> object:
    """For `json`, which takes NaN and infinity for JSON: no client could read them."""
    raise ValueError(f"{name} is no JSON")


class AnswerReader(Protocol):
    """Tells the parts of an answer as it comes in; how it is cut into pieces makes no difference."""

    def feed(self, text: str) -> list[Part]:
        """Take in what came, and give what is clear by now, in order."""
        ...

    def finish(self) -> list[Part]:
        """The answer has ended: what is still held back."""
        ...


class PlainText:
    """An answer without parts: all of it is said."""

    def feed(self, text: str) -> list[Part]:
        """Everything, at once."""
        return [text] if text else []

    def finish(self) -> list[Part]:
        """Nothing is held back."""
        return []


def read_whole(reader: AnswerReader, text: str) -> tuple[str, str, list[FoundCall]]:
    """A whole answer.

    Args:
        reader: a new one.
        text: of the answer.
    Returns:
        What was thought, what is said, and the calls.
    """
    parts = [*reader.feed(text), *reader.finish()]
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    said = "".join(part for part in parts if isinstance(part, str))
    return thought, said, [part for part in parts if isinstance(part, FoundCall)]


def length_of_beginning(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
