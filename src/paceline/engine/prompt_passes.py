"""Prompts before a decode step: which of them run, and in which passes.

One request after the other, chunk by chunk, as many tokens as `ChunkPace` allows. Where attention goes by tables and
the target is dense, waiting prompts that are short enough share a pass with the end of the one at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.engine.batching import can_join, next_chunk
from paceline.engine.chunk_pace import ChunkPace, ChunkTimes
from paceline.engine.counters import Counters
from paceline.engine.drafting import Drafting
from paceline.engine.hybrid_cache import HybridCache
from paceline.engine.in_flight import Ahead, InFlight
from paceline.engine.parts import EngineParts
from paceline.engine.pass_timer import PassTimer
from paceline.engine.prefill import DraftFirst, prefill_chunk, prompt_rows
from paceline.engine.prompt_graphs import PromptRunner
from paceline.engine.running import RunningRequest
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.scheduler import Scheduler
from paceline.engine.settings import EngineSettings
from paceline.engine.slot_states import SlotStates
from paceline.engine.step import StepOutput


class PromptPasses:
    """Launches the passes of prompts.

    Args:
        parts: what is run.
        settings: sizes and choices.
        scheduler: who runs, who waits.
        drafting: plans first blocks.
        states: of hybrid targets.
        counters: totals.
        pace: how much runs between two decode steps.
        in_flight: numbers passes and keeps those whose results are wanted.
        admit: gives the next waiting request a slot, if there is one and it fits.
        count_pass: brings the device up to date before a pass.
        read_behind: reads results that have come behind one.
        draft: drafts first blocks.
        runner: runs several prompts in a pass.

    Attributes:
        times: of passes that are under way.
    """

    def __init__(
        self,
        parts: EngineParts,
        settings: EngineSettings,
        scheduler: Scheduler,
        drafting: Drafting,
        states: SlotStates,
        counters: Counters,
        pace: ChunkPace,
        in_flight: InFlight,
        *,
        admit: Callable[[], RunningRequest | None],
        count_pass: Callable[[Sequence[RunningRequest], Sequence[Ahead], Sequence[int]], None],
        read_behind: Callable[[], None],
        draft: DraftFirst,
        runner: PromptRunner,
    ) -> None:
        self._draft, self._runner = draft, runner
        self._parts, self._settings, self._scheduler, self._drafting = parts, settings, scheduler, drafting
        self._states, self._counters, self._pace, self._in_flight = states, counters, pace, in_flight
        self._admit, self._count_pass, self._read_behind = admit, count_pass, read_behind
        self.times = ChunkTimes(pace)
        # Rows behind a prompt's end are harmless as keys; a recurrent state would take them in.
        self._runs_together = parts.choice.is_paged and not isinstance(parts.cache, HybridCache)

    def run(self, *, may_admit: bool) -> None:
        """Run as much as may run before the next decode step.

        Args:
            may_admit: waiting requests may get slots.
        """
        num_run = 0
        while True:
            is_alone = not any(request.is_decoding for request in self._scheduler.running)
            num_left = self._pace.budget(is_alone=is_alone) - num_run
            if num_left <= 0:
                return
            request = self._scheduler.next_to_prefill() or (self._admit() if may_admit else None)
            if request is None:
                return
            start = request.num_prefilled
            end = self._states.chunk_end(request, self._pace.chunk_end(start, request.prefill_goal, num_left))
            if end - start > num_left and num_run > 0:
                return
            num_run += end - start
            others = self._others_beside(request, end, num_left) if may_admit else []
            if others or (self._runner.is_recording and self._can_join(request, end)):
                num_run += sum(other.prefill_goal - other.num_prefilled for other in others)
                self._run_together([request, *others])
            else:
                self._run_chunk(request, end)

    def _others_beside(self, request: RunningRequest, end: int, num_left: int) -> list[RunningRequest]:
        """Waiting requests whose whole prompts run in one pass with the end of a request's prompt."""
        if not self._can_join(request, end):
            return []
        waiting, block_size = self._scheduler.waiting, self._parts.sizes.block_size
        others: list[RunningRequest] = []
        beginnings = {request.prompt_ids[:block_size]}
        longest = size = end - request.num_prefilled
        while waiting and can_join(waiting[0]):
            first = waiting[0]
            wanted, beginning = len(first.prompt_ids), first.prompt_ids[:block_size]
            longest, size = max(longest, wanted), size + wanted
            is_mostly_padding = longest * (len(others) + 2) > 2 * size
            # A prompt that begins like another may find in the prefix cache what that one leaves there.
            if size > num_left or is_mostly_padding or beginning in beginnings:
                break
            if not self._runner.has_room(len(others) + 2, longest):
                break  # several passes from recordings take less time than a large one that is launched bit by bit
            admitted = self._admit()
            if admitted is not first or _wants_context(admitted) != _wants_context(request):
                break  # whoever got a slot comes next, alone
            others.append(admitted)
            beginnings.add(beginning)
        return others

    def _can_join(self, request: RunningRequest, end: int) -> bool:
        return self._runs_together and end == request.prefill_goal and can_join(request)

    def _run_chunk(self, request: RunningRequest, end: int) -> None:
        started_s, timer = time.perf_counter(), PassTimer(self._parts.state.device)
        self._counters.num_unrecorded_prompts += self._runner.is_recording
        parts = self._parts
        chunk = next_chunk(
            request,
            parts.state,
            self._settings,
            end=end,
            plan=lambda: self._drafting.plan_first([request], self._scheduler.running),
            stopper=self._drafting.stopper_of([request]),
        )
        self._count_pass([request], [Ahead(0, 0, 0)], [end - request.num_prefilled])
        proposer = parts.proposer if _wants_context(request) else None
        output = prefill_chunk(parts.target.model, proposer, parts.cache, parts.state, parts.choice, chunk, self._draft)
        self._states.keep_after_chunk(request, end)
        request.num_prefilled = end
        num_drawn = (chunk.plan.most if chunk.plan is not None else 0,)
        self._launched([request], output, num_drawn, len(chunk.token_ids), timer, started_s)

    def _run_together(self, requests: Sequence[RunningRequest]) -> None:
        started_s, timer = time.perf_counter(), PassTimer(self._parts.state.device)
        parts = self._parts
        plan = self._drafting.plan_first(requests, self._scheduler.running)
        chunks = [
            next_chunk(request, parts.state, self._settings, end=request.prefill_goal, plan=lambda: plan, stopper=None)
            for request in requests
        ]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        self._count_pass(requests, [Ahead(0, 0, 0)] * len(requests), lengths)  # what pads them is nobody's
        flags = SamplingFlags.of([request.sampling for request in requests])
        writes_context = parts.proposer is not None and _wants_context(requests[0])
        output = self._runner.run(chunks, flags, writes_context=writes_context)
        if writes_context and plan.most > 0:
            waiting_B = self._draft(
                prompt_rows(chunks, parts.state.device), plan, self._drafting.stopper_of(requests), flags
            )
            output.num_waiting_B[: len(chunks)].copy_(waiting_B)
        for request in requests:
            request.num_prefilled = request.prefill_goal
        self._launched(requests, output, plan.num_drafts, sum(lengths), timer, started_s)

    def _launched(
        self,
        requests: Sequence[RunningRequest],
        output: StepOutput | None,
        num_drawn: Sequence[int],
        num_tokens: int,
        timer: PassTimer,
        started_s: float,
    ) -> None:
        self._counters.num_prefill_tokens += num_tokens
        if output is not None:
            self._in_flight.keep(
                requests, output, num_drawn=num_drawn, num_rows=1, is_decode=False, started_s=started_s
            )
        timer.stop()
        self.times.launched(self._in_flight.last, requests, num_tokens, timer)
        self._read_behind()


def _wants_context(request: RunningRequest) -> bool:
    return request.held.wants_context(request.num_prefilled)
