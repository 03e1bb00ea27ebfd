"""Attention of a batch over keys where they lie, one native call per layer: nothing is gathered, padded or masked.

A row's bits depend on what it sees alone, so this form serves prompts, plain decoding and verification alike.

B requests, T rows per request, Q block rows, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from paceline.engine.cache import KeyValueCache
from paceline.ops.native.attention import LARGEST_HEAD, BlockedAttention, InLayer


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
    ) -> None:
        self._windows = windows
        positions_BT = starts_B.unsqueeze(1) + torch.arange(num_rows)
        self._spans = Spans(positions_BT, firsts_B, ends_BT=None)
        self._attend = BlockedAttention(
            cache.planes,
            cache.tables.table,
            slots_B,
            starts_B,
            num_rows=num_rows,
            end=max(starts) + num_rows,
            write_rows_BT=cache.tables.rows_of(slots_B, positions_BT),
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
        ends_B1 = lengths_B.unsqueeze(1) + num_rows
        positions_BQ = lengths_B.unsqueeze(1) + torch.arange(num_rows)
        self._spans = Spans(positions_BQ, firsts_B, ends_BT=ends_B1.expand_as(positions_BQ))
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
        positions_BT: int64, of the rows.
        firsts_B: int64, nothing is seen below; None is 0 for all.
        ends_BT: int64, where the keys of each row's request end; None where every layer is causal.
    """

    def __init__(self, positions_BT: Tensor, firsts_B: Tensor | None, *, ends_BT: Tensor | None) -> None:
        self._positions_BT, self._firsts_B, self._ends_BT = positions_BT, firsts_B, ends_BT
        self._found: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def of(self, window: int | None, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        """The first position that each row sees, and the first that it does not see any more, int32 [B, T] both."""
        found = self._found.get((window, is_causal))
        if found is None:
            positions_BT, ends_BT = self._positions_BT, self._ends_BT
            lows_BT = torch.zeros_like(positions_BT) if window is None else (positions_BT - window + 1).clamp(min=0)
            if self._firsts_B is not None:
                lows_BT = torch.maximum(lows_BT, self._firsts_B.unsqueeze(1))
            if is_causal:
                highs_BT = positions_BT + 1
            else:
                assert ends_BT is not None, "only blocks have rows that see later ones"
                highs_BT = ends_BT if window is None else torch.minimum(ends_BT, positions_BT + window)
            found = lows_BT.int().contiguous(), highs_BT.int().contiguous()
            self._found[window, is_causal] = found
        return found
