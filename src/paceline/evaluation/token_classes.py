"""What kind of text a token is: code, digits, names, white space, words, punctuation. Rules, not a model.

    white space   nothing else in it
    code          inside a fence of three backticks, or signs that prose does not use, such as `{`, `==` or `_`
    digits        digits, and no letter
    name          a word that begins with a capital and not at the start of a sentence, with all its pieces
    word          other letters
    punctuation   the rest

The first that fits counts. A piece of a word in several tokens is what its first piece is. Rules see the text before a
token, never what comes behind it.
"""

from __future__ import annotations

from typing import Literal, get_args

TokenClass = Literal["white space", "code", "digits", "name", "word", "punctuation"]
TOKEN_CLASSES: tuple[TokenClass, ...] = get_args(TokenClass)
_FENCE_LENGTH = 3
_CODE_SIGNS = frozenset("{}[]<>=+*/\\|&^%$#@~`_")
_ENDS_SENTENCE = frozenset(".!?:\n")
_MEMORY = 64  # characters of the text before that are looked at


class TokenClassifier:
    """Reads a text token by token."""

    def __init__(self) -> None:
        self._before = ""
        self._num_backticks = 0  # at the end of the text
        self._is_fenced = False
        self._of_word: TokenClass = "word"

    def peek(self, piece: str) -> TokenClass:
        """The class of a token that may come next.

        Args:
            piece: its text; U+FFFD for bytes that are a part of a character.
        """
        stripped = piece.strip()
        if not stripped:
            return "white space"
        if self._is_fenced:
            return "code"
        has_letter = any(letter.isalpha() for letter in stripped)
        if not has_letter and any(letter.isdigit() for letter in stripped):
            return "digits"
        if any(letter in _CODE_SIGNS for letter in stripped):
            return "code"
        if not has_letter:
            return "punctuation"
        if piece[0].isalpha() and self._before[-1:].isalpha():
            return self._of_word
        return "name" if stripped[0].isupper() and not self._is_at_start() else "word"

    def advance(self, piece: str) -> TokenClass:
        """Take a token into the text, and give its class."""
        found = self.peek(piece)
        if found in ("name", "word"):
            self._of_word = found
        for letter in piece:
            self._num_backticks = self._num_backticks + 1 if letter == "`" else 0
            self._is_fenced ^= self._num_backticks == _FENCE_LENGTH
        self._before = (self._before + piece)[-_MEMORY:]
        return found

    def _is_at_start(self) -> bool:
        text = self._before.rstrip(" \"'(*")
        return not text or text[-1] in _ENDS_SENTENCE
