"""The loop behind an engine: room for the requests that decode, prompt chunks, one decode step, results.

What the next blocks may hold is planned and grammars are asked for their masks before a pass; behind it, tokens are
handed to their requests and what became of the drafts to the planner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paceline.engine.batching import StepFlags, step_batch
from paceline.engine.blocks import BlockPool
from paceline.engine.chunk_pace import ChunkPace
from paceline.engine.counters import Counters
from paceline.engine.debug import checks_are_asked_for
from paceline.engine.drafting import Drafting
from paceline.engine.graphs import StepRunner
from paceline.engine.identity import prefix_identity
from paceline.engine.in_flight import Ahead, InFlight, Launched, milliseconds_since
from paceline.engine.intake import Intake
from paceline.engine.invariants import InvariantChecks
from paceline.engine.loop_checks import LoopChecks
from paceline.engine.parts import EngineParts
from paceline.engine.prompt_graphs import PromptRunner
from paceline.engine.prompt_passes import PromptPasses
from paceline.engine.recordings import make_recorder
from paceline.engine.request import FinishReason, RequestDelta
from paceline.engine.request_blocks import RequestBlocks
from paceline.engine.restoring import enter_slot, restore_slot
from paceline.engine.results import FinishedRequests
from paceline.engine.running import RunningRequest
from paceline.engine.scheduler import Scheduler
from paceline.engine.settings import EngineSettings
from paceline.engine.shared_recordings import recorded_everywhere
from paceline.engine.slot_states import SlotStates
from paceline.engine.step_cost import Costs
from paceline.engine.step_kind import StepKind
from paceline.engine.step_watch import watch_steps
from paceline.engine.trial_steps import measure_costs, num_trial_blocks
from paceline.ops.finalise_block import NOT_A_NUMBER


class EngineLoop:
    """Carries requests from the queue to their results, one call of `step` at a time.

    Args:
        parts: what is run.
        settings: sizes and choices.
        intake: starts grammars again after an interruption.
        all_did: as for `Engine`.

    Attributes:
        parts: as given.
        requests: those that have not ended, by id.
        results: of those that have.
        deltas: not returned yet; an interrupted step leaves some to the next.
        scheduler: who runs, who waits.
        blocks: which blocks they hold.
        drafting: who is drafted for.
        counters: totals.
        is_mid_step: a step was interrupted, so the device may be ahead of the host.
        run_step: launches one decode step, recorded or not.
    """

    def __init__(
        self,
        parts: EngineParts,
        settings: EngineSettings,
        intake: Intake,
        all_did: Callable[[bool], bool] | None = None,
    ) -> None:
        self.parts, self._settings, self._intake = parts, settings, intake
        self._state, self._sizes = parts.state, parts.sizes
        self._in_flight = in_flight = InFlight()
        self._runs_ahead = settings.runs_ahead_on(parts.state.device.type)
        self._watch = watch_steps(parts.proposer, parts.state.device) if settings.trace_details else None
        self._last_read_s = 0.0
        self._last_step = 0  # number of the last decode step that was read
        self._has_news = False  # results have come since room was made
        self._pool = BlockPool(parts.sizes.num_blocks, parts.sizes.block_size, prefix_cache=settings.prefix_cache)
        self._states = SlotStates(
            parts.recurrent, parts.snapshots, parts.snapshot_sizes, self._pool, fence=lambda: in_flight.last
        )
        self._checks: LoopChecks | None = None
        asked = settings.check_invariants
        if checks_are_asked_for() if asked is None else asked:
            checks = InvariantChecks(
                self._pool,
                parts.tables,
                caches=parts.planes.caches,
                lengths=parts.state.lengths,
                lookahead=parts.sizes.lookahead,
                runs_ahead=self._runs_ahead,
            )
            self._checks = LoopChecks(checks, self._states.checks(parts.state))
        self.blocks = RequestBlocks(
            self._pool,
            parts.tables,
            parts.planes,
            lookahead=parts.sizes.lookahead,
            identity=prefix_identity(parts.target, parts.drafter, method=parts.method),
            wants_runs=parts.state.device.type == "cpu",
            context_limit=parts.proposer.max_positions if parts.proposer is not None else 0,
            fence=lambda: in_flight.last,
            checks=self._checks,
            states=self._states.store,
        )
        self.scheduler = Scheduler(
            self.blocks, num_slots=settings.max_num_seqs, max_num_waiting=settings.max_num_waiting
        )
        self._pace = ChunkPace(
            prefill_chunk_size=settings.prefill_chunk_size,
            block_size=parts.sizes.block_size,
            max_itl_ms=settings.max_itl_ms,
        )
        self.requests: dict[str, RunningRequest] = {}
        self.results = FinishedRequests()
        self.deltas: list[RequestDelta] = []
        self.counters = Counters(parts.num_draft_tokens)
        record = make_recorder(parts.state.device, wanted=settings.wants_graphs)
        if record is not None and all_did is not None:
            record = recorded_everywhere(record, all_did)
        self._steps = StepRunner(parts, self.counters, max_num_seqs=settings.max_num_seqs, record=record)
        self._flags = StepFlags()
        calibration = parts.drafter.calibration if parts.drafter is not None else None
        self.drafting = Drafting(
            parts.proposer,
            settings,
            self.counters,
            measure=self._measure_costs,
            calibrated_first_position=calibration.first_position if calibration is not None else None,
            # Where the host runs ahead, or rows are padded, a step's rows are settled before its drafts are there.
            holds_back=not self._runs_ahead and record is None,
            device=parts.state.device,
        )
        self.run_step = self._steps.run
        self._prompt_runner = PromptRunner(
            parts,
            self.counters,
            max_num_seqs=settings.max_num_seqs,
            record=None if settings.record_prompts is False else record,
        )
        self._prompts = PromptPasses(
            parts,
            settings,
            self.scheduler,
            self.drafting,
            self._states,
            self.counters,
            self._pace,
            in_flight,
            admit=self._admit,
            count_pass=self._count_pass,
            read_behind=self._read_behind,
            draft=self._steps.draft,
            runner=self._prompt_runner,
        )
        self.is_mid_step = False
        if settings.draft_length == "adaptive" and parts.num_draft_tokens > 0:  # else the first request waits for it
            self.drafting.planner.prepare()

    @property
    def is_recording(self) -> bool:
        """Whether decode steps are recorded."""
        return self._steps.is_recording

    def _measure_costs(self, kind: StepKind) -> Costs:
        assert self.parts.proposer is not None, "asked for only where something drafts"
        count = num_trial_blocks(self.parts.tables, self.parts.proposer.num_draft_tokens)
        lent = self.blocks.lend(count)
        try:
            return measure_costs(self.parts, self._steps, self._settings, kind, blocks=lent)
        finally:
            self.blocks.give_back(lent)

    def step(self) -> list[RequestDelta]:
        """Make room, admit, run prompt chunks, run one decode step.

        Whatever interrupts it, Ctrl-C included, the engine stays usable: the next step starts from what the host knows,
        and returns what this one had come to.

        Returns:
            Deltas of requests that got tokens, text or an end.
        """
        with torch.inference_mode():
            self._recover()
            self.is_mid_step = True
            for request in self.scheduler.pop_expired():
                self._passed_on(request, request.expire())
            may_admit = self._make_room()
            self._prompts.run(may_admit=may_admit)
            self._decode()
            self._retire_idle()
            self.is_mid_step = False
        deltas, self.deltas = self.deltas, []
        return deltas

    def end(self, request_id: str, end: Callable[[RunningRequest], RequestDelta]) -> None:
        """End a request between steps, even where the last one was interrupted; unknown ids are ignored.

        Args:
            request_id: whose.
            end: closes its output and says why; nobody gets the delta.
        """
        request = self.requests.get(request_id)
        if request is None:
            return
        was_mid_step, self.is_mid_step = self.is_mid_step, True  # this may be interrupted, too
        if was_mid_step:
            self.scheduler.rebuild(list(self.requests.values()))
        reason = end(request).finish_reason
        assert reason is not None, "it ends"
        self._finish(request, reason)
        self._drop_deltas(request_id)
        self._retire_idle()
        self.is_mid_step = was_mid_step

    def forget(self, request_id: str) -> None:
        """A new request has the id of one that ended: nothing of that one is given out any more."""
        self.results.forget(request_id)
        self._drop_deltas(request_id)

    def _drop_deltas(self, request_id: str) -> None:
        self.deltas = [delta for delta in self.deltas if delta.request_id != request_id]

    def preempt(self, request_id: str) -> bool:
        """Let a request step back between steps; False if it does not run."""
        request = self.requests.get(request_id)
        if request is None or request.slot is None:
            return False
        with torch.inference_mode():
            self._recover()
            self._preempt(request)
        return True

    def close(self) -> None:
        """Give the memory of the caches back; no request is left."""
        self.deltas.clear()
        self._in_flight.drop()
        self._prompts.times.clear()
        self._steps.drop()  # graphs go before the memory that they read
        self._prompt_runner.drop()
        self.parts.release()

    def _recover(self) -> None:
        """After an interrupted step the device may be ahead of the host; what was not delivered is done again."""
        if not self.is_mid_step:
            return
        self._in_flight.drop()
        self._prompts.times.clear()
        self.scheduler.rebuild(list(self.requests.values()))
        self._drain()
        for request in list(self.requests.values()):
            if request.finish_reason is not None:  # interrupted on its way out
                self._finish(request, request.finish_reason)
        for request in list(self.scheduler.running):
            request.grammar = self._intake.start_grammar(request.sampling)
            if request.grammar is not None:
                request.grammar.advance(request.output.token_ids)
            if self._states.is_recurrent:  # its state may have moved on in part, and cannot be set back
                self.scheduler.preempt(request)
                continue
            if request.is_decoding and not request.is_resumed:  # its first token did not arrive
                request.num_prefilled = request.held.num_hit
            enter_slot(self._state, request)
            restore_slot(self._state, request)
        self._states.forget_steps()
        self.blocks.reclaim_states(self.requests.values())
        self.is_mid_step = False

    def _make_room(self) -> bool:
        """Give requests that decode the blocks they need next; False if somebody had to step back for that."""
        num_before, self._has_news = self.scheduler.num_preemptions, False
        for request in self.blocks.lacking(self.scheduler.running):
            while request.is_decoding and not self.blocks.grow(request):
                if self._pool.num_fenced > 0 or len(self._in_flight) > 0:
                    self._drain()
                else:
                    self._preempt(self.scheduler.victim())
        return self.scheduler.num_preemptions == num_before

    def _preempt(self, request: RunningRequest) -> None:
        self._drain()
        if request.slot is not None:
            self.scheduler.preempt(request)

    def _drain(self) -> None:
        """Read everything that is in flight; then the device has nothing left to do, and no block waits for it."""
        self._read_all()
        if self._state.device.type == "cuda" and self._pool.num_fenced > 0:
            torch.cuda.synchronize(self._state.device)
        self._pool.retire(self._in_flight.last)

    def _retire_idle(self) -> None:
        """Let no block wait for a pass whose results nobody will read, such as a chunk of a prompt that was aborted."""
        is_done = not self.requests or (len(self._in_flight) == 0 and self._state.device.type == "cpu")
        if is_done and (self._pool.num_fenced > 0 or len(self._in_flight) > 0):
            self._drain()

    def _admit(self) -> RunningRequest | None:
        """The next request that gets a slot; those that fail there end, and let the ones behind them pass."""
        scheduler = self.scheduler
        while scheduler.waiting and scheduler.num_free_slots > 0:
            first = scheduler.waiting[0]
            if first.admission == 0:
                try:
                    self.drafting.settle(first, scheduler.running, num_waiting=len(scheduler.waiting))
                except Exception as error:  # such as no memory to measure what a step costs
                    self._passed_on(first, first.fail(error, doing="it could not be prepared for drafting"))
                    continue
            request = scheduler.admit()
            if request is None:
                if self._pool.num_fenced == 0:
                    return None
                self._drain()
                continue
            try:
                enter_slot(self._state, request)
                self._states.begin(request)
            except Exception as error:  # such as no memory for its rules
                self._passed_on(request, request.fail(error, doing="it could not be given a slot"))
                continue
            if request.admitted_s is None:
                request.admitted_s = time.perf_counter()
            self.drafting.stop_beyond(request, request.prefill_goal, context_end=request.held.num_hit)
            return request
        return None

    def _decode(self) -> None:
        if any(request.grammar is not None and request.is_decoding for request in self.scheduler.running):
            self._read_all()  # the next mask depends on what was decided
        if self._runs_ahead and self._has_news:
            self._make_room()
        requests, ahead = self._next_to_decode()
        if not requests:
            self._read_all()
            return
        started_s = time.perf_counter()
        plan = self.drafting.plan(requests, self.scheduler.running)
        _, rows_ahead, num_waiting = zip(*ahead, strict=True)
        batch = step_batch(
            requests,
            self._state,
            self._settings,
            plan,
            flags=self._flags.of(requests),
            most_drafts=self.drafting.planner.limit(len(requests)),
            num_waiting=num_waiting,
            rows_ahead=rows_ahead,
            stopper=self.drafting.stopper_of(requests),
            round_rows=self._steps.rows_of,
            least_rows=self._steps.least_rows(plan),
            watch=self._watch,
        )
        num_rows = batch.rows.num_rows
        self._count_pass(requests, ahead, [num_rows] * len(requests))
        batch = self._states.keep_in_step(batch, requests, self._in_flight.last)
        output = self.run_step(batch)
        is_steady = num_rows == self._steps.rows_of(plan.most + 1)  # it judges as many drafts as it draws
        size = self.drafting.size_of(plan, writes_context=batch.writes_context) if is_steady else None
        drawn = plan.num_drafts
        self._in_flight.keep(
            requests, output, num_drawn=drawn, num_rows=num_rows, is_decode=True, started_s=started_s, size=size
        )
        self._read_behind()

    def _next_to_decode(self) -> tuple[list[RunningRequest], list[Ahead]]:
        """Requests that decode, and how far ahead the device may be with each.

        Those whose budget ends for certain with what is in flight are left out.
        """
        decoding = [request for request in self.scheduler.running if request.is_decoding]
        requests, ahead = [], []
        for request, each in zip(decoding, self._in_flight.ahead(decoding), strict=True):
            if request.output.num_remaining > each.num_passes:
                requests.append(request)
                ahead.append(each)
        return requests, ahead

    def _count_pass(self, requests: Sequence[RunningRequest], ahead: Sequence[Ahead], num_rows: Sequence[int]) -> None:
        """Number a pass that is about to be launched, with the state and the tables that it reads up to date."""
        self._state.flush()
        self.parts.tables.flush()
        number = self._in_flight.count()
        if self._checks is not None:
            running = self.scheduler.running
            unread = zip(running, self._in_flight.ahead(running), strict=True)
            rows = {request.request_id: (each.num_rows, 0) for request, each in unread}
            for request, each, own in zip(requests, ahead, num_rows, strict=True):
                rows[request.request_id] = (each.num_rows, own)
            self._checks.before_pass(number, running, rows)

    # Results

    def _read_behind(self) -> None:
        """After a launch: read what was launched before it, or where nothing runs ahead, the pass itself, too."""
        self._read_before(self._in_flight.last + (0 if self._runs_ahead else 1))
        if self._checks is not None:
            self._checks.after_pass(self._in_flight.last, self.scheduler.running)

    def _read_all(self) -> None:
        self._read_before(self._in_flight.last + 1)

    def _read_before(self, number: int) -> None:
        """Wait for results of passes before `number`, and pass them on, oldest first."""
        while self._in_flight.has_before(number):
            launched = self._in_flight.pop()
            self._has_news = True
            if launched.is_decode:
                self._take_steps(launched)
            else:
                self._take_first(launched)
            self._last_read_s = time.perf_counter()
            self._pool.retire(launched.number)
            self._prompts.times.finished(launched.number)
        if self._state.device.type == "cpu":  # whatever was launched is done
            self._prompts.times.finished(self._in_flight.last)

    def _take_first(self, launched: Launched) -> None:
        for request, step, num_drawn in launched.read():
            request.num_drawn, request.num_waiting = num_drawn, step.num_waiting
            if not request.is_resumed:
                delta = request.take_first(step)
                self._deliver(delta)
                self.blocks.publish(request)
                self._finish_with(request, delta)

    def _take_steps(self, launched: Launched) -> None:
        waited_s = time.perf_counter()
        launched.wait()
        waited_ms = milliseconds_since(waited_s)
        parts = launched.read()
        step_ms = milliseconds_since(max(launched.started_s, self._last_read_s))
        step_ms -= 0.0 if self._watch is None else self._watch.own_ms
        self.counters.num_steps += 1
        self.counters.total_step_ms += step_ms
        self._pace.observe_step(step_ms)
        keeps_states = self._states.store is not None
        for request, step, num_drawn in parts:
            delta = request.take_step(step, step_ms, self._watch)
            if keeps_states:
                self._states.take_step(launched.number, request, step.position, step)
            self._deliver(delta)
            self.drafting.observe(request, step)
            request.num_drawn, request.num_waiting = num_drawn, step.num_waiting
            length, reason = request.num_cached, delta.finish_reason
            self.blocks.publish_below(request, length)
            if request.is_drafted and reason is None:
                self.drafting.stop_beyond(request, length, context_end=length)
            if step.fault == NOT_A_NUMBER and reason is None:
                self._retry_without_drafts(request)
            elif step.fault == NOT_A_NUMBER:
                request.has_bad_numbers = True  # it ended within its block, but the rows behind may hold anything
            if reason is not None:
                self._finish(request, reason)
        self._states.settle_step(launched.number)
        size = launched.size if launched.number == self._last_step + 1 else None  # else something ran in between
        self._last_step = launched.number
        is_beside = self._runs_ahead and self._state.device.type == "cuda"  # a CPU's steps are done by the host
        host_ms = step_ms - waited_ms if is_beside else 0.0
        self.drafting.observe_step(launched.requests, size, step_ms=step_ms, host_ms=host_ms)
        self.drafting.give_up(launched.requests)

    def _retry_without_drafts(self, request: RunningRequest) -> None:
        """A block with NaN or infinity says nothing of the request itself: run its anchor again, alone."""
        assert request.slot is not None, "only admitted requests are run"
        self.counters.num_spoiled_blocks += 1
        restore_slot(self._state, request)
        # A masked key counts nothing, but a masked NaN spoils the sum, so none may wait where a batch reads.
        self.parts.planes.clear_rows(request.slot, request.num_cached)
        if self._checks is not None:
            self._checks.on_admission(request, request.slot)

    def _passed_on(self, request: RunningRequest, delta: RequestDelta) -> None:
        self._deliver(delta)
        self._finish_with(request, delta)

    def _deliver(self, delta: RequestDelta) -> None:
        """Keep what a request has come to, at once: an interruption must not lose it."""
        self.counters.num_output_tokens += len(delta.token_ids)
        if delta.step is not None:
            self.counters.count_step(delta.step)
        self.deltas.append(delta)

    def _finish_with(self, request: RunningRequest, delta: RequestDelta) -> None:
        if delta.finish_reason is not None:
            self._finish(request, delta.finish_reason)

    def _finish(self, request: RunningRequest, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.remove(request, is_spoiled=request.has_bad_numbers)
        self.results.put(request.result(reason))
        del self.requests[request.request_id]  # last: interrupted before, it is ended again
        self.counters.num_finished += 1
        self.counters.num_aborted += reason == "abort"
        self.counters.num_numeric_errors += reason == "error" and request.has_bad_numbers
        self.counters.num_dead_ends += reason == "error" and request.has_dead_end
