"""Attention of a draft block: its rows see the cached context and each other, and stay out of the cache.

B requests, Q block rows, S keys, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.engine.block_tables import ZERO_ROW
from paceline.engine.cache import KeyValueCache
from paceline.engine.request_attention import Masks, attend_each, attend_row_invariant, visible_keys
from paceline.ops.attention import attention


class BlockPerRequest:
    """One exact call per request.

    Args:
        cache: the drafter's context.
        slots: one per request.
        lengths: context ends there, and the block begins.
        firsts: context begins there.
        num_rows: Q.
        windows: per layer.
        causal: per layer.
        is_row_invariant: a row's bits are its own.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        slots: Sequence[int],
        lengths: Sequence[int],
        firsts: Sequence[int],
        num_rows: int,
        windows: Sequence[int | None],
        causal: Sequence[bool],
        *,
        is_row_invariant: bool,
    ) -> None:
        self._lengths, self._firsts = lengths, firsts
        self._windows, self._causal = windows, causal
        self._num_kv_heads, self._is_row_invariant = cache.num_kv_heads, is_row_invariant
        spans = zip(slots, lengths, firsts, strict=True)
        self._contexts = [cache.reader(slot, length, first) for slot, length, first in spans]
        self._masks = Masks(num_rows, cache.num_kv_heads, is_bool=False)
        self._visible = Masks(num_rows, cache.num_kv_heads, is_bool=True)

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        contexts = self._contexts_of(layer, k_BTMH.transpose(1, 2), v_BTMH.transpose(1, 2))
        window, is_causal = self._windows[layer], self._causal[layer]
        spans = zip(self._lengths, self._firsts, strict=True)
        if sink_N is None and self._is_row_invariant:
            rows = [self._masks.tiles_of(*span, window, q_BTNH, is_causal=is_causal) for span in spans]
            return attend_row_invariant(q_BTNH, contexts, rows)
        made = self._visible if sink_N is not None else self._masks
        masks = [made.of(*span, window, q_BTNH, is_causal=is_causal) for span in spans]
        if sink_N is None:
            return attend_each(q_BTNH, contexts, masks, self._num_kv_heads)
        parts = zip(q_BTNH.split(1), contexts, masks, strict=True)
        # Drafters alone have sinks, and a drafter's bits never reach the output: they may depend on the block's length.
        mixed = [attention(q.transpose(1, 2), *context, visible=mask, sink_N=sink_N) for q, context, mask in parts]
        return torch.cat(mixed).transpose(1, 2)

    def _contexts_of(self, layer: int, k_BMTH: Tensor, v_BMTH: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for context, k, v in zip(self._contexts, k_BMTH.split(1), v_BMTH.split(1), strict=True):
            keys, values = context(layer)
            yield torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)


class BlockBatched:
    """One masked call for all requests, their contexts padded to the longest.

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
        self._cache, self._max_length, self._num_rows = cache, max_length, num_rows
        # Past a request's own length lie rows of refused drafts or of nobody; only the tail holds real ones there. Room
        # for it is gathered along, so that the context is copied once.
        context_BS = cache.tables.readable_rows(slots_B, lengths_B, max_length, firsts_B)
        self._from = cache.cells_to_read(functional.pad(context_BS, (0, num_rows), value=ZERO_ROW))
        device = lengths_B.device
        context_S = torch.arange(max_length, device=device)
        position_BQ = lengths_B.unsqueeze(1) + torch.arange(num_rows, device=device)
        key_BS = torch.cat((context_S.expand(lengths_B.shape[0], -1), position_BQ), dim=1)
        is_context_BS = context_S < lengths_B.unsqueeze(1)
        if firsts_B is not None:
            is_context_BS &= context_S >= firsts_B.unsqueeze(1)
        is_real_BS = torch.cat((is_context_BS, torch.ones_like(position_BQ, dtype=torch.bool)), dim=1)
        by_kind: dict[tuple[int | None, bool], Tensor] = {}
        for window, is_causal in set(zip(windows, causal, strict=True)):
            visible_BQS = visible_keys(position_BQ, key_BS.unsqueeze(1), window, is_causal=is_causal)
            by_kind[window, is_causal] = (visible_BQS & is_real_BS.unsqueeze(1)).unsqueeze(1)
        self._visible = [by_kind[kind] for kind in zip(windows, causal, strict=True)]

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        keys, values = self._cache.gather(layer, self._from)
        keys.narrow(2, self._max_length, self._num_rows).copy_(k_BTMH.transpose(1, 2))
        values.narrow(2, self._max_length, self._num_rows).copy_(v_BTMH.transpose(1, 2))
        visible = self._visible[layer]
        return attention(q_BTNH.transpose(1, 2), keys, values, visible=visible, sink_N=sink_N).transpose(1, 2)
