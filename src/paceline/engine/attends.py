"""Attention over the cache, as the models call it. Here, and where rows are written, is where devices differ.

On a CPU each request attends over a view of exactly its own context: nothing is gathered or padded. On a GPU the batch
is one masked call over the longest context. In row-invariant arithmetic requests go one by one on any device.

B requests, T rows per request, S keys, N query heads, M key/value heads, H head size, Q block rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.engine.cache import KeyValueCache
from paceline.models.layers import Attend
from paceline.ops.attention import (
    attention,
    attention_row_invariant,
    attention_with_bias,
    bias_of,
    causal_attention,
)


@dataclass(frozen=True)
class AttentionChoice:
    """Which form of attention an engine uses, decided once.

    Attributes:
        is_batched: one padded call for all requests; otherwise one exact call per request.
        is_row_invariant: fixed kernel shapes, so that a row's bits are its own; implies one call per request.
    """

    is_batched: bool
    is_row_invariant: bool

    @classmethod
    def for_device(cls, device: torch.device, *, is_row_invariant: bool) -> AttentionChoice:
        """Pick the form for a device and an arithmetic."""
        return cls(is_batched=device.type != "cpu" and not is_row_invariant, is_row_invariant=is_row_invariant)


def write_then_attend(
    cache: KeyValueCache,
    choice: AttentionChoice,
    *,
    slots: Sequence[int],
    slots_B: Tensor,
    starts: Sequence[int],
    starts_B: Tensor,
    num_rows: int,
    windows: Sequence[int | None] | None = None,
) -> Attend:
    """Attention of a causal model: row i of a request is stored at start + i and sees positions 0 to start + i.

    Args:
        cache: the target's, or that of a drafter which drafts row by row.
        choice: from `AttentionChoice.for_device`.
        slots: one per request.
        slots_B: the same, int64.
        starts: positions of the first rows; in the batched form only their largest counts, as an upper bound.
        starts_B: the same, int64.
        num_rows: T.
        windows: per layer, tokens that a row may see, itself included; None is all, for a layer or for every layer.
    """
    if choice.is_batched:
        return _BatchedCausal(cache, slots_B, starts_B, num_rows, max(starts) + num_rows, windows)
    return _CausalPerRequest(cache, slots, starts, num_rows, windows, choice.is_row_invariant)


def attend_block(
    cache: KeyValueCache,
    choice: AttentionChoice,
    *,
    slots: Sequence[int],
    slots_B: Tensor,
    lengths_B: Tensor,
    max_length: int,
    num_rows: int,
    windows: Sequence[int | None],
    causal: Sequence[bool],
) -> Attend:
    """Attention for a draft block: rows see the cached context 0 to length - 1 and the block itself, which stays out
    of the cache.

    Args:
        cache: the drafter's context.
        choice: from `AttentionChoice.for_device`.
        slots: one per request.
        slots_B: the same, int64.
        lengths_B: int64, context lengths; the block's first row sits at this position.
        max_length: at least the largest of them.
        num_rows: Q.
        windows: per layer, tokens that a row may see, itself included: |p - j| < window.
        causal: per layer, whether a row sees no later row of the block.
    """
    if choice.is_batched:
        return _BatchedBlock(cache, slots_B, lengths_B, max_length, num_rows, windows, causal)
    lengths = [int(length) for length in lengths_B.tolist()]
    return _BlockPerRequest(cache, slots, lengths, num_rows, windows, causal, choice.is_row_invariant)


def _one_request(
    q_1TNH: Tensor,
    k_1MSH: Tensor,
    v_1MSH: Tensor,
    visible: Tensor | None,
    is_row_invariant: bool,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Attention of a single request; `visible` comes from `_per_query_row`. Returns [1, T, N, H]."""
    q_1NTH = q_1TNH.transpose(1, 2)
    num_rows = q_1TNH.shape[1]
    if sink_N is not None:  # drafters alone have sinks, and a drafter's bits never reach the output
        visible_TS = None if visible is None else visible[:num_rows]
        return attention(q_1NTH, k_1MSH, v_1MSH, visible=visible_TS, sink_N=sink_N).transpose(1, 2)
    if is_row_invariant:
        if visible is None:
            visible = torch.ones(num_rows, k_1MSH.shape[2], dtype=torch.bool, device=q_1TNH.device)
        return attention_row_invariant(q_1NTH[0], k_1MSH[0], v_1MSH[0], visible).transpose(0, 1).unsqueeze(0)
    # Heads that share keys become more query rows here, not in `attention`, which would repeat the mask per layer.
    q_1MRH = q_1NTH.reshape(1, k_1MSH.shape[1], -1, q_1NTH.shape[3])
    return attention(q_1MRH, k_1MSH, v_1MSH, visible=visible).view(q_1NTH.shape).transpose(1, 2)


def _per_query_row(visible_TS: Tensor, num_heads: int, num_kv_heads: int, is_row_invariant: bool) -> Tensor:
    """A mask as `_one_request` takes it: one row per query row, repeated for the heads that share keys."""
    return visible_TS if is_row_invariant else visible_TS.repeat(num_heads // num_kv_heads, 1)


@dataclass
class _CausalPerRequest:
    cache: KeyValueCache
    slots: Sequence[int]
    starts: Sequence[int]
    num_rows: int
    windows: Sequence[int | None] | None
    is_row_invariant: bool
    _visible: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        assert sink_N is None, "causal models have no attention sinks"
        if len(self.slots) == 1:  # the case whose speed is felt: nothing but the attention itself
            return self._request(layer, self.slots[0], self.starts[0], q_BTNH, k_BTMH, v_BTMH)
        rows = zip(self.slots, self.starts, q_BTNH.split(1), k_BTMH.split(1), v_BTMH.split(1), strict=True)
        return torch.cat([self._request(layer, slot, start, q, k, v) for slot, start, q, k, v in rows])

    def _request(self, layer: int, slot: int, start: int, q_1TNH: Tensor, k_1TMH: Tensor, v_1TMH: Tensor) -> Tensor:
        self.cache.write_rows(layer, slot, start, k_1TMH, v_1TMH)
        length = start + self.num_rows
        window = None if self.windows is None else self.windows[layer]
        if window is not None and window >= length:
            window = None
        if start == 0 and self.num_rows > 1 and window is None and not self.is_row_invariant:
            q, k, v = (rows.transpose(1, 2) for rows in (q_1TNH, k_1TMH, v_1TMH))
            return causal_attention(q, k, v).transpose(1, 2)
        keys, values = self.cache.context(layer, slot, length)
        if self.num_rows == 1 and window is None and not self.is_row_invariant:
            # No mask, and with one row there is nothing to transpose either.
            q_1MGH = q_1TNH.reshape(1, keys.shape[1], -1, keys.shape[3])
            return attention(q_1MGH, keys, values).view(q_1TNH.shape)
        visible = self._visible_of(start, window, q_1TNH.shape[2], keys)
        return _one_request(q_1TNH, keys, values, visible, self.is_row_invariant)

    def _visible_of(self, start: int, window: int | None, num_heads: int, k_1MSH: Tensor) -> Tensor:
        key = (start, window)
        if key not in self._visible:
            key_S = torch.arange(start + self.num_rows, device=k_1MSH.device)
            visible_TS = _block_visible(key_S[start:], key_S, window, is_causal=True)
            self._visible[key] = _per_query_row(visible_TS, num_heads, k_1MSH.shape[1], self.is_row_invariant)
        return self._visible[key]


class _BatchedCausal:
    def __init__(
        self,
        cache: KeyValueCache,
        slots_B: Tensor,
        starts_B: Tensor,
        num_rows: int,
        length: int,
        windows: Sequence[int | None] | None,
    ) -> None:
        self._cache, self._slots_B, self._length, self._windows = cache, slots_B, length, windows
        self._positions_BT = starts_B.unsqueeze(1) + torch.arange(num_rows, device=starts_B.device)
        self._bias: dict[int | None, Tensor] = {}

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        assert sink_N is None, "causal models have no attention sinks"
        self._cache.write_batch(layer, self._slots_B, self._positions_BT, k_BTMH, v_BTMH)
        keys, values = self._cache.gather(layer, self._slots_B, self._length)
        bias = self._bias_of(None if self._windows is None else self._windows[layer], q_BTNH, k_BTMH)
        return attention_with_bias(q_BTNH.transpose(1, 2), keys, values, bias).transpose(1, 2)

    def _bias_of(self, window: int | None, q_BTNH: Tensor, k_BTMH: Tensor) -> Tensor:
        if window not in self._bias:
            key_S = torch.arange(self._length, device=q_BTNH.device)
            visible_BTS = _block_visible(self._positions_BT, key_S, window, is_causal=True)
            self._bias[window] = bias_of(visible_BTS, q_BTNH.shape[2] // k_BTMH.shape[2], q_BTNH.dtype)
        return self._bias[window]


def _block_visible(position_Q: Tensor, key_S: Tensor, window: int | None, is_causal: bool) -> Tensor:
    """The rule of drafter attention on absolute positions; broadcasts over leading dimensions."""
    distance = position_Q.unsqueeze(-1) - key_S
    visible = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if window is None else visible & (distance.abs() < window)


class _BlockPerRequest:
    def __init__(
        self,
        cache: KeyValueCache,
        slots: Sequence[int],
        lengths: Sequence[int],
        num_rows: int,
        windows: Sequence[int | None],
        causal: Sequence[bool],
        is_row_invariant: bool,
    ) -> None:
        self._cache, self._slots, self._lengths = cache, slots, lengths
        self._num_rows, self._windows, self._causal = num_rows, windows, causal
        self._is_row_invariant = is_row_invariant
        self._visible: dict[tuple[int, int | None, bool], Tensor] = {}

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        mixed = []
        for slot, length, q, k, v in zip(
            self._slots, self._lengths, q_BTNH.split(1), k_BTMH.split(1), v_BTMH.split(1), strict=True
        ):
            context_k, context_v = self._cache.context(layer, slot, length)
            keys = torch.cat((context_k, k.transpose(1, 2)), dim=2)
            values = torch.cat((context_v, v.transpose(1, 2)), dim=2)
            visible = self._visible_of(length, layer, q.shape[2], keys)
            mixed.append(_one_request(q, keys, values, visible, self._is_row_invariant, sink_N))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _visible_of(self, length: int, layer: int, num_heads: int, k_1MSH: Tensor) -> Tensor | None:
        window, is_causal = self._windows[layer], self._causal[layer]
        if not is_causal and (window is None or window >= k_1MSH.shape[2]):
            return None
        key = (length, window, is_causal)
        if key not in self._visible:
            key_S = torch.arange(k_1MSH.shape[2], device=k_1MSH.device)
            visible_QS = _block_visible(key_S[length:], key_S, window, is_causal)
            self._visible[key] = _per_query_row(visible_QS, num_heads, k_1MSH.shape[1], self._is_row_invariant)
        return self._visible[key]


class _BatchedBlock:
    def __init__(
        self,
        cache: KeyValueCache,
        slots_B: Tensor,
        lengths_B: Tensor,
        max_length: int,
        num_rows: int,
        windows: Sequence[int | None],
        causal: Sequence[bool],
    ) -> None:
        self._cache, self._slots_B, self._max_length = cache, slots_B, max_length
        device = lengths_B.device
        context_S = torch.arange(max_length, device=device)
        position_BQ = lengths_B.unsqueeze(1) + torch.arange(num_rows, device=device)
        key_BS = torch.cat((context_S.expand(lengths_B.shape[0], -1), position_BQ), dim=1)
        # Keys past a request's own length are rows of refused drafts or of nobody; only the tail holds real ones there.
        is_real_BS = torch.cat(
            (context_S < lengths_B.unsqueeze(1), torch.ones_like(position_BQ, dtype=torch.bool)), dim=1
        )
        by_kind: dict[tuple[int | None, bool], Tensor] = {}
        for kind in set(zip(windows, causal, strict=True)):
            visible_BQS = _block_visible(position_BQ, key_BS.unsqueeze(1), *kind) & is_real_BS.unsqueeze(1)
            by_kind[kind] = visible_BQS.unsqueeze(1)
        self._visible = [by_kind[kind] for kind in zip(windows, causal, strict=True)]

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        context_k, context_v = self._cache.gather(layer, self._slots_B, self._max_length)
        k = torch.cat((context_k, k_BTMH.transpose(1, 2)), dim=2)
        v = torch.cat((context_v, v_BTMH.transpose(1, 2)), dim=2)
        return attention(q_BTNH.transpose(1, 2), k, v, visible=self._visible[layer], sink_N=sink_N).transpose(1, 2)
