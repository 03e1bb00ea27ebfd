"""Attention of a batch over keys in blocks through the device's table: nothing is gathered, masked or read on the host.

A pass of this form can be captured and replayed: where requests stand is read inside it. Whoever computes keys and
values may store them too (`ops/paged_attention.py: PagedAttend`).

B requests, T rows per request, Q block rows, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.cache import KeyValueCache
from paceline.ops.paged_attention import PagedAttend, can_page, paged_attention
from paceline.ops.table_rows import table_rows


def can_attend_paged(cache: KeyValueCache) -> bool:
    """Whether the operation takes blocks of this form, where the cache is."""
    return can_page(cache.planes)


class CausalPaged(PagedAttend):
    """Rows of causal models: each is stored and sees what its request has stored up to it.

    Args:
        cache: where the rows are stored.
        slots_B: int64, one per request.
        starts_B: int64, positions of the first rows.
        firsts_B: int64, keys at positions below do not exist; None is 0 for all.
        num_rows: T.
        windows: per layer; None for none at all.
        cells_BT: int64, physical rows that the rows go to; None looks them up.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        slots_B: Tensor,
        starts_B: Tensor,
        firsts_B: Tensor | None,
        num_rows: int,
        windows: Sequence[int | None] | None,
        cells_BT: Tensor | None = None,
    ) -> None:
        self._table, self._slots_B, self._starts_B, self._firsts_B = cache.tables.table, slots_B, starts_B, firsts_B
        self._windows, self._planes = windows, cache.planes.unbind(0)
        self.counters, self._arrivals = cache.counters, cache.arrivals
        if cells_BT is None:
            tables = cache.tables
            cells_BT = table_rows(tables.table, slots_B, starts_B, num_rows, block_size=tables.block_size)
        self._rows_T = cells_BT.flatten()

    def cells(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._planes[layer], self._rows_T

    def stored(self, layer: int, q_BTNH: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
        return paged_attention(
            q_BTNH,
            self._planes[layer],
            self._table,
            self._slots_B,
            self._starts_B,
            firsts_B=self._firsts_B,
            window=None if self._windows is None else self._windows[layer],
            sink_N=sink_N,
            arrivals=self._arrivals,
        )


class BlockPaged(PagedAttend):
    """Rows of draft blocks: each sees the context and rows of its block, which lie beside the cache.

    Args:
        cache: the drafter's context.
        slots_B: int64, one per request.
        lengths_B: int64, context ends there, and the block begins.
        firsts_B: int64, context begins there; None is 0 for all.
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
        num_rows: int,
        windows: Sequence[int | None],
        causal: Sequence[bool],
    ) -> None:
        self._table, self._slots_B, self._lengths_B, self._firsts_B = cache.tables.table, slots_B, lengths_B, firsts_B
        self._windows, self._causal, self._planes = windows, causal, cache.planes.unbind(0)
        self.counters, self._arrivals = cache.counters, cache.arrivals
        B = slots_B.shape[0]
        # One for all layers: a layer's rows are read before those of the next are known.
        shape = (2, cache.num_kv_heads, 1, B * num_rows, cache.head_size)
        self._tail = torch.empty(shape, dtype=cache.planes.dtype, device=cache.planes.device)
        self._rows_T = torch.arange(B * num_rows, device=cache.planes.device)

    def cells(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._tail, self._rows_T

    def stored(self, layer: int, q_BTNH: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
        return paged_attention(
            q_BTNH,
            self._planes[layer],
            self._table,
            self._slots_B,
            self._lengths_B,
            tail=self._tail,
            firsts_B=self._firsts_B,
            window=self._windows[layer],
            is_causal=self._causal[layer],
            sink_N=sink_N,
            arrivals=self._arrivals,
        )
