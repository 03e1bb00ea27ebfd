"""What is captured, in which shards, and how many bytes that takes: known before a target is loaded, without torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.checkpoint.contract import AuxHiddenStream, TargetLayerId
from paceline.errors import CapacityError

_TOKEN_BYTES = 4 + 1  # id and mark
_HEADER_BYTES = 4096  # of a file with its record, more or less
_SPARE_BYTES = 64 * 2**20  # that a disk shall keep free


@dataclass(frozen=True)
class CaptureSettings:
    """What is captured, in which portions.

    Attributes:
        layer_ids: tapped layers, ascending.
        stream: which of the target's streams.
        keeps_hidden: whether the last state, after the final norm, is stored too.
        batch_tokens: tokens of a pass of the target, padding included.
        shard_bytes: size of a shard, more or less; what a kill can cost.
        high_bytes: features that may wait to be written before the target pauses.
        low_bytes: where it goes on.
        timeout_s: after so long without a move, the capture stops with an error.
    """

    layer_ids: tuple[TargetLayerId, ...]
    keeps_hidden: bool
    stream: AuxHiddenStream = "prefix"
    batch_tokens: int = 16384
    shard_bytes: int = 256 * 2**20
    high_bytes: int = 1024 * 2**20
    low_bytes: int = 256 * 2**20
    timeout_s: float = 600.0


def bytes_per_token(hidden_size: int, num_taps: int, element_bytes: int, *, keeps_hidden: bool) -> int:
    """Size of a token's states on disk, without its id and mark."""
    return hidden_size * (num_taps + keeps_hidden) * element_bytes


def shard_bytes(num_tokens: int, num_conversations: int, state_bytes: int, num_shards: int = 1) -> int:
    """Size of shards on disk.

    Args:
        num_tokens: in all of them.
        num_conversations: in all of them.
        state_bytes: of a token's states, from `bytes_per_token`.
        num_shards: how many files.
    """
    return num_tokens * (state_bytes + _TOKEN_BYTES) + 8 * (num_conversations + num_shards) + num_shards * _HEADER_BYTES


def shard_borders(lengths: np.ndarray, state_bytes: int, most_bytes: int) -> np.ndarray:
    """Conversation borders of shards, int64 [shards + 1]: consecutive conversations of at most so many bytes.

    Args:
        lengths: tokens of each conversation.
        state_bytes: of a token.
        most_bytes: of a shard; a single conversation may exceed it.
    """
    borders, held = [0], 0
    for index, length in enumerate(lengths.tolist()):
        size = length * state_bytes
        if held and held + size > most_bytes:
            borders.append(index)
            held = 0
        held += size
    return np.array([*borders, len(lengths)], np.int64)


def require_disk(folder: Path, num_bytes: int) -> None:
    """Refuse what the disk cannot hold, before anything is written.

    Raises:
        CapacityError: says both numbers.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes + _SPARE_BYTES > free:
        raise CapacityError(
            f"the features take {num_bytes:,} bytes ({num_bytes / 2**30:.1f} GiB); the disk has {free:,} free "
            f"({free / 2**30:.1f} GiB)",
            origin={"disk of": there},
            hint="fewer taps, a smaller data.max_length, fewer conversations, or training without stored features",
        )
