"""Measuring what steps cost with real ones, on the slot that no request ever gets and on blocks lent for it.

Where steps are recorded, the device's own clock counts, and it has something to do while the host puts a step together:
while serving, a step is launched before the one ahead of it is read. Else the host's share would count as often as
steps do, which flatters drafting, or would hide it where other processes keep the host busy.

Recorded trial steps have the shapes of real ones, so their recordings serve requests later: what was measured is what
runs, and the first requests wait for no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from paceline.engine.block_tables import TRASH_BLOCK, BlockTables
from paceline.engine.draft_stopper import DraftPlan
from paceline.engine.graphs import StepRunner, on_device
from paceline.engine.parts import EngineParts
from paceline.engine.pass_timer import PassTimer
from paceline.engine.proposal import Rows
from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.settings import EngineSettings
from paceline.engine.step import StepBatch, StepOutput
from paceline.engine.step_cost import Costs, StepCosts, WholeStepCosts, measure_step_costs, sizes_to_measure
from paceline.engine.step_kind import GREEDY_STEP, SAMPLED_STEP, StepKind
from paceline.engine.step_watch import looking_away
from paceline.ops.acceptance import VerifyMethod

_CONTEXT = 256
_VERIFY_BUDGET_S = 1.5
_DRAFT_BUDGET_S = 0.75
_PLAIN_BUDGET_S = 0.25
_RECORDED_BUDGET_S = 5.0
_SAMPLING = {GREEDY_STEP: SamplingParameters(), SAMPLED_STEP: SamplingParameters(temperature=1.0)}


@torch.inference_mode()
def measure_costs(
    parts: EngineParts,
    steps: StepRunner,
    settings: EngineSettings,
    kind: StepKind,
    *,
    blocks: Sequence[int],
) -> Costs:
    """Time steps of 1, 2, 4, ... requests with few, some and all drafts; takes seconds, most where they are recorded.

    The requests share the trash slot, where they overwrite each other's rows; what is computed means nothing, and the
    blocks hold zeros before and after. So it may be called between any two steps.

    Args:
        parts: what is run; something drafts.
        steps: runs them.
        settings: of the engine.
        kind: of the steps, one of `TRIED_KINDS`.
        blocks: lent by the caller: nobody else's, best `num_trial_blocks` of them in one run, as the context is as
            long as they allow. Where there are too few, block 0 stands for the others, which on a CPU is slower.
    """
    proposer, state, tables = parts.proposer, parts.state, parts.tables
    assert proposer is not None, "asked for only where something drafts"
    most, trash_slot = proposer.num_draft_tokens, state.trash_slot
    fewest = -(-_rows_behind(most) // tables.block_size) if blocks else num_trial_blocks(tables, most)
    blocks = [*blocks, *[TRASH_BLOCK] * (fewest - len(blocks))]
    capacity = len(blocks) * tables.block_size - _rows_behind(most)
    context = max(0, min(_CONTEXT, capacity, proposer.max_positions - most - 1))
    caches = [each for each in (parts.cache, proposer.cache) if each is not None]
    trial = _Trial(parts, steps, SamplingFlags.of([_SAMPLING[kind]]), settings.verify_method, context)

    def clear() -> None:
        for each in caches:
            each.clear_blocks(blocks)

    batch_sizes = sizes_to_measure(settings.max_num_seqs)
    clear()
    tables.assign(trash_slot, blocks)
    tables.flush()
    state.admit(trash_slot, _SAMPLING[kind], seed=0)  # rows of greedy requests cost less in sampled steps, too
    try:
        with looking_away(proposer):
            if steps.is_recording:
                row_counts = sorted({steps.rows_of(rows) for rows in range(1, most + 2)})
                measure = partial(measure_step_costs, budget_s=_RECORDED_BUDGET_S, num_warm_ups=2, is_padded=True)
                return WholeStepCosts(
                    steps=measure(trial.whole, batch_sizes, row_counts), plain=measure(trial.plain, batch_sizes, [1])
                )
            return StepCosts(
                verify=measure_step_costs(
                    trial.verify, batch_sizes, sizes_to_measure(1 + most), budget_s=_VERIFY_BUDGET_S
                ),
                draft=measure_step_costs(
                    trial.draft, batch_sizes, sorted({1, (1 + most) // 2, most}), budget_s=_DRAFT_BUDGET_S
                ),
                plain=measure_step_costs(trial.plain, batch_sizes, [1], budget_s=_PLAIN_BUDGET_S),
            )
    finally:
        state.empty_trash()
        state.flush()
        tables.clear(trash_slot)
        tables.flush()
        clear()


class _Trial:
    """The steps that are timed, all on one slot."""

    def __init__(
        self,
        parts: EngineParts,
        steps: StepRunner,
        flags: SamplingFlags,
        verify_method: VerifyMethod,
        context: int,
    ) -> None:
        self._parts, self._steps, self._flags, self._verify_method = parts, steps, flags, verify_method
        self._slot, self._context = parts.state.trash_slot, context
        self._settled: tuple[int, Rows] | None = None

    def verify(self, num_requests: int, num_rows: int) -> float | None:
        """A step that drafts nothing and keeps the context current."""
        return self._timed(num_requests, num_rows, 0)

    def plain(self, num_requests: int, num_rows: int) -> float | None:
        """A step that does without the drafter."""
        return self._timed(num_requests, num_rows, 0, writes_context=False)

    def whole(self, num_requests: int, num_rows: int) -> float | None:
        """A step that draws as many drafts as it judges."""
        return self._timed(num_requests, num_rows, num_rows - 1)

    def draft(self, num_requests: int, num_drafts: int) -> None:
        """The drafting behind a step, alone."""
        state, proposer = self._parts.state, self._parts.proposer
        assert proposer is not None, "something drafts"
        if self._settled is None or self._settled[0] != num_requests:
            batch = self._batch(num_requests, 1, 0)
            self._launch(batch).to_host()
            self._settled = num_requests, on_device(batch, state.device).rows
        all_greedy = self._flags.all_greedy
        proposer.propose(self._settled[1], state, all_greedy=all_greedy, num_drafts=num_drafts).ids_BK.tolist()

    def _timed(self, num_requests: int, num_rows: int, num_drafts: int, *, writes_context: bool = True) -> float | None:
        """Run a step; its milliseconds where a device's clock knows them."""
        device = self._parts.state.device
        make_batch = partial(self._batch, num_requests, num_rows, num_drafts, writes_context=writes_context)
        if device.type != "cuda":
            self._launch(make_batch()).to_host()
            return None
        self._launch(make_batch())
        batch = make_batch()
        timer = PassTimer(device)
        output = self._launch(batch)
        timer.stop()
        output.to_host()
        return timer.milliseconds()

    def _batch(self, num_requests: int, num_rows: int, num_drafts: int, *, writes_context: bool = True) -> StepBatch:
        """Put a step together as `batching.step_batch` does, with its slot back at the end of its context."""
        state = self._parts.state
        slots, starts = [self._slot] * num_requests, [self._context] * num_requests
        state.restore(self._slot, length=self._context, anchor=0, step=0)
        state.flush()
        rows = Rows(slots, torch.tensor(slots), starts, torch.tensor(starts), num_rows)
        everybody = (True,) * num_requests
        plan = DraftPlan((num_drafts,) * num_requests, is_adaptive=everybody, teaches=everybody)
        return StepBatch(rows, self._flags, writes_context=writes_context, plan=plan, verify_method=self._verify_method)

    def _launch(self, batch: StepBatch) -> StepOutput:
        return self._steps.run(batch)


def num_trial_blocks(tables: BlockTables, num_draft_tokens: int) -> int:
    """Blocks that trial steps of the usual context need."""
    wanted = -(-(_CONTEXT + _rows_behind(num_draft_tokens)) // tables.block_size)
    return min(tables.max_blocks, wanted)


def _rows_behind(num_draft_tokens: int) -> int:
    """The rows of a step, and those that a drafter may write behind them."""
    return 2 * num_draft_tokens + 1
