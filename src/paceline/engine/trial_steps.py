"""Measuring what steps cost with real ones, on the slot that no request ever gets and on blocks lent for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import TRASH_BLOCK, BlockTables
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.slots import SlotState
from paceline.engine.step import StepBatch, decode_step
from paceline.engine.step_cost import StepCosts, measure_step_costs, sizes_to_measure
from paceline.engine.target_cache import TargetCache
from paceline.models.targets.target import Target

_CONTEXT = 256
_VERIFY_BUDGET_S = 1.0
_DRAFT_BUDGET_S = 0.5


@torch.inference_mode()
def measure_costs(
    target: Target,
    proposer: Proposer,
    cache: TargetCache,
    state: SlotState,
    choice: AttentionChoice,
    *,
    max_num_seqs: int,
    blocks: Sequence[int],
) -> StepCosts:
    """Time steps of 1, 2, 4, ... requests with few, some and all drafts; takes a second or two.

    The requests share the trash slot, where they overwrite each other's rows; what is computed means nothing, and the
    blocks hold zeros before and after. So it may be called between any two steps.

    Args:
        target: the model that decides.
        proposer: what drafts.
        cache: the target's.
        state: of all slots.
        choice: form of attention.
        max_num_seqs: the largest batch; the trash slot has this index.
        blocks: lent by the caller: nobody else's, best `num_trial_blocks` of them in one run, as the context is as
            long as they allow. Where there are too few, block 0 stands for the others, which on a CPU is slower.
    """
    most = proposer.num_draft_tokens
    tables = cache.tables
    fewest = -(-_rows_behind(most) // tables.block_size) if blocks else num_trial_blocks(tables, most)
    blocks = [*blocks, *[TRASH_BLOCK] * (fewest - len(blocks))]
    capacity = len(blocks) * tables.block_size - _rows_behind(most)
    context = max(0, min(_CONTEXT, capacity, proposer.max_positions - most - 1))
    caches = [each for each in (cache, proposer.cache) if each is not None]

    def clear() -> None:
        for each in caches:
            each.clear_blocks(blocks)

    def rows_of(num_requests: int, num_rows: int) -> Rows:
        slots, starts = [max_num_seqs] * num_requests, [context] * num_requests
        state.restore(max_num_seqs, length=context, anchor=0, step=0)
        device = state.device
        return Rows(slots, torch.tensor(slots, device=device), starts, torch.tensor(starts, device=device), num_rows)

    def verify(num_requests: int, num_rows: int) -> Rows:
        rows = rows_of(num_requests, num_rows)
        batch = StepBatch(rows, SamplingFlags.of([]), writes_context=True)
        decode_step(target, proposer, cache, state, choice, batch).to_host()
        return rows

    def run_verify(num_requests: int, num_rows: int) -> None:
        verify(num_requests, num_rows)

    settled: dict[int, Rows] = {}

    def run_draft(num_requests: int, num_drafts: int) -> None:
        if num_requests not in settled:
            settled.clear()
            settled[num_requests] = verify(num_requests, 1)
        proposer.propose(settled[num_requests], state, all_greedy=True, num_drafts=num_drafts).ids_BK.tolist()

    batch_sizes = sizes_to_measure(max_num_seqs)
    clear()
    tables.assign(max_num_seqs, blocks)
    tables.flush()
    try:
        return StepCosts(
            verify=measure_step_costs(
                run_verify, batch_sizes, sorted({1, 1 + (most + 1) // 2, 1 + most}), budget_s=_VERIFY_BUDGET_S
            ),
            draft=measure_step_costs(run_draft, batch_sizes, sorted({1, most}), budget_s=_DRAFT_BUDGET_S),
        )
    finally:
        state.restore(max_num_seqs, length=0, anchor=0, step=0)
        tables.clear(max_num_seqs)
        tables.flush()
        clear()


def num_trial_blocks(tables: BlockTables, num_draft_tokens: int) -> int:
    """Blocks that trial steps of the usual context need."""
    wanted = -(-(_CONTEXT + _rows_behind(num_draft_tokens)) // tables.block_size)
    return min(tables.max_blocks, wanted)


def _rows_behind(num_draft_tokens: int) -> int:
    """The rows of a step, and those that a drafter may write behind them."""
    return 2 * num_draft_tokens + 1
