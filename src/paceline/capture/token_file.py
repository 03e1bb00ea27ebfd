"""Token files: conversations as token ids, all end to end, in one `.npz`; read and written in this place alone.

Arrays: `tokens` (every conversation's prompt, then its response), `prompt_len` and `response_len`, one entry per
conversation. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.checkpoint.weights import replacing
from paceline.errors import DataError

_ARRAYS = ("tokens", "prompt_len", "response_len")


@dataclass(frozen=True)
class Conversation:
    """Token ids of one prompt, rendered, and of its answer, end token included unless it was cut."""

    prompt_ids: np.ndarray
    answer_ids: np.ndarray


@dataclass(frozen=True)
class TokenFile:
    """What a token file holds.

    Attributes:
        tokens: int64 [total].
        starts: int64 [count + 1], borders of the conversations.
        prompt_lengths: int64 [count].
    """

    tokens: np.ndarray
    starts: np.ndarray
    prompt_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def prompt_ids(self, index: int) -> list[int]:
        """The rendered prompt of one conversation."""
        start = int(self.starts[index])
        ids: list[int] = self.tokens[start : start + int(self.prompt_lengths[index])].tolist()
        return ids


def read_token_file(path: Path) -> TokenFile:
    """Read and check a token file.

    Raises:
        DataError: missing, damaged, or of another layout; says in what.
    """
    if not path.is_file():
        raise DataError(f"no such token file: {path}")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            missing = sorted(set(_ARRAYS) - set(arrays.files))
            if missing:
                raise DataError(f"{path} lacks the arrays {missing}; it has {sorted(arrays.files)}")
            tokens, prompts, responses = (arrays[name] for name in _ARRAYS)
    except DataError:
        raise
    except Exception as error:  # damage shows in whatever layer meets it: zip, deflate, array header, pickle
        raise DataError(f"cannot read {path}: {error}", hint="a complete .npz file; was the copy cut short?") from error
    for name, array in zip(_ARRAYS, (tokens, prompts, responses), strict=True):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(f"{path}: {name} is {array.dtype} of shape {array.shape}, expected one row of integers")
    prompts, responses = prompts.astype(np.int64), responses.astype(np.int64)
    if prompts.shape != responses.shape:
        raise DataError(f"{path}: prompt_len has shape {prompts.shape}, response_len {responses.shape}")
    if min(prompts.min(initial=0), responses.min(initial=0)) < 0:
        raise DataError(f"{path}: prompt_len or response_len holds a negative length")
    starts = np.concatenate([[0], np.cumsum(prompts + responses)]).astype(np.int64)
    if starts[-1] != tokens.size:
        raise DataError(f"{path}: the lengths add up to {starts[-1]} tokens, the file holds {tokens.size}")
    return TokenFile(tokens.astype(np.int64), starts, prompts)


def write_token_file(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations so that training and evaluation read them; whole or not at all.

    Raises:
        CapacityError: the disk is full.
    """
    with replacing(path) as unfinished:
        save_arrays(unfinished, token_arrays(conversations))


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a compressed .npz under exactly this name; equal arrays give equal bytes, since no time is stored."""
    save: Callable[..., None] = np.savez_compressed
    with path.open("wb") as file:
        save(file, **arrays)


def token_arrays(conversations: Sequence[Conversation]) -> dict[str, np.ndarray]:
    """The arrays of a token file, ids as narrow as they fit."""
    pieces = [piece for c in conversations for piece in (c.prompt_ids, c.answer_ids)]
    tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    return {
        "tokens": tokens.astype(np.uint16 if tokens.size == 0 or tokens.max() < 2**16 else np.uint32),
        "prompt_len": np.array([len(c.prompt_ids) for c in conversations], np.uint32),
        "response_len": np.array([len(c.answer_ids) for c in conversations], np.uint32),
    }


def join_token_files(parts: Sequence[TokenFile]) -> TokenFile:
    """All conversations of several files, in order."""
    lengths = [np.diff(part.starts) for part in parts]
    return TokenFile(
        tokens=np.concatenate([part.tokens for part in parts] or [np.empty(0, np.int64)]),
        starts=np.concatenate([[0], np.cumsum(np.concatenate(lengths or [np.empty(0, np.int64)]))]).astype(np.int64),
        prompt_lengths=np.concatenate([part.prompt_lengths for part in parts] or [np.empty(0, np.int64)]),
    )


def select_conversations(file: TokenFile, kept: Sequence[int] | np.ndarray) -> TokenFile:
    """Some of a file's conversations, copied."""
    spans = [slice(int(file.starts[index]), int(file.starts[index + 1])) for index in kept]
    lengths = np.array([span.stop - span.start for span in spans], np.int64)
    return TokenFile(
        tokens=np.concatenate([file.tokens[span] for span in spans] or [np.empty(0, np.int64)]),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lengths=file.prompt_lengths[np.asarray(kept, np.int64)],
    )
