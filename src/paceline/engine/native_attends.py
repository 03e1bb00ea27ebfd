"""Attention of a batch over keys where they lie, one native call per layer: nothing is gathered, padded or masked.

A row's bits depend on what it sees alone, so this form serves prompts, plain decoding and verification alike.

B requests, T rows per request, Q block rows, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from paceline.engine.cache import KeyValueCache
from paceline.ops.native.attention import LARGEST_HEAD, BlockedAttention, InLayer, seen_spans
from paceline.ops.table_rows import table_rows


def can_attend(cache: KeyValueCache) -> bool:
    """Whether the native call takes keys of this form."""
    planes = cache.planes
    return planes.dtype == torch.bfloat16 and planes.shape[-1] % 2 == 0 and planes.shape[-1] <= LARGEST_HEAD


class CausalNative(InLayer):
    """Rows of causal models: each sees what is stored and the rows of its request up to itself, and is stored.

    Args:
        cache: where the rows are stored.
        slots_B: int64, one per request.
        starts: positions of the first rows.
        starts_B: int64, the same.
        firsts_B: int64, keys at positions below do not exist; None is 0 for all.
        num_rows: T.
        windows: per layer; None for none at all.
        cells_BT: int64, physical rows that the rows go to; None looks them up.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        slots_B: Tensor,
        starts: Sequence[int],
        starts_B: Tensor,
        firsts_B: Tensor | None,
        num_rows: int,
        windows: Sequence[int | None] | None,
        cells_BT: Tensor | None = None,
    ) -> None:
        self._windows = windows
        tables = cache.tables
        if cells_BT is None:
            cells_BT = table_rows(tables.table, slots_B, starts_B, num_rows, block_size=tables.block_size)
        self._spans = Spans(starts_B, firsts_B, num_rows)
        self._attend = BlockedAttention(
            cache.planes,
            tables.table,
            slots_B,
            starts_B,
            num_rows=num_rows,
            end=max(starts) + num_rows,
            write_rows_BT=cells_BT,
        )
        self.num_threads = self._attend.num_threads

    def in_layer(self, layer: int) -> int:
        return self._attend.in_layer(layer, *self._seen_in(layer))

    def key_stride(self) -> int | None:
        return self._attend.key_stride if self._windows is None else None

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, q_BTNH, k_BTMH, v_BTMH, *self._seen_in(layer), sink_N=sink_N)

    def _seen_in(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._spans.of(None if self._windows is None else self._windows[layer], is_causal=True)


class BlockNative(InLayer):
    """Rows of draft blocks: each sees the context and rows of its block, and stays out of the cache.

    Args:
        cache: the drafter's context.
        slots_B: int64, one per request.
        lengths_B: int64, context ends there, and the block begins.
        firsts_B: int64, context begins there; None is 0 for all.
        max_length: at least the largest of the lengths.
        num_rows: Q.
        windows: per layer.
        causal: per layer.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        slots_B: Tensor,
        lengths_B: Tensor,
        firsts_B: Tensor | None,
        max_length: int,
        num_rows: int,
        windows: Sequence[int | None],
        causal: Sequence[bool],
    ) -> None:
        self._windows, self._causal = windows, causal
        self._spans = Spans(lengths_B, firsts_B, num_rows)
        self._attend = BlockedAttention(
            cache.planes,
            cache.tables.table,
            slots_B,
            lengths_B,
            num_rows=num_rows,
            end=max_length + num_rows,
            write_rows_BT=None,
        )
        self.num_threads = self._attend.num_threads

    def in_layer(self, layer: int) -> int:
        return self._attend.in_layer(layer, *self._seen_in(layer))

    def key_stride(self) -> int | None:
        kinds = set(zip(self._windows, self._causal, strict=True))
        return self._attend.key_stride if len(kinds) == 1 else None

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, q_BTNH, k_BTMH, v_BTMH, *self._seen_in(layer), sink_N=sink_N)

    def _seen_in(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._spans.of(self._windows[layer], is_causal=self._causal[layer])


class Spans:
    """What each row sees, from one position to another, by kind of layer; each kind is worked out once.

    Args:
        starts_B: int64, positions of the first rows.
        firsts_B: int64, nothing is seen below; None is 0 for all.
        num_rows: T; behind them there are no keys.
    """

    def __init__(self, starts_B: Tensor, firsts_B: Tensor | None, num_rows: int) -> None:
        self._starts_B, self._firsts_B, self._num_rows = starts_B, firsts_B, num_rows
        self._found: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def of(self, window: int | None, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        """The first position that each row sees, and the first that it does not see any more, int32 [B, T] both."""
        found = self._found.get((window, is_causal))
        if found is None:
            found = seen_spans(self._starts_B, self._firsts_B, self._num_rows, window, is_causal=is_causal)
            self._found[window, is_causal] = found
        return found
