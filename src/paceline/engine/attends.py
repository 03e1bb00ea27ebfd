"""Attention over the cache, as the models call it. Here, and where rows are written, is where devices differ.

On a CPU each request attends over exactly its own keys: a view of them where its blocks are one run, so that nothing is
gathered or padded. Padding requests of similar length to one call of torch's was tried and costs more than the calls
that it saves. Where the arithmetic is native, one call serves the batch (`native_attends.py`). On a GPU one kernel
finds the keys of the batch through the table (`paged_attends.py`); without Triton the batch is one masked call over the
longest context. In row-invariant arithmetic requests go one by one on any device.

B requests, T rows per request, Q block rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.block_attends import BlockBatched, BlockPerRequest
from paceline.engine.cache import KeyValueCache
from paceline.engine.causal_attends import CausalBatched, CausalPerRequest
from paceline.engine.native_attends import BlockNative, CausalNative, can_attend
from paceline.engine.paged_attends import BlockPaged, CausalPaged, can_attend_paged
from paceline.models.layers import Attend
from paceline.ops.delta_prompts import PromptKernel
from paceline.ops.dispatch import HAS_TRITON


@dataclass(frozen=True)
class AttentionChoice:
    """Which form of attention an engine uses, decided once.

    Attributes:
        is_batched: one padded call for all requests; otherwise one exact call per request.
        is_row_invariant: fixed kernel shapes, so that a row's bits are its own; implies one call per request.
        is_native: one native call for all requests, over their keys where they lie; a row's bits are its own as well.
        is_paged: one kernel for all requests, which finds their keys through the device's table; implies `is_batched`,
            as nothing is read on the host.
        prompt_kernel: what runs the recurrence of prompts, where the target has one.
    """

    is_batched: bool
    is_row_invariant: bool
    is_native: bool = False
    is_paged: bool = False
    prompt_kernel: PromptKernel = "auto"

    def __post_init__(self) -> None:
        assert self.is_batched or not self.is_paged, "a paged pass asks the device for nothing"

    @property
    def reads_tables(self) -> bool:
        """Whether a pass looks blocks up in the device's tables, so that rows want their cells."""
        return self.is_batched or self.is_native

    @classmethod
    def for_device(
        cls,
        device: torch.device,
        *,
        is_row_invariant: bool,
        is_native: bool = False,
        is_paged: bool = False,
        prompt_kernel: PromptKernel = "auto",
    ) -> AttentionChoice:
        """Pick the form for a device and an arithmetic; `is_paged` asks for that form on a CPU too."""
        is_paged = not is_row_invariant and (is_paged or (device.type == "cuda" and HAS_TRITON))
        is_batched = is_paged or (device.type != "cpu" and not is_row_invariant)
        return cls(is_batched, is_row_invariant, is_native, is_paged, prompt_kernel)


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
    context_starts: Sequence[int] | None = None,
    context_starts_B: Tensor | None = None,
    cells_BT: Tensor | None = None,
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
        context_starts: positions below hold no keys and are never read, whatever lies there; None is 0 for all. For
            drafters: the target has keys from 0 on.
        context_starts_B: the same, int64.
        cells_BT: int64, physical rows that the rows go to, where they were looked up already.
    """

    if choice.is_native and can_attend(cache):
        return CausalNative(cache, slots_B, starts, starts_B, context_starts_B, num_rows, windows, cells_BT)
    if choice.is_paged and can_attend_paged(cache):
        return CausalPaged(cache, slots_B, starts_B, context_starts_B, num_rows, windows, cells_BT)
    if choice.is_batched:
        length = max(starts) + num_rows
        return CausalBatched(cache, slots_B, starts_B, context_starts_B, num_rows, length, windows)
    firsts = [0] * len(slots) if context_starts is None else list(context_starts)
    return CausalPerRequest(cache, slots, starts, firsts, num_rows, windows, is_row_invariant=choice.is_row_invariant)


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
    context_starts: Sequence[int] | None = None,
    context_starts_B: Tensor | None = None,
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
        context_starts: positions below hold no context and are never read; None is 0 for all.
        context_starts_B: the same, int64.
    """

    if choice.is_native and can_attend(cache):
        return BlockNative(cache, slots_B, lengths_B, context_starts_B, max_length, num_rows, windows, causal)
    if choice.is_paged and can_attend_paged(cache):
        return BlockPaged(cache, slots_B, lengths_B, context_starts_B, num_rows, windows, causal)
    if choice.is_batched:
        return BlockBatched(cache, slots_B, lengths_B, context_starts_B, max_length, num_rows, windows, causal)
    lengths = [int(length) for length in lengths_B.tolist()]
    firsts = [0] * len(slots) if context_starts is None else list(context_starts)
    return BlockPerRequest(
        cache, slots, lengths, firsts, num_rows, windows, causal, is_row_invariant=choice.is_row_invariant
    )
