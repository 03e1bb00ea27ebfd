"""Tokenizers of Kimi targets, which come as `tiktoken.model` and a list of added tokens, without a tokenizer.json.

The file has a line per token: its bytes in base64 and its rank, which is its id and says how early it is merged. The
256 ids behind those are added tokens; the ones that tokenizer_config.json does not name are reserved.

Texts are cut into words by one pattern for all of them, from Kimi-K2 to Kimi-Linear and Kimi-K3. Theirs cuts runs of
25,000 characters without white space first, which is not done here.

Source: `tokenization_kimi.py` in their repositories; the format is that of OpenAI's tiktoken.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.kimi_k3_marks import CLOSE, OPEN, SEPARATOR
from paceline.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME = "tiktoken.model"
NUM_ADDED = 256
_SHOWN = (OPEN, CLOSE, SEPARATOR)  # part of an answer's text, so that its channels can be told apart

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORD_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def open_tiktoken(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a folder that has a `tiktoken.model`.

    Args:
        folder: of the model.
        config: its tokenizer_config.json.
    Raises:
        CheckpointError: the file is damaged, or added tokens have ids that others have.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    file = folder / FILE_NAME
    ranks = read_ranks(file)
    character_of = {byte: character for character, byte in byte_of_character().items()}
    spelled = {token: "".join(character_of[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [(spelled[left], spelled[right]) for left, right in merges_of(ranks)]
    # A word that is a token is that token; not all of them can be reached by merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = added_tokens(config, len(ranks), file)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])
    if tokenizer.get_vocab_size() != len(ranks) + len(added):
        what = "an added token is a token of tiktoken.model, too, or two added tokens are alike"
        raise CheckpointError(what, origin={"file": file})
    return tokenizer


def read_ranks(file: Path) -> dict[bytes, int]:
    """Tokens and their ranks, which are all numbers from 0 on.

    Raises:
        CheckpointError: the file cannot be read, is damaged or incomplete.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            hint = "`git lfs pull`, or another download" if line.startswith(b"version https://git-lfs") else None
            raise CheckpointError(
                f"line {number} of {file} is not a token in base64 and its rank", hint=hint
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise CheckpointError(f"{file} has {len(ranks)} different tokens; their ranks are not 0 to {len(ranks) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{file} has no token for the byte {missing[0]}, so some texts could not be written")
    return ranks


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs in the order in which they are merged: that of what they become, and of their parts where several do."""
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def added_tokens(config: Mapping[str, Any], first_id: int, file: Path) -> list[tuple[str, bool]]:
    """Text of each added token in the order of their ids, and whether it is special.

    Raises:
        CheckpointError: the list in tokenizer_config.json is malformed, or an id of it is a token of the file's.
    """
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise CheckpointError(
            "added_tokens_decoder is not a table of ids and tokens",
            origin={"file": file.parent / "tokenizer_config.json"},
        )
    added = {first_id + index: (f"<|reserved_token_{first_id + index}|>", True) for index in range(NUM_ADDED)}
    for key, entry in listed.items():
        if not key.isdecimal() or not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            raise CheckpointError(
                "added_tokens_decoder is not a table of ids and tokens",
                origin={"file": file.parent / "tokenizer_config.json"},
            )
        if int(key) not in added:
            raise CheckpointError(
                f"added_tokens_decoder has an id {key}; {file.name} has {first_id} tokens, so those behind it are "
                f"{first_id} to {first_id + NUM_ADDED - 1}",
                origin={"file": file.parent / "tokenizer_config.json"},
            )
        added[int(key)] = (entry["content"], bool(entry.get("special", False)) and entry["content"] not in _SHOWN)
    return [added[token_id] for token_id in sorted(added)]


@cache
def byte_of_character() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary.

    Printable bytes of Latin-1 stand for themselves; the others are, in order, the characters from U+0100 on.

    Source: the byte-level BPE of GPT-2.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
