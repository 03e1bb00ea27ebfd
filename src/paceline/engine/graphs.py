"""Decode steps from recordings: one CUDA graph holds a whole step, and the host only fills in who takes part.

A recorded step reads what changes from one step to the next from tensors whose addresses stay: the state of the slots,
the tables, and `StepInputs`, which the host fills before each playback. So a recording serves every step of its shape:
how many requests (a bucket, filled up with rows of the trash slot), how many rows each, how many drafts are drawn, and
what the host knows of sampling settings (`StepKey`).

The first step of a shape runs without a recording, and its results count; the second one is captured and played back
(`recordings.py`). What cannot be captured (a grammar's masks, a proposer that asks the host) runs as it is, and is
counted.

B requests of a bucket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.engine.counters import Counters
from paceline.engine.draft_stopper import DevicePlan, DraftPlan, DraftStopper
from paceline.engine.hybrid_cache import HybridCache
from paceline.engine.paged_attends import can_attend_paged
from paceline.engine.parts import EngineParts
from paceline.engine.proposal import Rows
from paceline.engine.recordings import Record, Recorded
from paceline.engine.recurrent_state import StateCopies
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.step import StepBatch, StepOutput, decode_step, draft_next
from paceline.engine.step_inputs import StepInputs
from paceline.engine.transfers import to_device
from paceline.ops.acceptance import VerifyMethod

_ROW_BUCKETS = (1, 2, 4, 8, 16)
_MOST_RECORDINGS = 128  # of different shapes; the one that was not used for longest goes first


def buckets_up_to(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the largest itself."""
    powers = [2**exponent for exponent in range(largest.bit_length()) if 2**exponent < largest]
    return (*powers, largest)


class StepKey(NamedTuple):
    """What is written into a recording.

    Attributes:
        num_requests: B, padding included.
        num_rows: T, rows of each; 0 for the drafting of first blocks.
        num_drafts: drawn for the next step; None where nobody asks for any.
        flags: the requests' sampling settings, summarised.
        writes_context: whether the drafter's context is kept current.
        lacks_context: whether a request's context begins later than its text.
        plan_parts: which parts of a plan differ from request to request: drafts, thresholds, to whom these apply, who
            teaches.
        verify_method: how the waiting drafts are judged.
        rules: where the rules on tokens lie that the step reads: these arrays grow with what requests ask for.
        has_stopper: whether somebody holds drafts back and learns from them.
    """

    num_requests: int
    num_rows: int
    num_drafts: int | None
    flags: SamplingFlags
    writes_context: bool
    lacks_context: bool
    plan_parts: tuple[bool, bool, bool, bool]
    verify_method: VerifyMethod
    rules: tuple[tuple[int, tuple[int, ...]], ...] = ()
    has_stopper: bool = False


class StepRunner:
    """Runs decode steps: from recordings where there is a recorder, else as they are.

    Args:
        parts: what is run.
        counters: count what is played back and what is not.
        max_num_seqs: the largest batch.
        record: makes a recording; None runs every step as it is.
    """

    def __init__(
        self, parts: EngineParts, counters: Counters, *, max_num_seqs: int, record: Record | None = None
    ) -> None:
        self._parts, self._counters, self._record = parts, counters, record
        self._buckets = buckets_up_to(max_num_seqs)
        self._inputs: dict[int, StepInputs] = {}
        self._works: OrderedDict[StepKey, _Work] = OrderedDict()

    @property
    def is_recording(self) -> bool:
        """Whether steps are padded to buckets and recorded."""
        return self._record is not None

    def rows_of(self, num_rows: int) -> int:
        """How many rows a step runs that needs so many: a bucket where steps are recorded."""
        most = self._parts.num_draft_tokens + 1
        if self._record is None or num_rows >= most:
            return num_rows
        return min(most, next(bucket for bucket in (*_ROW_BUCKETS, most) if bucket >= num_rows))

    def least_rows(self, plan: DraftPlan) -> int:
        """Rows that a step has at least for what is planned behind it.

        Where somebody's drafts follow what pays, a recorded step judges as many as it draws: lengths change at any
        time, and a recording for each pair of them costs more than the few steps between two lengths, which are done
        as the larger of both.
        """
        proposer = self._parts.proposer
        is_square = self._record is not None and proposer is not None and proposer.is_parallel and any(plan.is_adaptive)
        return plan.most + 1 if is_square else 1

    def run(self, batch: StepBatch) -> StepOutput:
        """Run a step.

        Args:
            batch: as the host put it together, its tensors on the host.
        """
        output = self._run(batch)
        if batch.stopper is not None:
            batch.stopper.advance()
        return output

    def _run(self, batch: StepBatch) -> StepOutput:
        if self._record is None or not self._can_record(batch):
            self._counters.num_unrecorded_steps += self._record is not None
            return self.run_unrecorded(batch)
        work = self._work_for(self._rounded(batch, num_rows=batch.rows.num_rows), num_rows=batch.rows.num_rows)
        output: StepOutput = work.recorded.do(self._record, self._counters)
        self._counters.num_replayed_steps += work.recorded.is_recorded
        self._counters.num_unrecorded_steps += not work.recorded.is_recorded
        return replace(output, num_requests=len(batch.rows.slots))

    def draft(self, rows: Rows, plan: DraftPlan, stopper: DraftStopper | None, flags: SamplingFlags) -> Tensor:
        """Draft first blocks, behind prompts whose context is written.

        Args:
            rows: of the prompts, on the device.
            plan: how many drafts.
            stopper: as for a decode step.
            flags: of the requests.

        Returns:
            Drafts that wait for each request's first step, int64 [B].
        """
        parts, proposer = self._parts, self._parts.proposer
        assert proposer is not None, "something drafts"
        batch = StepBatch(rows, flags, writes_context=True, plan=plan, stopper=stopper)
        # What goes token by token starts from a state that the prompt's pass has left, each time elsewhere.
        if self._record is None or not proposer.is_parallel or not self._can_record(batch):
            return draft_next(proposer, parts.state, rows, plan.on(parts.state.device), stopper, flags)
        # Drawn whole where lengths follow what pays, or each of them would be recorded while requests wait.
        work = self._work_for(self._rounded(batch, num_rows=parts.num_draft_tokens + 1), num_rows=0)
        waiting_B: Tensor = work.recorded.do(self._record, self._counters)
        return waiting_B[: len(rows.slots)].clone()

    def _work_for(self, batch: StepBatch, *, num_rows: int) -> _Work:
        """What is done for a batch of this shape, its numbers filled in; without rows, drafting alone."""
        key = self._key(batch, num_rows)
        work = self._works.get(key)
        if work is None:
            work = self._new_work(key, batch)
        self._works.move_to_end(key)
        self._parts.require_fixed()
        work.inputs.fill(batch)
        return work

    def drop(self) -> None:
        """Forget all recordings, before what they read goes away."""
        self._works.clear()
        self._inputs.clear()

    def run_unrecorded(self, batch: StepBatch) -> StepOutput:
        """Run a step as it is; nothing is recorded for later ones."""
        parts = self._parts
        batch = on_device(batch, parts.state.device)
        return decode_step(parts.target.model, parts.proposer, parts.cache, parts.state, parts.choice, batch)

    def _can_record(self, batch: StepBatch) -> bool:
        proposer, cache = self._parts.proposer, self._parts.cache
        if batch.grammar_mask_BTW is not None or not (proposer is None or proposer.is_capturable):
            return False
        if isinstance(cache, HybridCache):
            reads_no_host = self._parts.choice.is_batched
        else:
            reads_no_host = self._parts.choice.is_paged and can_attend_paged(cache)
        drafter_cache = proposer.cache if proposer is not None else None
        return reads_no_host and (drafter_cache is None or can_attend_paged(drafter_cache))

    def _rounded(self, batch: StepBatch, *, num_rows: int) -> StepBatch:
        """Draw as many drafts as a bucket has, or as so many rows judge; those beyond the plan are left out."""
        plan, proposer = batch.plan, self._parts.proposer
        if not isinstance(plan, DraftPlan) or proposer is None or not proposer.is_parallel:
            return batch
        num_judged = num_rows - 1 if any(plan.is_adaptive) else 0
        if max(plan.most, num_judged) <= 0:
            return batch
        return replace(batch, plan=replace(plan, num_drawn=max(self.rows_of(plan.most + 1) - 1, num_judged)))

    def _key(self, batch: StepBatch, num_rows: int) -> StepKey:
        rows, plan = batch.rows, batch.plan
        count = len(rows.slots)
        parts = (False, False, False, False)
        if isinstance(plan, DraftPlan):
            has_thresholds = plan.thresholds is not None
            parts = (
                plan.most > 0 and (min(plan.num_drafts) < plan.most or any(plan.is_adaptive)),
                has_thresholds,
                has_thresholds and not all(plan.is_adaptive),
                batch.stopper is not None and not all(plan.teaches),
            )
        return StepKey(
            next(bucket for bucket in self._buckets if bucket >= count),
            num_rows,
            None if plan is None else plan.most,
            batch.flags,
            batch.writes_context,
            rows.context_starts is not None,
            parts,
            batch.verify_method,
            self._parts.state.tokens.places() if batch.flags.any_rules else (),
            batch.stopper is not None,
        )

    def _new_work(self, key: StepKey, batch: StepBatch) -> _Work:
        if len(self._works) >= _MOST_RECORDINGS:
            self._works.popitem(last=False)
        parts, bucket = self._parts, key.num_requests
        if bucket not in self._inputs:
            trash_slot, device = parts.state.trash_slot, parts.state.device
            self._inputs[bucket] = StepInputs(bucket, parts.num_draft_tokens, trash_slot, device)
        copies = batch.state_copies
        if copies is None and parts.snapshots is not None:
            none_B = torch.empty(0, dtype=torch.int64)
            copies = StateCopies(parts.snapshots, none_B, parts.sizes.block_size)
        work = _Work(parts, key, self._inputs[bucket], batch.stopper, copies)
        self._works[key] = work
        return work


class _Work:
    """A step of one shape, or its drafting alone, on the numbers of its bucket, whatever they are at the time."""

    def __init__(
        self,
        parts: EngineParts,
        key: StepKey,
        inputs: StepInputs,
        stopper: DraftStopper | None,
        copies: StateCopies | None,
    ) -> None:
        self.inputs, self._parts, self._key, self._stopper, self._copies = inputs, parts, key, stopper, copies
        self.recorded = Recorded(self._run, f"a step of {key.num_requests} x {key.num_rows} rows")

    def _run(self) -> StepOutput | Tensor:
        """Run it now, or into the graph that is being captured."""
        key, inputs, parts = self._key, self.inputs, self._parts
        slots: Sequence[int] = [parts.state.trash_slot] * key.num_requests
        nowhere = [0] * key.num_requests
        has_drafts, has_thresholds, has_adaptive, has_teaches = key.plan_parts
        rows = Rows(
            slots,
            inputs.slots_B,
            nowhere,
            inputs.starts_B,
            key.num_rows,
            nowhere if key.lacks_context else None,
            inputs.context_starts_B if key.lacks_context else None,
        )
        plan: DevicePlan | None = None
        if key.num_drafts is not None:
            plan = DevicePlan(
                key.num_drafts,
                inputs.num_drafts_B if has_drafts else None,
                inputs.thresholds_K if has_thresholds else None,
                inputs.is_adaptive_B.bool() if has_adaptive else None,
                inputs.teaches_B.bool() if has_teaches else None,
            )
        if key.num_rows == 0:
            assert parts.proposer is not None and plan is not None, "only what drafts is asked to"
            return draft_next(parts.proposer, parts.state, rows, plan, self._stopper, key.flags)
        copies = None if self._copies is None else self._copies._replace(rows_B=inputs.copy_rows_B)
        batch = StepBatch(
            rows=rows,
            flags=key.flags,
            writes_context=key.writes_context,
            plan=plan,
            verify_method=key.verify_method,
            stopper=self._stopper,
            state_copies=copies,
        )
        return decode_step(parts.target.model, parts.proposer, parts.cache, parts.state, parts.choice, batch)


def on_device(batch: StepBatch, device: torch.device) -> StepBatch:
    """Move what a step reads to its device.

    Args:
        batch: as the host put it together.
        device: of the models.
    """
    if device.type == "cpu":
        return batch
    rows, copies = batch.rows, batch.state_copies
    parts = [rows.slots_B, rows.starts_B]
    if rows.context_starts_B is not None:
        parts.append(rows.context_starts_B)
    moved = to_device(torch.stack(parts), device).unbind(0)
    context_starts_B = moved[2] if len(moved) > 2 else None
    rows = replace(rows, slots_B=moved[0], starts_B=moved[1], context_starts_B=context_starts_B)
    if copies is not None:
        copies = copies._replace(rows_B=to_device(copies.rows_B, device))
    return replace(batch, rows=rows, state_copies=copies)
