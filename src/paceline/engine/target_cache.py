"""What a target keeps between passes, whatever its family, and the two moments at which a pass meets it.

B requests, T rows per request.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice, write_then_attend
from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.engine.hybrid_attends import attend_hybrid
from paceline.engine.hybrid_cache import HybridCache
from paceline.engine.proposal import Rows
from paceline.engine.recurrent_state import StateCopies
from paceline.models.layers import Attend
from paceline.models.loading import LoadedTarget
from paceline.ops.finalise_block import SOUND
from paceline.ops.verify_block import VerifiedBlock

TargetCache: TypeAlias = KeyValueCache | HybridCache


def attend_rows(cache: TargetCache, choice: AttentionChoice, rows: Rows, *, all_count: bool) -> Attend:
    """The attention of one pass of the target.

    Args:
        cache: the target's.
        choice: form of attention.
        rows: of the pass.
        all_count: no row can be refused, as in a prompt.
    """
    if isinstance(cache, HybridCache):
        return attend_hybrid(
            cache,
            is_batched=choice.is_batched,
            is_row_invariant=choice.is_row_invariant,
            slots=rows.slots,
            slots_B=rows.slots_B,
            starts_B=rows.starts_B,
            num_rows=rows.num_rows,
            all_count=all_count,
            cells_BT=rows.cells_BT,
            prompt_kernel=choice.prompt_kernel,
        )
    return write_then_attend(
        cache,
        choice,
        slots=rows.slots,
        slots_B=rows.slots_B,
        starts=rows.starts,
        starts_B=rows.starts_B,
        num_rows=rows.num_rows,
        cells_BT=rows.cells_BT,
    )


def num_kept_rows(verified: VerifiedBlock, anchors_B: Tensor) -> Tensor:
    """How many rows of a step count, int64 [B]: the anchor's and those of the kept drafts.

    The row that should have given the target's own token and gave none counts no more than a refused one: the host runs
    it again. It may do so late, so a step that was launched meanwhile, on an anchor of -1, must leave no trace.

    Args:
        verified: the verdict.
        anchors_B: int64, as they were before the step.
    """
    counts_B = verified.accepted_B + (verified.fault_B == SOUND)
    return torch.where(anchors_B < 0, 0, counts_B)


def commit_rows(cache: TargetCache, rows: Rows, counts_B: Tensor, copies: StateCopies | None = None) -> None:
    """Take the kept rows of a step into states that cannot be cut back; keys past a length need nothing of the kind.

    Args:
        cache: the target's.
        rows: of the step.
        counts_B: int64, 0 to T rows to take in, from the first on.
        copies: states to be kept besides.
    """
    if isinstance(cache, HybridCache) and cache.recurrent is not None:
        cache.recurrent.commit(rows.slots_B, counts_B, rows.num_rows, copies)


def keeps_states(cache: TargetCache) -> bool:
    """Whether `commit_rows` has anything to do."""
    return isinstance(cache, HybridCache) and cache.recurrent is not None


def begin_text(cache: TargetCache, slot: int) -> None:
    """Give a slot to a new text, from its first token on."""
    if isinstance(cache, HybridCache) and cache.recurrent is not None:
        cache.recurrent.begin(slot)


def make_target_cache(
    target: LoadedTarget, tables: BlockTables, *, max_rows: int, state_dtype: torch.dtype = torch.float32
) -> TargetCache:
    """Room for what a target keeps: keys and values, or latent rows and recurrent states.

    Args:
        target: whose.
        tables: which blocks a slot has.
        max_rows: of a step.
        state_dtype: of recurrent states.

    Raises:
        CapacityError: the memory is not there.
    """
    contract, weight = target.contract, target.model.norm.weight
    if contract.kimi is not None:
        return HybridCache(
            contract,
            tables,
            max_rows=max_rows,
            dtype=weight.dtype,
            device=weight.device,
            state_dtype=state_dtype,
        )
    return KeyValueCache(
        tables,
        num_layers=contract.num_layers,
        num_kv_heads=contract.num_kv_heads,
        head_size=contract.head_size,
        dtype=weight.dtype,
        device=weight.device,
    )
