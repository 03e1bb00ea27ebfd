"""Conversations as token ids with supervision marks, read from token files or chat files, in a reproducible order.

A conversation's response tokens are supervised: they are what the target wrote and what a drafter must foresee. The
order of batches is a pure function of (seed, step), so a resumed run continues where it stopped without saved state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.capture.token_file import read_token_file
from paceline.errors import DataError, RequestError

_BUCKET = 64  # row lengths are rounded up to this, which bounds the number of tensor shapes
_WINDOW = 16  # batches whose conversations are sorted by length together, to pad less


class ChatEncoder(Protocol):
    """What reading chat files needs of a tokenizer."""

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Messages through the target's template; at the end, if asked for, what opens the assistant's turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, special tokens included."""
        ...


@dataclass(frozen=True)
class Batch:
    """Right-padded conversations. B rows, S tokens."""

    token_ids_BS: Tensor  # int64, 0 in padding
    supervised_BS: Tensor  # bool, never true in padding
    lengths_B: Tensor  # int64

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; a GPU copy does not wait."""
        move = [t.to(device, non_blocking=True) for t in (self.token_ids_BS, self.supervised_BS, self.lengths_B)]
        return Batch(*move)


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
        return Batch(torch.from_numpy(tokens), torch.from_numpy(supervised), torch.from_numpy(lengths))

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
    """Read a token file (.npz) or a chat file (.jsonl).

    Args:
        path: `.npz` with `tokens`, `prompt_len` and `response_len`, all conversations end to end; or one JSON object
            per line with `messages`, of which assistant turns are supervised.
        vocab_size: ids must lie below it.
        encoder: renders and encodes chats; needed for `.jsonl`.
    Raises:
        DataError: missing, unreadable, of another layout, or with ids outside the vocabulary.
    """
    if not path.is_file():
        raise DataError(f"no such data file: {path}", hint="check data.files in the run's settings")
    if path.suffix == ".npz":
        conversations = _read_tokens(path)
    elif path.suffix == ".jsonl":
        if encoder is None:
            raise DataError(f"{path} holds chats, and the target has no chat template to render them")
        conversations = _read_chats(path, encoder)
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


def _read_tokens(path: Path) -> Conversations:
    file = read_token_file(path)
    supervised = np.zeros(file.tokens.size, bool)
    for start, prompt, end in zip(file.starts[:-1], file.prompt_lengths, file.starts[1:], strict=True):
        supervised[start + prompt : end] = True
    return Conversations(file.tokens, supervised, file.starts)


def _read_chats(path: Path, encoder: ChatEncoder) -> Conversations:
    rows: list[tuple[list[int], list[bool]]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # str.splitlines would also cut inside JSON strings
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
            turns = [{"role": _text(m["role"]), "content": _text(m["content"])} for m in messages]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}:{number} is not a chat: {error!r}",
                hint='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
            ) from error
        if any(turn["role"] == "assistant" for turn in turns):
            rows.append(encode_turns(turns, encoder, where=f"{path}:{number}"))
    tokens = [np.array(ids, np.int32) for ids, _ in rows] or [np.empty(0, np.int32)]
    marks = [np.array(mark, bool) for _, mark in rows] or [np.empty(0, bool)]
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in rows])]).astype(np.int64)
    return Conversations(np.concatenate(tokens), np.concatenate(marks), starts)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r}")
    return value


def encode_turns(
    turns: Sequence[Mapping[str, str]], encoder: ChatEncoder, *, where: str
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat and their supervision marks, through the target's own template.

    An assistant turn is what the render with it adds to the render that asks for it, up to the last token that the
    target itself would write: text that the template puts after the end token is context, not a label.

    Raises:
        DataError: the template rewrites earlier turns, so no border can be drawn.
    """
    ids: list[int] = []
    marks: list[bool] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        try:
            prompt = encoder.encode(encoder.render_chat(turns[:index], add_generation_prompt=True))
            whole = encoder.encode(encoder.render_chat(turns[: index + 1], add_generation_prompt=False))
            trailing = _num_trailing(encoder, turns[:index])
        except RequestError as error:
            raise DataError(f"{where}: {error.message}", hint=error.hint) from error
        if prompt[: len(ids)] != ids or whole[: len(prompt)] != prompt:
            raise DataError(
                f"{where}: adding turn {index} changes the tokens before it, so its own cannot be told apart",
                hint="one assistant turn per conversation (some templates rewrite earlier ones), no leading blank line",
            )
        marks += [False] * (len(prompt) - len(ids)) + [True] * (len(whole) - len(prompt))
        if trailing:
            marks[-trailing:] = [False] * trailing
        ids = whole
    return ids, marks


def _num_trailing(encoder: ChatEncoder, history: Sequence[Mapping[str, str]]) -> int:
    """Tokens that the template puts after the end token of an assistant turn.

    Two answers that share no token are rendered: what both renders end in is the end token and what follows it.
    """
    renders = [
        encoder.encode(
            encoder.render_chat([*history, {"role": "assistant", "content": answer}], add_generation_prompt=False)
        )
        for answer in ("0", "yes")
    ]
    same = 0
    while same < min(map(len, renders)) and renders[0][-1 - same] == renders[1][-1 - same]:
        same += 1
    return max(same - 1, 0)


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
