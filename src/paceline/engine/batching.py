"""From requests to what a pass runs: the next chunk of a prompt, and the batch of a decode step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.engine.draft_stopper import DraftPlan, DraftStopper
from paceline.engine.grammar_step import grammar_masks
from paceline.engine.prefill import PrefillChunk
from paceline.engine.proposal import Rows
from paceline.engine.running import RunningRequest
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.settings import EngineSettings
from paceline.engine.slots import SlotState
from paceline.engine.step import StepBatch
from paceline.engine.step_watch import StepWatch


class StepFlags:
    """The flags of a step's requests, looked over again only when these are others than in the step before."""

    def __init__(self) -> None:
        self._requests: list[RunningRequest] = []
        self._flags = SamplingFlags.of([])

    def of(self, requests: Sequence[RunningRequest]) -> SamplingFlags:
        """Summarise what the requests want; their parameters do not change while they run."""
        if self._requests != requests:
            self._requests = list(requests)
            self._flags = SamplingFlags.of([request.sampling for request in requests])
        return self._flags


def can_join(request: RunningRequest) -> bool:
    """Whether the end of a request's prompt may run in one pass with others': it is new, and needs no mask."""
    return not request.is_resumed and request.grammar is None


def next_chunk(
    request: RunningRequest,
    state: SlotState,
    settings: EngineSettings,
    *,
    end: int,
    plan: Callable[[], DraftPlan],
    stopper: DraftStopper | None,
) -> PrefillChunk:
    """Cut the next chunk off the text that a request is to have before it decodes.

    Args:
        request: in a slot, its text not done.
        state: of the slots.
        settings: of the engine.
        end: of the chunk, from `ChunkPace.chunk_end`.
        plan: plans the first block; asked only where one can be of use.
        stopper: as for `PrefillChunk`.
    """
    assert request.slot is not None, "only admitted requests are run"
    text = request.text_ids if request.is_resumed else request.prompt_ids
    start, is_last = request.num_prefilled, end == request.prefill_goal
    gives_first = is_last and not request.is_resumed
    has_block = is_last and (request.is_resumed or request.output.max_tokens > 1)
    return PrefillChunk(
        slot=request.slot,
        token_ids=text[start:end],
        start=start,
        next_id=None if gives_first else text[end],
        flags=request.flags,
        plan=plan() if has_block else None,
        stopper=stopper,
        verify_method=settings.verify_method,
        grammar_mask_BLW=grammar_masks([request], state, 1) if gives_first else None,
        resumed_step=len(request.trace.records) if is_last and request.is_resumed else None,
        context_start=request.held.context_start,
    )


def step_batch(
    requests: Sequence[RunningRequest],
    state: SlotState,
    settings: EngineSettings,
    plan: DraftPlan,
    *,
    flags: SamplingFlags,
    most_drafts: int,
    num_waiting: Sequence[int],
    rows_ahead: Sequence[int],
    stopper: DraftStopper | None,
    round_rows: Callable[[int], int] = int,
    least_rows: int = 1,
    watch: StepWatch | None = None,
) -> StepBatch:
    """Put together a decode step, its tensors on the host.

    Args:
        requests: all that are decoding.
        state: of the slots.
        settings: of the engine.
        plan: of the blocks that follow.
        flags: of the requests.
        most_drafts: that this step may verify per request; waiting drafts beyond are dropped. More requests may have
            come since those were planned.
        num_waiting: drafts that wait for each request, at most: of a pass that is not read yet, those it planned.
        rows_ahead: positions that each request may stand beyond what the host knows.
        stopper: as for `StepBatch`.
        round_rows: rows that a step runs which needs so many; the drafts that are then missing are -1.
        least_rows: rows that it has in any case.
        watch: looks at it; None for nobody.
    """
    slots = [request.slot for request in requests if request.slot is not None]
    bounds = [request.num_cached + ahead for request, ahead in zip(requests, rows_ahead, strict=True)]
    # Rows are as many as the longest waiting block needs; the blocks drafted next may be of another length.
    num_rows = round_rows(max(least_rows, 1 + min(most_drafts, max(num_waiting))))
    context_starts = [request.held.context_start for request in requests]
    lacks_context = any(context_starts)
    numbers = np.array([slots, bounds, context_starts], dtype=np.int64)  # faster than from lists to a tensor
    slots_B, bounds_B, context_starts_B = torch.from_numpy(numbers).unbind(0)
    return StepBatch(
        rows=Rows(
            slots,
            slots_B,
            bounds,
            bounds_B,
            num_rows,
            context_starts if lacks_context else None,
            context_starts_B if lacks_context else None,
        ),
        flags=flags,
        writes_context=any(request.is_drafted for request in requests),
        plan=plan,
        verify_method=settings.verify_method,
        stopper=stopper,
        grammar_mask_BTW=grammar_masks(requests, state, num_rows),
        watch=watch,
    )
