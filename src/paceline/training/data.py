"""Conversations as token ids with supervision marks, read from token files or chat files, in a reproducible order.

A conversation's response tokens are supervised: they are what the target wrote and what a drafter must foresee. The
order of batches is a pure function of (seed, step), so a resumed run continues where it stopped without saved state.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.capture.token_file import TokenFile, read_token_file
from paceline.errors import DataError
from paceline.training.chats import ChatEncoder, read_chats

_log = logging.getLogger(__name__)

_BUCKET = 64  # row lengths are rounded up to this, which bounds the number of tensor shapes
_WINDOW = 16  # batches whose conversations are sorted by length together, to pad less


@dataclass(frozen=True)
class Packing:
    """Where the conversations of packed rows lie; fields as in `Batch`."""

    positions_BS: Tensor
    documents_BS: Tensor


@dataclass(frozen=True)
class Batch:
    """Right-padded rows of one conversation each or, packed, of several. B rows, S tokens.

    Attributes:
        token_ids_BS: int64, 0 in padding.
        supervised_BS: bool, never true in padding.
        lengths_B: int64, tokens of each row without padding.
        positions_BS: int64, counted from the start of each conversation.
        documents_BS: int32, which conversation of its row a token belongs to, -1 in padding.
        rows: indices of the conversations in each row; None where they came from no set.
        is_packed: whether a row may hold several conversations.
    """

    token_ids_BS: Tensor
    supervised_BS: Tensor
    lengths_B: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    rows: tuple[tuple[int, ...], ...] | None = None
    is_packed: bool = False

    @classmethod
    def of_rows(
        cls,
        token_ids_BS: Tensor,
        supervised_BS: Tensor | None = None,
        lengths_B: Tensor | None = None,
        rows: tuple[tuple[int, ...], ...] | None = None,
    ) -> Batch:
        """One conversation per row; by default nothing is supervised and nothing is padding."""
        B, S = token_ids_BS.shape
        device = token_ids_BS.device
        position_S = torch.arange(S, device=device)
        if supervised_BS is None:
            supervised_BS = torch.zeros(B, S, dtype=torch.bool, device=device)
        if lengths_B is None:
            lengths_B = torch.full((B,), S, device=device)
        documents_BS = -(position_S >= lengths_B.unsqueeze(1)).int()
        return cls(token_ids_BS, supervised_BS, lengths_B, position_S.expand(B, S), documents_BS, rows)

    @property
    def packing(self) -> Packing | None:
        """Where conversations lie, if rows may hold several; what reads None may take each row for one."""
        return Packing(self.positions_BS, self.documents_BS) if self.is_packed else None

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; a GPU copy does not wait."""
        names = ("token_ids_BS", "supervised_BS", "lengths_B", "positions_BS", "documents_BS")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


@dataclass(frozen=True)
class Conversations:
    """Token ids of many conversations end to end, with their borders and supervision marks."""

    tokens: np.ndarray  # int32 [total]
    supervised: np.ndarray  # bool [total]
    starts: np.ndarray  # int64 [count + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def num_supervised(self) -> int:
        """Response tokens in all."""
        return int(self.supervised.sum())

    def taught(self, max_length: int) -> np.ndarray:
        """bool [total]: response tokens that are left where each conversation is cut on the right to `max_length`."""
        lengths = np.diff(self.starts)
        taught: np.ndarray = self.supervised & (
            np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], lengths) < max_length
        )
        return taught

    def select(self, indices: Sequence[int] | np.ndarray) -> Conversations:
        """Some of the conversations, copied."""
        spans = [slice(int(self.starts[i]), int(self.starts[i + 1])) for i in indices]
        empty = [np.empty(0, self.tokens.dtype)]
        lengths = [span.stop - span.start for span in spans]
        return Conversations(
            tokens=np.concatenate([self.tokens[span] for span in spans] or empty),
            supervised=np.concatenate([self.supervised[span] for span in spans] or [np.empty(0, bool)]),
            starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        )

    def batch(self, indices: Sequence[int] | np.ndarray, max_length: int) -> Batch:
        """Chosen conversations as one padded batch, each cut on the right to `max_length`."""
        lengths = np.array([min(int(self.starts[i + 1] - self.starts[i]), max_length) for i in indices])
        width = min(-(-int(lengths.max()) // _BUCKET) * _BUCKET, max_length)
        tokens = np.zeros((len(indices), width), np.int64)
        supervised = np.zeros((len(indices), width), bool)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            start = int(self.starts[index])
            tokens[row, :length] = self.tokens[start : start + length]
            supervised[row, :length] = self.supervised[start : start + length]
        rows = tuple((int(index),) for index in indices)
        return Batch.of_rows(torch.from_numpy(tokens), torch.from_numpy(supervised), torch.from_numpy(lengths), rows)

    def packed_batch(self, rows: Sequence[Sequence[int]], max_length: int) -> Batch:
        """Rows of exactly `max_length` tokens, each of several conversations one after another.

        Args:
            rows: conversation indices of each row, as `PackedOrder` gives them.
            max_length: tokens of a row; a conversation that is longer is cut on the right.
        """
        tokens = np.zeros((len(rows), max_length), np.int64)
        supervised = np.zeros(tokens.shape, bool)
        positions = np.zeros(tokens.shape, np.int64)
        documents = np.full(tokens.shape, -1, np.int32)
        lengths = np.zeros(len(rows), np.int64)
        for row, indices in enumerate(rows):
            for document, index in enumerate(indices):
                start = int(self.starts[index])
                length = min(int(self.starts[index + 1]) - start, max_length)
                span = slice(int(lengths[row]), int(lengths[row]) + length)
                tokens[row, span] = self.tokens[start : start + length]
                supervised[row, span] = self.supervised[start : start + length]
                positions[row, span] = np.arange(length)
                documents[row, span] = document
                lengths[row] += length
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(supervised),
            torch.from_numpy(lengths),
            torch.from_numpy(positions),
            torch.from_numpy(documents),
            rows=tuple(tuple(map(int, row)) for row in rows),
            is_packed=True,
        )

    def fingerprint(self) -> str:
        """SHA-256 of ids, marks and borders: what a resumed run compares."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.supervised, self.starts):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def join(parts: Sequence[Conversations]) -> Conversations:
    """All conversations of several sets, in order."""
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    return Conversations(
        tokens=np.concatenate([part.tokens for part in parts]),
        supervised=np.concatenate([part.supervised for part in parts]),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def drop_short(conversations: Conversations, *, max_length: int, min_supervised: int) -> Conversations:
    """Leave out the conversations of which too little is left to learn from once they are cut; says how many.

    Args:
        conversations: to train on.
        max_length: cut of each conversation.
        min_supervised: supervised tokens before the cut that a conversation needs, besides a place for a block; 0
            leaves everything as it is.
    Raises:
        DataError: nothing would remain, or no conversation has a place for a block: the run would end with the
            weights that it began with, and a loss of 0.
    """
    lengths = np.diff(conversations.starts)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    is_first = np.zeros(len(owner), bool)
    is_first[conversations.starts[:-1][lengths > 0]] = True
    supervised = conversations.taught(max_length)
    starts_block = supervised[:-1] & supervised[1:] & (owner[:-1] == owner[1:]) & ~is_first[:-1]
    if not starts_block.any():
        raise DataError(
            f"none of {len(lengths)} conversations has two response tokens in a row, behind a token of context, among "
            f"its first {max_length}: there is nothing to draft",
            hint="a larger data.max_length, or longer answers",
        )
    if min_supervised == 0:
        return conversations
    count = np.bincount(owner[supervised], minlength=len(lengths))
    kept = (count >= min_supervised) & (np.bincount(owner[:-1][starts_block], minlength=len(lengths)) > 0)
    if not kept.any():
        raise DataError(
            f"none of {len(lengths)} conversations has {min_supervised} supervised tokens among its first {max_length}",
            hint="a smaller data.min_supervised or a larger data.max_length",
        )
    if kept.all():
        return conversations
    _log.info(
        "%d of %d conversations left out: fewer than %d supervised tokens among the first %d",
        np.count_nonzero(~kept),
        len(lengths),
        min_supervised,
        max_length,
    )
    return conversations.select(np.flatnonzero(kept))


def split_held_out(conversations: Conversations, hold_out: int) -> tuple[Conversations, Conversations]:
    """Training and held-out conversations; the held-out ones are the last `hold_out` of the file.

    Raises:
        DataError: nothing would remain to train on.
    """
    count = len(conversations)
    if hold_out >= count:
        raise DataError(
            f"{count} conversations, of which hold_out keeps {hold_out}: nothing is left to train on",
            hint="a smaller data.hold_out or a larger file",
        )
    return conversations.select(range(count - hold_out)), conversations.select(range(count - hold_out, count))


def read_conversations(path: Path, *, vocab_size: int, encoder: ChatEncoder | None = None) -> Conversations:
    """Read a token file (.npz), a chat file (.jsonl) or a folder of captured conversations.

    Args:
        path: `.npz` with `tokens`, `prompt_len` and `response_len`, all conversations end to end; or one JSON object
            per line with `messages`, of which assistant turns are supervised; or what `paceline capture prompts` made.
        vocab_size: ids must lie below it.
        encoder: renders and encodes chats; needed for `.jsonl`.
    Raises:
        DataError: missing, unreadable, of another layout, or with ids outside the vocabulary.
    """
    if not path.exists():
        raise DataError(f"no such data file: {path}", hint="check data.files in the run's settings")
    if path.is_dir():
        from paceline.capture.prompts import read_captured  # brings the engine along, which no file needs

        conversations = _answers_supervised(read_captured(path))
    elif path.suffix == ".npz":
        conversations = _answers_supervised(read_token_file(path))
    elif path.suffix == ".jsonl":
        if encoder is None:
            raise DataError(f"{path} holds chats, and the target has no chat template to render them")
        conversations = _joined(read_chats(path, encoder))
    else:
        raise DataError(f"{path} is neither .npz nor .jsonl", hint="token arrays as .npz, chats as .jsonl")
    if len(conversations) == 0 or conversations.num_supervised == 0:
        raise DataError(f"{path} holds no response token to learn from")
    smallest, largest = int(conversations.tokens.min()), int(conversations.tokens.max())
    if largest >= vocab_size or smallest < 0:
        raise DataError(
            f"{path} holds token id {smallest if smallest < 0 else largest}; the target's vocabulary has {vocab_size}",
            hint="data made with this target's tokenizer",
        )
    return replace(conversations, tokens=conversations.tokens.astype(np.int32))


def _answers_supervised(file: TokenFile) -> Conversations:
    supervised = np.zeros(file.tokens.size, bool)
    for start, prompt, end in zip(file.starts[:-1], file.prompt_lengths, file.starts[1:], strict=True):
        supervised[start + prompt : end] = True
    return Conversations(file.tokens, supervised, file.starts)


def _joined(rows: Sequence[tuple[list[int], list[bool]]]) -> Conversations:
    tokens = [np.array(ids, np.int32) for ids, _ in rows] or [np.empty(0, np.int32)]
    marks = [np.array(mark, bool) for _, mark in rows] or [np.empty(0, bool)]
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in rows])]).astype(np.int64)
    return Conversations(np.concatenate(tokens), np.concatenate(marks), starts)


class BatchOrder:
    """Which conversations form the batch of a step: a pure function of seed and step.

    Every epoch is a fresh permutation; within windows of `_WINDOW` batches conversations are sorted by length so that
    rows of a batch pad little, and the batches of a window are shuffled again.
    """

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int) -> None:
        if len(lengths) < batch_size:
            raise DataError(
                f"{len(lengths)} conversations to train on, schedule.batch_size is {batch_size}",
                hint="a smaller batch_size",
            )
        self._lengths, self._batch_size, self._seed = lengths, batch_size, seed
        self._epoch, self._batches = -1, np.empty((0, batch_size), np.int64)

    @property
    def num_rows(self) -> int:
        """Rows in one pass over all conversations: each is one."""
        return len(self._lengths)

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass; the few conversations that do not fill one wait for another epoch's order."""
        return len(self._lengths) // self._batch_size

    def __call__(self, index: int) -> np.ndarray:
        """Conversation indices of the batch at a global index, counted over epochs."""
        epoch, offset = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._order(epoch)
        row: np.ndarray = self._batches[offset]
        return row

    def _order(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng([self._seed, epoch])
        chosen = random.permutation(len(self._lengths))[: self.batches_per_epoch * self._batch_size]
        windows = []
        for window in np.split(chosen, range(_WINDOW * self._batch_size, len(chosen), _WINDOW * self._batch_size)):
            by_length = window[np.argsort(self._lengths[window], kind="stable")]
            windows.append(random.permutation(by_length.reshape(-1, self._batch_size), axis=0))
        return np.concatenate(windows)
