"""Measuring what steps cost with real ones, on the slot that no request ever gets and on blocks lent for it.

Where steps are recorded, the device's own clock counts, and it has something to do while the host puts a step together:
while serving, a step is launched before the one ahead of it is read. Else the host's share would count as often as
steps do, which flatters drafting, or would hide it where other processes keep the host busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from paceline.engine.block_tables import TRASH_BLOCK, BlockTables
from paceline.engine.draft_stopper import DraftPlan, DraftStopper
from paceline.engine.graphs import StepRunner, on_device
from paceline.engine.parts import EngineParts
from paceline.engine.pass_timer import PassTimer
from paceline.engine.proposal import Rows
from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.step import StepBatch, StepOutput
from paceline.engine.step_cost import StepCosts, StepCostTable, measure_step_costs, sizes_to_measure

_CONTEXT = 256
_VERIFY_BUDGET_S = 1.0
_DRAFT_BUDGET_S = 0.5
_RECORDED_BUDGET_S = 5.0
_GREEDY = SamplingFlags.of([])
_SAMPLED = SamplingFlags.of([SamplingParameters(temperature=1.0)])
# Kernels are compiled apart for 1, for multiples of 16, and for other numbers; with many rows others are launched.
_COMPILED_BATCHES = (1, 2, 8, 16)


@torch.inference_mode()
def measure_costs(parts: EngineParts, steps: StepRunner, *, max_num_seqs: int, blocks: Sequence[int]) -> StepCosts:
    """Time steps of 1, 2, 4, ... requests with few, some and all drafts; takes seconds, most where they are recorded.

    The requests share the trash slot, where they overwrite each other's rows; what is computed means nothing, and the
    blocks hold zeros before and after. So it may be called between any two steps.

    Args:
        parts: what is run; something drafts.
        steps: runs them.
        max_num_seqs: the largest batch; the trash slot has this index.
        blocks: lent by the caller: nobody else's, best `num_trial_blocks` of them in one run, as the context is as
            long as they allow. Where there are too few, block 0 stands for the others, which on a CPU is slower.
    """
    proposer, state, tables = parts.proposer, parts.state, parts.tables
    assert proposer is not None, "asked for only where something drafts"
    most = proposer.num_draft_tokens
    fewest = -(-_rows_behind(most) // tables.block_size) if blocks else num_trial_blocks(tables, most)
    blocks = [*blocks, *[TRASH_BLOCK] * (fewest - len(blocks))]
    capacity = len(blocks) * tables.block_size - _rows_behind(most)
    context = max(0, min(_CONTEXT, capacity, proposer.max_positions - most - 1))
    caches = [each for each in (parts.cache, proposer.cache) if each is not None]
    trial = _Trial(parts, steps, slot=max_num_seqs, context=context)

    def clear() -> None:
        for each in caches:
            each.clear_blocks(blocks)

    batch_sizes = sizes_to_measure(max_num_seqs)
    clear()
    tables.assign(max_num_seqs, blocks)
    tables.flush()
    try:
        if steps.is_recording:
            return trial.measure_recorded(batch_sizes, most)
        return StepCosts(
            verify=measure_step_costs(
                trial.verify, batch_sizes, sorted({1, 1 + (most + 1) // 2, 1 + most}), budget_s=_VERIFY_BUDGET_S
            ),
            draft=measure_step_costs(trial.draft, batch_sizes, sorted({1, most}), budget_s=_DRAFT_BUDGET_S),
        )
    finally:
        state.restore(max_num_seqs, length=0, anchor=0, step=0)
        state.flush()
        tables.clear(max_num_seqs)
        tables.flush()
        clear()


class _Trial:
    """The steps that are timed, all on one slot."""

    def __init__(self, parts: EngineParts, steps: StepRunner, *, slot: int, context: int) -> None:
        self._parts, self._steps, self._slot, self._context = parts, steps, slot, context
        self._settled: tuple[int, Rows] | None = None

    def verify(self, num_requests: int, num_rows: int) -> float | None:
        """A step that drafts nothing."""
        return self._timed(num_requests, num_rows, 0)

    def draft(self, num_requests: int, num_drafts: int) -> None:
        """The drafting behind a step, alone."""
        state, proposer = self._parts.state, self._parts.proposer
        assert proposer is not None, "something drafts"
        if self._settled is None or self._settled[0] != num_requests:
            batch = self._batch(num_requests, 1, 0)
            self._launch(batch).to_host()
            self._settled = num_requests, on_device(batch, state.device).rows
        proposer.propose(self._settled[1], state, all_greedy=True, num_drafts=num_drafts).ids_BK.tolist()

    def measure_recorded(self, batch_sizes: Sequence[int], most: int) -> StepCosts:
        """Time what is played back: a step is one piece there, so drafting costs what it adds to a step of one row."""

        def step_and_draft(num_requests: int, num_drafts: int) -> float | None:
            return self._timed(num_requests, 1, num_drafts)

        row_counts = sorted({self._steps.rows_of(rows) for rows in range(1, most + 2)})
        self._compile_sampled([size for size in _COMPILED_BATCHES if size <= batch_sizes[-1]], row_counts, most)
        measure = partial(measure_step_costs, budget_s=_RECORDED_BUDGET_S, num_warm_ups=2, is_padded=True)
        verify = measure(self.verify, batch_sizes, row_counts)
        drafted = measure(step_and_draft, batch_sizes, [rows - 1 for rows in row_counts[1:]])
        added = {
            (num_requests, num_drafts): max(0.0, ms - verify.cost_ms(num_requests, 1))
            for (num_requests, num_drafts), ms in drafted.measured.items()
        }
        return StepCosts(verify=verify, draft=StepCostTable(added, is_padded=True))

    def _compile_sampled(self, batch_sizes: Sequence[int], row_counts: Sequence[int], most: int) -> None:
        """Run sampled steps once, or the first that chooses another length would wait for a compiler.

        They leave no recordings: those of real steps have another stopper in them.
        """
        stopper = DraftStopper(self._slot, most, self._parts.state.device)
        for num_requests in batch_sizes:
            sizes = [(num_rows, most) for num_rows in row_counts] + [(1, rows - 1) for rows in row_counts[1:-1]]
            for num_rows, num_drafts in sizes:
                batch = self._batch(num_requests, num_rows, num_drafts)
                plan = DraftPlan((num_drafts,) * num_requests, thresholds=(0.0,) * most)
                batch = replace(batch, flags=_SAMPLED, plan=plan, stopper=stopper)
                self._steps.run_unrecorded(batch).to_host()

    def _timed(self, num_requests: int, num_rows: int, num_drafts: int) -> float | None:
        """Run a step; its milliseconds where a device's clock knows them."""
        device = self._parts.state.device
        if device.type != "cuda":
            self._launch(self._batch(num_requests, num_rows, num_drafts)).to_host()
            return None
        self._launch(self._batch(num_requests, num_rows, num_drafts))
        batch = self._batch(num_requests, num_rows, num_drafts)
        timer = PassTimer(device)
        output = self._launch(batch)
        timer.stop()
        output.to_host()
        return timer.milliseconds()

    def _batch(self, num_requests: int, num_rows: int, num_drafts: int) -> StepBatch:
        """Put a step together, with its slot back at the end of its context."""
        state = self._parts.state
        slots, starts = [self._slot] * num_requests, [self._context] * num_requests
        state.restore(self._slot, length=self._context, anchor=0, step=0)
        state.flush()
        rows = Rows(slots, torch.tensor(slots), starts, torch.tensor(starts), num_rows)
        plan = DraftPlan((num_drafts,) * num_requests) if num_drafts > 0 else None
        return StepBatch(rows, _GREEDY, writes_context=True, plan=plan)

    def _launch(self, batch: StepBatch) -> StepOutput:
        return self._steps.run(batch)


def num_trial_blocks(tables: BlockTables, num_draft_tokens: int) -> int:
    """Blocks that trial steps of the usual context need."""
    wanted = -(-(_CONTEXT + _rows_behind(num_draft_tokens)) // tables.block_size)
    return min(tables.max_blocks, wanted)


def _rows_behind(num_draft_tokens: int) -> int:
    """The rows of a step, and those that a drafter may write behind them."""
    return 2 * num_draft_tokens + 1
