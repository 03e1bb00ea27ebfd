"""One shard of stored features: its tensors and its header, written and found again.

Tensors of N tokens and n conversations: `taps` [N, taps * D], ascending and joined on the feature axis; `last_hidden`
[N, D], after the final norm, where it is kept; `token_ids` int32 [N]; `loss_mask` uint8 [N]; `starts` int64 [n + 1].
The header names run, target, capture ids and dtype, and holds the scale of every tap.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.capture.feature_record import conversation_key
from paceline.capture.shards import ShardFolder
from paceline.checkpoint.weights import open_safetensors_file, read_safetensors_metadata, save_safetensors
from paceline.errors import DataError

SUFFIX = ".safetensors"
_OPEN_SHARDS = 64


@dataclass(frozen=True)
class TapScales:
    """Sums from which the root mean square of every tap follows, at a text's first position and at all others.

    The first token of a text carries a massive activation in many targets, hundreds of times the rest.

    Attributes:
        squares: per tap, sum of squares past the first positions.
        num_elements: how many these are, per tap.
        first_squares: per tap, sum of squares at first positions.
        num_first: how many these are, per tap.
    """

    squares: tuple[float, ...]
    num_elements: int
    first_squares: tuple[float, ...]
    num_first: int

    def __add__(self, other: TapScales) -> TapScales:
        return TapScales(
            tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
            self.num_elements + other.num_elements,
            tuple(a + b for a, b in zip(self.first_squares, other.first_squares, strict=True)),
            self.num_first + other.num_first,
        )

    @property
    def rms(self) -> list[float]:
        """Per tap, past the first position of a text; 0 if there is none."""
        return [(total / max(self.num_elements, 1)) ** 0.5 for total in self.squares]

    @property
    def first_rms(self) -> list[float]:
        """Per tap, at the first position of a text."""
        return [(total / max(self.num_first, 1)) ** 0.5 for total in self.first_squares]


@dataclass(frozen=True)
class ShardContent:
    """What one shard holds; see the file's head for shapes."""

    taps: Tensor
    last_hidden: Tensor | None
    token_ids: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray
    scales: TapScales
    num_checked: int
    num_agreed: int


def write_feature_file(path: Path, content: ShardContent, header: Mapping[str, str]) -> dict[str, int]:
    """Write a shard and count what is in it.

    Args:
        path: the file.
        content: its tensors.
        header: run, target, capture ids, dtype.
    Raises:
        CapacityError: the disk is full.
    """
    tensors = {
        "taps": content.taps,
        "token_ids": torch.from_numpy(content.token_ids),
        "loss_mask": torch.from_numpy(content.loss_mask.view(np.uint8)),
        "starts": torch.from_numpy(content.starts),
    }
    if content.last_hidden is not None:
        tensors["last_hidden"] = content.last_hidden
    scales = content.scales
    sums = [list(scales.squares), scales.num_elements, list(scales.first_squares), scales.num_first]
    save_safetensors(path, tensors, {**header, "tap_scales": json.dumps(sums)})
    return {
        "conversations": len(content.starts) - 1,
        "tokens": len(content.token_ids),
        "answer_tokens": int(content.loss_mask.sum()),
        "teacher_checked": content.num_checked,
        "teacher_agreed": content.num_agreed,
    }


def read_tap_scales(path: Path) -> TapScales:
    """The scale of a shard's taps, from its header."""
    squares, num_elements, first_squares, num_first = json.loads(read_safetensors_metadata(path)["tap_scales"])
    return TapScales(tuple(squares), num_elements, tuple(first_squares), num_first)


class StoredConversations:
    """Features of a complete folder, found by a conversation's token ids.

    Files are mapped into memory and read where they are asked for; ids and borders are read at once.

    Args:
        folder: complete.
    Raises:
        DataError: a shard lacks a tensor, disagrees with its own borders, or is of another capture.
    """

    def __init__(self, folder: ShardFolder) -> None:
        self._folder = folder
        self._places: dict[bytes, tuple[int, int, int]] = {}
        for record in folder.records():
            source = open_safetensors_file(folder.path(record.index))
            run = read_safetensors_metadata(folder.path(record.index)).get("run_id")
            if run != folder.plan.get("run_id"):
                raise DataError(
                    f"{source.origin} was written by capture {run}; the folder is of capture "
                    f"{folder.plan.get('run_id')}"
                )
            missing = {"taps", "token_ids", "starts"} - set(source.names())
            if missing:
                raise DataError(f"{source.origin} lacks the tensors {sorted(missing)}")
            token_ids, starts = source.load("token_ids").numpy(), source.load("starts").tolist()
            if starts[-1] != len(token_ids) or source.shape("taps")[0] != len(token_ids):
                raise DataError(
                    f"{source.origin}: borders end at {starts[-1]}, with {len(token_ids)} ids and "
                    f"{source.shape('taps')[0]} rows of taps"
                )
            for start, end in itertools.pairwise(starts):
                self._places[conversation_key(token_ids[start:end])] = (record.index, start, end)
        self._tensors = functools.lru_cache(maxsize=_OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        """Distinct conversations."""
        return len(self._places)

    def find(self, token_ids: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Taps [S, taps * D] and last states [S, D] of one conversation, as views of the file.

        Raises:
            DataError: it is not stored.
        """
        place = self._places.get(conversation_key(token_ids))
        if place is None:
            raise DataError(
                f"no features are stored for a conversation of {len(token_ids)} tokens that begins "
                f"{token_ids[:8].tolist()}",
                origin={"features": self._folder.folder},
                hint="the data.files and data.max_length that the features were captured from",
            )
        index, start, end = place
        taps, last_hidden = self._tensors(index)
        return taps[start:end], None if last_hidden is None else last_hidden[start:end]

    def _open(self, index: int) -> tuple[Tensor, Tensor | None]:
        source = open_safetensors_file(self._folder.path(index))
        return source.load("taps"), source.load("last_hidden") if "last_hidden" in source.names() else None


def feature_header(
    run: str, record: Mapping[str, object], capture_ids: Sequence[int], index: int, num_shards: int
) -> dict[str, str]:
    """Strings that make a shard tell by itself where it belongs."""
    target = record["target"]
    assert isinstance(target, Mapping), "a record names its target"
    return {
        "run_id": run,
        "capture_ids": json.dumps(list(capture_ids)),  # index into hidden states that start with the embedding
        "tap_ids": json.dumps(record["tap_ids"]),
        "tap_id_scheme": str(record["tap_id_scheme"]),
        "aux_hidden_stream": str(record["aux_hidden_stream"]),
        "target_sha256": str(target["sha256_of_weights"]),
        "dtype": str(record["tap_dtype"]),
        "last_hidden_norm": str(record["last_hidden_norm"]),
        "shard": f"{index} of {num_shards}",
    }
