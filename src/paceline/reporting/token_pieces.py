"""The text that each token adds, and what became of every token; what draws them is elsewhere.

Functions take a `decode` callable and no tokenizer; nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.trace.step import StepRecord

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"  # what decoders give for part of a character
_LONGEST_CHARACTER = 8  # tokens after which a character is taken as broken for good


@dataclass(frozen=True)
class Look:
    """What became of a token, and how that is shown.

    Attributes:
        name: of the fate, such as "accepted".
        opening: mark in front of it in a terminal.
        closing: mark behind it.
        style: in a terminal with colours.
        means: in words.
    """

    name: str
    opening: str
    closing: str
    style: str
    means: str


ACCEPTED = Look("accepted", "[", "]", "green", "accepted")
REFUSED = Look("refused", "~", "~", "red strike", "refused")
BONUS = Look("bonus", "(", ")", "bold yellow", "the target's own")
UNSEEN = Look("unseen", ".", ".", "dim", "not looked at")
CUT = Look("cut", "/", "/", "dim", "cut off by a stop or the budget")


def visible(piece: str, encoding: str = "utf-8") -> str:
    """Write a token's text so that it stays on its line: control characters become escapes.

    Args:
        piece: text of one token; empty for a token that does not end a character, which shows as an ellipsis.
        encoding: of the output; characters that it lacks become escapes too.
    """
    shown = "".join(
        character if character.isprintable() else repr(character)[1:-1]  # the ASCII space counts as printable
        for character in piece or "…"
    )
    return shown.encode(encoding, "backslashreplace").decode(encoding)


class Pieces:
    """Cuts a growing list of ids into the text that each token adds.

    A token's text depends on its neighbours (leading spaces, characters of several bytes), so it is decoded together
    with a short window of tokens before it, and the window's own text is taken off.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._settled: list[int] = []  # their text is out
        self._pending: list[int] = []  # they wait for the rest of a character
        self.last_piece = ""

    def peek(self, token: int) -> str:
        """Give the text that a token would add, without adding it; empty if it does not end a character."""
        before = self._decode(self._settled) if self._settled else ""
        text = self._decode([*self._settled, *self._pending, token])
        is_whole = not text.endswith(_BROKEN) or len(self._pending) >= _LONGEST_CHARACTER
        return text[len(before) :] if is_whole else ""

    def advance(self, token: int) -> str:
        """Add a token and give its text."""
        piece = self.peek(token)
        self._pending.append(token)
        if piece:
            self._settled, self._pending = self._pending, []
        self.last_piece = piece
        return piece

    def fork(self) -> Pieces:
        """Give a copy that may go another way."""
        other = Pieces(self._decode)
        other._settled, other._pending, other.last_piece = list(self._settled), list(self._pending), self.last_piece
        return other


def delivered(record: StepRecord, pieces: Pieces) -> Iterator[tuple[Look, str]]:
    """Walk what a step delivered, the refused draft before the token that took its place."""
    for token in record.proposed_ids[: record.num_accepted]:
        yield ACCEPTED, pieces.advance(token)
    if record.refused_id is not None and record.num_accepted == record.num_verified_accepted:
        yield REFUSED, pieces.peek(record.refused_id)
    if record.bonus_id is not None:
        yield BONUS, pieces.advance(record.bonus_id)


def judged(record: StepRecord, pieces: Pieces) -> list[tuple[Look, str]]:
    """Give every draft of a step with what became of it."""
    branch = pieces.fork()
    looks = []
    for position, token in enumerate(record.proposed_ids):
        if position < record.num_accepted:
            look = ACCEPTED
        elif position < record.num_verified_accepted:
            look = CUT
        else:
            look = REFUSED if position == record.num_verified_accepted else UNSEEN
        looks.append((look, branch.advance(token)))
    return looks
