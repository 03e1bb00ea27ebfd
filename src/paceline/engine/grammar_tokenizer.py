"""The target's tokenizer as llguidance reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_END_TOKEN = "<|end of structured text|>"


class PieceTokenizer(Protocol):
    """A tokenizer that is a plain table of byte strings."""

    pieces: Mapping[int, bytes]


def known_ids(tokenizer: TextTokenizer | PieceTokenizer) -> set[int]:
    """Ids that have a token; a head may have more rows."""
    if isinstance(tokenizer, TextTokenizer):
        return set(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    return {token for token, piece in tokenizer.pieces.items() if piece}


def build_tokenizer(tokenizer: TextTokenizer | PieceTokenizer, num_ids: int) -> LLTokenizer:
    """Hand a tokenizer over; an id without a token plays the end of text, which llguidance cannot do without.

    The real stop tokens are no business of llguidance: `engine/grammar.py` decides where they may come.

    Args:
        tokenizer: a `TextTokenizer` or a table of pieces.
        num_ids: every id is below it.
    Returns:
        A tokenizer of at least `num_ids` ids.
    Raises:
        MissingExtraError: llguidance is not installed.
        ConfigError: llguidance cannot read the tokenizer.
    """
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise MissingExtraError(
            "structured output needs the package llguidance, which is not installed",
            hint='`pip install "paceline[structured]"`',
        ) from error
    try:
        if not isinstance(tokenizer, TextTokenizer):
            return LLTokenizer(TokenizerWrapper(_PieceTable(tokenizer.pieces, num_ids)))
        extended, end_id = _with_end_token(tokenizer)
        return LLTokenizer(extended, n_vocab=max(num_ids, end_id + 1), eos_token=[end_id])
    except ValueError as error:
        raise ConfigError(f"structured output cannot use the target's tokenizer: {error}") from error


def _with_end_token(tokenizer: TextTokenizer) -> tuple[str, int]:
    from tokenizers import AddedToken, Tokenizer

    copied = Tokenizer.from_str(tokenizer.backend.to_str())
    copied.add_special_tokens([AddedToken(_END_TOKEN, special=True, normalized=False)])
    end_id = copied.token_to_id(_END_TOKEN)
    assert end_id is not None, "it was just added"
    return copied.to_str(), end_id


class _PieceTable:
    """A table of pieces with the attributes that llguidance asks for.

    Called with bytes, it spells them, longest piece first: the spelling of what a grammar forces.
    """

    def __init__(self, pieces: Mapping[int, bytes], num_ids: int) -> None:
        self.tokens = [pieces.get(token, b"") for token in range(num_ids + 1)]
        self.eos_token_id, self.bos_token_id = num_ids, None
        self.special_token_ids: list[int] = []
        self._id_of = {piece: token for token, piece in reversed(list(enumerate(self.tokens))) if piece}
        self._longest = max(map(len, self._id_of))

    def __call__(self, data: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(data):
            lengths = range(min(self._longest, len(data) - start), 0, -1)
            length = next((size for size in lengths if data[start : start + size] in self._id_of), 0)
            if length == 0:
                break  # the rest cannot be spelled; its mask will be empty
            ids.append(self._id_of[data[start : start + length]])
            start += length
        return ids
