"""What a target keeps between passes, whatever its family, and the two moments at which a pass meets it.

B requests, T rows per request.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice, write_then_attend
from paceline.engine.cache import KeyValueCache
from paceline.engine.hybrid_attends import attend_hybrid
from paceline.engine.hybrid_cache import HybridCache
from paceline.engine.proposal import Rows
from paceline.engine.recurrent_state import StateCopies
from paceline.models.layers import Attend
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
        )
    return write_then_attend(
        cache,
        choice,
        slots=rows.slots,
        slots_B=rows.slots_B,
        starts=rows.starts,
        starts_B=rows.starts_B,
        num_rows=rows.num_rows,
    )


def commit_rows(
    cache: TargetCache, rows: Rows, anchors_B: Tensor, verified: VerifiedBlock, copies: StateCopies | None
) -> None:
    """Take the kept rows of a step into states that cannot be cut back; keys past a length need nothing of the kind.

    The row that should have given the target's own token and gave none counts no more than a refused one: the host runs
    it again. It may do so late, so a step that was launched meanwhile, on an anchor of -1, must leave no trace.

    Args:
        cache: the target's.
        rows: of the step.
        anchors_B: int64, as they were before the step.
        verified: the verdict.
        copies: states to be kept besides.
    """
    if not isinstance(cache, HybridCache) or cache.recurrent is None:
        return
    counts_B = verified.accepted_B + (verified.fault_B == SOUND)
    counts_B = torch.where(anchors_B < 0, 0, counts_B)
    cache.recurrent.commit(rows.slots_B, counts_B, rows.num_rows, copies)
