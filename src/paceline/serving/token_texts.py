"""The text and the bytes of single tokens, as log-probabilities and `/tokenize` show them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.tiktoken_file import byte_of_character

if TYPE_CHECKING:
    from paceline.checkpoint.tokenizer import TextTokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece vocabularies name a single byte


class TokenTexts:
    """Looks tokens up; what was asked for once is kept.

    A token may hold a part of a character. Its bytes are exact then; its text has U+FFFD for what is incomplete.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        backend = tokenizer.backend
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._is_byte_level = _is_byte_level(backend.decoder)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Of one token; of an id without a token none."""
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def text_of(self, token_id: int) -> str:
        """Of one token."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def name_of(self, token_id: int) -> str:
        """Of one token, as completions tell of it: its text, or `bytes:\\xf0\\x9f` where that is a part of a character.

        So two tokens have two names. Source: the OpenAI API, completions with log-probabilities.
        """
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def num_characters(self, token_id: int) -> int:
        """How many characters of an answer's text begin in a token; special tokens have none there."""
        if token_id in self._tokenizer.special_ids:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token_id))  # all but those that go on with one

    def _look_up(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level:
            table = byte_of_character()
            is_written_in_bytes = all(character in table for character in token)  # else it stands for itself
            return bytes(table[character] for character in token) if is_written_in_bytes else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece writes a space so


class FewestTokens:
    """How many tokens a text has at least, by its bytes alone: to encode millions of characters takes seconds.

    Something can be said for byte-level vocabularies, where each token stands for some bytes of the text.

    Args:
        tokenizer: of any kind.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        backend = tokenizer.backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        # NFC, the one normalizer that is known here, makes one byte of three at most.
        shrinks = {"NoneType": 1, "NFC": 3}.get(type(backend.normalizer).__name__)
        takes_blanks = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        is_byte_level = type(backend.decoder).__name__ == "ByteLevel"
        self._most_bytes: int | None = None  # of the text, for one token
        if is_byte_level and shrinks is not None and not takes_blanks:
            self._most_bytes = max(len(token.encode()) for token in vocabulary) * shrinks
        # Bytes that no token has are left out by encoding.
        self._lost = bytes(byte for character, byte in byte_of_character().items() if character not in vocabulary)

    def of(self, text: str) -> int:
        """Of one text; 0 where nothing can be said."""
        if self._most_bytes is None:
            return 0
        return len(text.encode("utf-8", "surrogatepass").translate(None, self._lost)) // self._most_bytes


def _is_byte_level(decoder: Any) -> bool:
    """Whether a decoder, or a part of it where it is a sequence, turns characters into bytes."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())  # JSON; nothing else tells of its parts
    return any(part.get("type") == "ByteLevel" for part in (state, *state.get("decoders", ())))
