"""Attention of hybrid targets over their caches, as `models/hybrid.py` asks for it.

Where a request stands is read from the device in each form, so a pass may be launched before the host knows what the
one before it kept. On a CPU, where there is nothing to wait for, each request attends over exactly its own rows.

A pass whose rows may be refused records what they would do to the states (`RecurrentState.commit`). In a pass of a
prompt every row counts, and there may be hundreds: its states move on layer by layer, within the pass.

B requests, T rows per request, S cached rows, N heads, X width of a cached row, R its latent part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.hybrid_cache import HybridCache
from paceline.engine.latent_cache import LatentCache
from paceline.engine.recurrent_state import RecurrentState
from paceline.models.hybrid import DeltaProjections, DeltaWeights, LatentHeads, convolve
from paceline.ops.causal_convolution import next_history
from paceline.ops.delta_attention import DeltaForm, delta_attention, verify_delta
from paceline.ops.delta_prompts import PromptKernel
from paceline.ops.multi_head_latent_attention import absorbed_latent_attention, explicit_latent_attention
from paceline.ops.paged_latent_attention import paged_latent_attention
from paceline.ops.table_rows import table_rows

_EXPANDED_FROM = 128  # rows of a pass: from here on expanding every cached row is cheaper than wide queries


class LatentForm(Protocol):
    """Stores a layer's rows of a pass and attends; `place` counts latent layers."""

    def __call__(self, place: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        """Attention of all requests, [B, T, N, V]."""
        ...


class LatentPerRequest:
    """One exact call per request over a view of its own rows, or a copy where its blocks are scattered.

    Args:
        cache: where rows are stored.
        slots: one per request.
        starts: positions of their first rows.
        num_rows: T.
        is_row_invariant: a row's bits are its own.
    """

    def __init__(
        self, cache: LatentCache, slots: Sequence[int], starts: Sequence[int], num_rows: int, *, is_row_invariant: bool
    ) -> None:
        tables = cache.tables
        spans = list(zip(slots, starts, strict=True))
        self._write = cache.writer(torch.stack([tables.rows(slot, start, num_rows) for slot, start in spans]))
        self._read = [cache.reader(slot, start + num_rows) for slot, start in spans]
        self._is_expanded = num_rows >= _EXPANDED_FROM and not is_row_invariant
        self._is_row_invariant = is_row_invariant

    def __call__(self, place: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        self._write(place, rows_BTX)
        if self._is_expanded:
            expanded = [
                explicit_latent_attention(q, read(place), heads.key_NPR, heads.value_NVR, visible=None)
                for q, read in zip(q_BTNQ.split(1), self._read, strict=True)
            ]
            return torch.cat(expanded)
        mixed = [
            absorbed_latent_attention(
                q,
                read(place),
                visible=None,
                value_size=heads.latent_size,
                scale=heads.scale,
                mode="row_invariant" if self._is_row_invariant else "plain",
            )
            for q, read in zip(heads.absorb(q_BTNQ).split(1), self._read, strict=True)
        ]
        return heads.expand(torch.cat(mixed))


class LatentBatched:
    """One kernel for all requests, which finds their rows through the device's table.

    Args:
        cache: where rows are stored.
        slots_B: int64, one per request.
        starts_B: int64, positions of their first rows.
        num_rows: T.
        cells_BT: int64, physical rows that the rows go to; None looks them up.
    """

    def __init__(
        self, cache: LatentCache, slots_B: Tensor, starts_B: Tensor, num_rows: int, cells_BT: Tensor | None = None
    ) -> None:
        self._cache, self._slots_B, self._starts_B = cache, slots_B, starts_B
        if cells_BT is None:
            tables = cache.tables
            cells_BT = table_rows(tables.table, slots_B, starts_B, num_rows, block_size=tables.block_size)
        self._write = cache.writer(cells_BT)

    def __call__(self, place: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        self._write(place, rows_BTX)
        mixed_BTNR = paged_latent_attention(
            heads.absorb(q_BTNQ),
            self._cache.paged(place),
            self._cache.tables.table,
            self._slots_B,
            self._starts_B,
            value_size=heads.latent_size,
            scale=heads.scale,
        )
        return heads.expand(mixed_BTNR)


class StepDelta:
    """Delta attention of rows that may be refused: the states stay, and what each row would do is recorded.

    Args:
        recurrent: of all slots.
        slots_B: int64, one per request.
        num_rows: T.
    """

    def __init__(self, recurrent: RecurrentState, slots_B: Tensor, num_rows: int) -> None:
        self._states, self._slots_B = recurrent.rows, slots_B
        self._records = recurrent.records(slots_B.shape[0], num_rows)

    def __call__(self, place: int, rows: DeltaProjections, weights: DeltaWeights) -> Tensor:
        """Run one layer; `place` counts delta layers."""
        inputs = convolve(rows, weights, self._states.histories_LSHC[place], self._slots_B)
        records = self._records.layer(place)
        records.inputs_BTC.copy_(rows.rows_BTC)
        return verify_delta(inputs, weights.gate, self._states.states_LSNKK[place], self._slots_B, records)


class PromptDelta:
    """Delta attention of rows that all count: each layer's states move on as it is run.

    Args:
        recurrent: of all slots.
        slots_B: int64, one per request; no slot twice.
        num_rows: T.
        form: of the recurrence.
        kernel: what runs its chunked form on a GPU.
    """

    def __init__(
        self,
        recurrent: RecurrentState,
        slots_B: Tensor,
        num_rows: int,
        form: DeltaForm,
        kernel: PromptKernel = "auto",
    ) -> None:
        self._recurrent, self._slots_B, self._num_rows = recurrent, slots_B, num_rows
        self._form, self._kernel = form, kernel

    def __call__(self, place: int, rows: DeltaProjections, weights: DeltaWeights) -> Tensor:
        """Run one layer; `place` counts delta layers."""
        slots_B, form = self._slots_B, self._form
        states_SNKK, histories_SHC = (part[place] for part in self._recurrent.rows)
        inputs = convolve(rows, weights, histories_SHC, slots_B)
        answers_BTNK, states_BNKK = delta_attention(
            inputs, weights.gate, states_SNKK[slots_B], form=form, kernel=self._kernel
        )
        states_SNKK.index_copy_(0, slots_B, states_BNKK.to(states_SNKK.dtype))
        histories_SHC.index_copy_(0, slots_B, next_history(rows.rows_BTC, histories_SHC[slots_B]))
        if place == len(self._recurrent.rows.states_LSNKK) - 1:
            self._recurrent.ends_S[slots_B] += self._num_rows
        return answers_BTNK


class HybridPass:
    """The attention of one pass over all layers; satisfies `HybridAttend`.

    Args:
        cache: of the target.
        latent: form of latent attention.
        delta: form of delta attention; None for a target without.
    """

    def __init__(self, cache: HybridCache, latent: LatentForm, delta: StepDelta | PromptDelta | None) -> None:
        self._places, self._latent, self._delta = cache.places, latent, delta

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Hybrid targets have no attention over keys and values per head."""
        raise AssertionError(f"layer {layer} of a hybrid target asked for keys and values")

    def latent(self, layer: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        """Store the pass's rows and attend over them and what is cached before them."""
        return self._latent(self._places[layer], q_BTNQ, rows_BTX, heads)

    def delta(self, layer: int, rows: DeltaProjections, weights: DeltaWeights) -> Tensor:
        """Run the convolution and the recurrence from the slots' states."""
        assert self._delta is not None, "a target with delta attention"
        return self._delta(self._places[layer], rows, weights)


def attend_hybrid(
    cache: HybridCache,
    *,
    is_batched: bool,
    is_row_invariant: bool,
    slots: Sequence[int],
    slots_B: Tensor,
    starts_B: Tensor,
    num_rows: int,
    all_count: bool,
    cells_BT: Tensor | None = None,
    prompt_kernel: PromptKernel = "auto",
) -> HybridPass:
    """Attention of one pass.

    Args:
        cache: of the target.
        is_batched: one kernel for all requests; else one call per request, for which starts are read on the host.
        is_row_invariant: a row's bits are its own.
        slots: one per request.
        slots_B: the same, int64.
        starts_B: int64, positions of the first rows.
        num_rows: T.
        all_count: no row can be refused, as in a prompt.
        cells_BT: int64, physical rows that the rows go to, where they were looked up already.
        prompt_kernel: what runs the recurrence of rows that all count.
    """
    latent: LatentForm
    if is_batched:
        latent = LatentBatched(cache.latents, slots_B, starts_B, num_rows, cells_BT)
    else:
        starts = [int(start) for start in starts_B.tolist()]
        latent = LatentPerRequest(cache.latents, slots, starts, num_rows, is_row_invariant=is_row_invariant)
    delta: StepDelta | PromptDelta | None = None
    if cache.recurrent is not None and all_count:
        form: DeltaForm = "recurrent" if is_row_invariant else "chunked"
        delta = PromptDelta(cache.recurrent, slots_B, num_rows, form, prompt_kernel)
    elif cache.recurrent is not None:
        delta = StepDelta(cache.recurrent, slots_B, num_rows)
    return HybridPass(cache, latent, delta)
