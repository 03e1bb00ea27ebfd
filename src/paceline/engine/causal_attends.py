"""Attention of causal models over the cache: rows are stored before anybody looks.

B requests, T rows per request, S keys, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.cache import KeyValueCache
from paceline.engine.request_attention import Masks, attend_each, attend_row_invariant, visible_keys
from paceline.ops.attention import attention_with_bias, bias_of, causal_attention


class CausalPerRequest:
    """One exact call per request over views of its own keys, or copies where its blocks are scattered.

    Args:
        cache: where the rows are stored.
        slots: one per request.
        starts: positions of the first rows.
        firsts: keys at positions below do not exist.
        num_rows: T.
        windows: per layer; None for none at all.
        is_row_invariant: a row's bits are its own.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        slots: Sequence[int],
        starts: Sequence[int],
        firsts: Sequence[int],
        num_rows: int,
        windows: Sequence[int | None] | None,
        *,
        is_row_invariant: bool,
    ) -> None:
        self._starts, self._firsts, self._num_rows, self._windows = starts, firsts, num_rows, windows
        self._num_kv_heads, self._is_row_invariant = cache.num_kv_heads, is_row_invariant
        self._write = cache.writer(slots, starts, num_rows)
        spans = zip(slots, starts, firsts, strict=True)
        self._contexts = [cache.reader(slot, start + num_rows, first) for slot, start, first in spans]
        self._masks = Masks(num_rows, cache.num_kv_heads, is_bool=False)
        self._masks_by_window: dict[int | None, list[Tensor | None]] = {}
        self._begins = num_rows > 1 and list(starts) == list(firsts) and not is_row_invariant

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        assert sink_N is None, "causal models have no attention sinks"
        self._write(layer, k_BTMH, v_BTMH)
        window = None if self._windows is None else self._windows[layer]
        if self._begins and (window is None or window >= self._num_rows):  # nobody has more keys than these
            q, k, v = (rows.transpose(1, 2) for rows in (q_BTNH, k_BTMH, v_BTMH))
            return causal_attention(q, k, v).transpose(1, 2)
        contexts = (context(layer) for context in self._contexts)
        if not self._is_row_invariant:
            return attend_each(q_BTNH, contexts, self._masks_of(window, q_BTNH), self._num_kv_heads)
        spans = zip(self._starts, self._firsts, strict=True)
        rows = [self._masks.tiles_of(start, first, window, q_BTNH, is_causal=True) for start, first in spans]
        return attend_row_invariant(q_BTNH, contexts, rows)

    def _masks_of(self, window: int | None, q_BTNH: Tensor) -> list[Tensor | None]:
        masks = self._masks_by_window.get(window)
        if masks is None:
            spans = zip(self._starts, self._firsts, strict=True)
            masks = [self._masks.of(start, first, window, q_BTNH, is_causal=True) for start, first in spans]
            self._masks_by_window[window] = masks
        return masks


class CausalBatched:
    """One masked call for all requests over copies of their keys, padded to the longest context.

    Args:
        cache: where the rows are stored.
        slots_B: int64, one per request.
        starts_B: int64, positions of the first rows.
        firsts_B: int64, keys at positions below do not exist; None is 0 for all.
        num_rows: T.
        length: at least the largest start + T.
        windows: per layer; None for none at all.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        slots_B: Tensor,
        starts_B: Tensor,
        firsts_B: Tensor | None,
        num_rows: int,
        length: int,
        windows: Sequence[int | None] | None,
    ) -> None:
        self._cache, self._length, self._windows, self._firsts_B = cache, length, windows, firsts_B
        self._positions_BT = starts_B.unsqueeze(1) + torch.arange(num_rows, device=starts_B.device)
        tables = cache.tables
        self._to = cache.cells_to_write(tables.rows_of(slots_B, self._positions_BT))
        # Keys past a request's last row are nobody's or refused drafts', and may be anything: zeros are read there.
        self._from = cache.cells_to_read(tables.readable_rows(slots_B, starts_B + num_rows, length, firsts_B))
        self._bias: dict[int | None, Tensor] = {}

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        assert sink_N is None, "causal models have no attention sinks"
        self._cache.write_batch(layer, k_BTMH, v_BTMH, self._to)
        keys, values = self._cache.gather(layer, self._from)
        bias = self._bias_of(None if self._windows is None else self._windows[layer], q_BTNH, k_BTMH)
        return attention_with_bias(q_BTNH.transpose(1, 2), keys, values, bias).transpose(1, 2)

    def _bias_of(self, window: int | None, q_BTNH: Tensor, k_BTMH: Tensor) -> Tensor:
        if window not in self._bias:
            key_S = torch.arange(self._length, device=q_BTNH.device)
            visible_BTS = visible_keys(self._positions_BT, key_S, window, is_causal=True)
            if self._firsts_B is not None:
                visible_BTS &= (key_S >= self._firsts_B.unsqueeze(1)).unsqueeze(1)
            self._bias[window] = bias_of(visible_BTS, q_BTNH.shape[2] // k_BTMH.shape[2], q_BTNH.dtype)
        return self._bias[window]
