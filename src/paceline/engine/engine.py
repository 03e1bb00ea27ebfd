"""The engine: requests in, deltas out, one device. Admission is first come first served into free slots.

One call of `step` runs prompt chunks up to `prefill_chunk_size` tokens, then one decode step of every request whose
prompt is done. Before either, what the next blocks may hold is planned and grammars are asked for their masks; behind
it, tokens are handed to their requests and what became of the drafts to the planner. An engine belongs to one thread;
call `abort` between steps.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.engine.attends import AttentionChoice
from paceline.engine.batching import StepFlags, next_chunk, step_batch
from paceline.engine.cache import KeyValueCache
from paceline.engine.counters import Counters, EngineStats
from paceline.engine.draft_budget import DraftSchedule
from paceline.engine.draft_length import DraftLengthController
from paceline.engine.draft_planner import DraftPlanner
from paceline.engine.draft_stopper import DraftPlan, DraftStopper
from paceline.engine.intake import Intake
from paceline.engine.make_proposer import make_proposer, refuse_another_target
from paceline.engine.prefill import prefill_chunk
from paceline.engine.proposal import Proposer
from paceline.engine.request import FinishReason, RequestDelta, RequestResult, SamplingParameters
from paceline.engine.results import FinishedRequests
from paceline.engine.running import RunningRequest
from paceline.engine.sampling import samples_of
from paceline.engine.settings import EngineSettings, context_length, draft_tokens_per_step
from paceline.engine.short_list import choose_short_list
from paceline.engine.slots import SlotState
from paceline.engine.step import HostStep, decode_step
from paceline.engine.step_cost import StepCosts
from paceline.engine.trial_steps import measure_costs
from paceline.errors import RequestError
from paceline.models.drafters.short_list import ShortList
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.ops.finalise_block import NOT_A_NUMBER

if TYPE_CHECKING:
    from paceline.engine.canary import CanaryReport

__all__ = ["Engine", "EngineSettings"]

_log = logging.getLogger(__name__)


class Engine:
    """Runs requests on one device, with or without a drafter. The output is the target's own either way.

    Args:
        target: the model that decides.
        drafter: the model that proposes; None decodes plainly.
        settings: sizes and choices.
        proposer: something else that proposes, instead of `drafter`; for the canary and for tests.

    Raises:
        ConfigError: a setting asks for more than the models can do.
        CompatibilityError: the drafter was loaded, and so checked, for another target.
        CapacityError: the caches do not fit into memory.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter | None = None,
        settings: EngineSettings | None = None,
        *,
        proposer: Proposer | None = None,
    ) -> None:
        refuse_another_target(target, drafter)
        self.settings = settings = settings or EngineSettings()
        self._loaded_target, self._loaded_drafter, self._target = target, drafter, target.model
        weight = target.model.norm.weight
        self._choice = AttentionChoice.for_device(weight.device, is_row_invariant=target.linear_mode == "row_invariant")
        self.max_model_len = context_length(target, settings)
        num_draft_tokens = draft_tokens_per_step(drafter, proposer, settings)
        capacity = self.max_model_len + num_draft_tokens + 1  # the last block may reach beyond the budget
        contract = target.contract
        self._cache = KeyValueCache(
            num_layers=contract.num_layers,
            num_slots=settings.max_num_seqs,
            num_kv_heads=contract.num_kv_heads,
            capacity=capacity,
            head_size=contract.head_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._proposer = proposer
        self._short_list: ShortList | None = None
        if drafter is not None and proposer is None:
            self._short_list = choose_short_list(target, drafter, settings.draft_vocab_size)
            self._proposer = make_proposer(
                target,
                drafter,
                self._choice,
                settings,
                num_draft_tokens=num_draft_tokens,
                capacity=capacity,
                short_list=self._short_list,
            )
        self._state = SlotState(
            settings.max_num_seqs,
            num_draft_tokens=num_draft_tokens,
            num_candidates=self._proposer.num_candidates if self._proposer is not None else 0,
            device=weight.device,
            vocab_size=contract.vocab_size,
        )
        self._intake = Intake(target, max_model_len=self.max_model_len, verify_method=settings.verify_method)
        self._free_slots = list(reversed(range(settings.max_num_seqs)))
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._requests: dict[str, RunningRequest] = {}
        self._results = FinishedRequests()
        self._names = itertools.count()
        self._counters = Counters(num_draft_tokens)
        self._flags = StepFlags()
        ranges = settings.num_drafts_by_batch_size
        self._planner = DraftPlanner(
            num_draft_tokens,
            schedule=None if ranges is None else DraftSchedule(ranges, num_draft_tokens),
            measure=self._measure_costs,
        )
        self._stopper: DraftStopper | None = None
        self._is_mid_step = False
        if settings.draft_length == "adaptive" and num_draft_tokens > 0:  # else the first request would wait for it
            self._planner.prepare()

    def _measure_costs(self) -> StepCosts:
        assert self._proposer is not None, "asked for only where something drafts"
        size = self.settings.max_num_seqs
        return measure_costs(self._target, self._proposer, self._cache, self._state, self._choice, max_num_seqs=size)

    # Requests in and out

    def add_request(
        self, prompt_ids: Sequence[int], sampling: SamplingParameters, request_id: str | None = None
    ) -> str:
        """Queue a request.

        Args:
            prompt_ids: token ids of the prompt.
            sampling: `max_tokens` is cut to the room that the context leaves; the request then ends with "length".
            request_id: made up if None.

        Returns:
            Its id.

        Raises:
            RequestError: the prompt is empty or too long, a token id is not in the vocabulary, the form of the output
                cannot be compiled, more than one sample is wanted, or the id is taken.
        """
        if sampling.n != 1:
            raise RequestError(
                f"n is {sampling.n}; a request is one sample", hint="Engine.add_samples, or Engine.generate"
            )
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        self._queue(self._new_request(name, prompt_ids, sampling))
        return name

    def add_samples(
        self, prompt_ids: Sequence[int], sampling: SamplingParameters, request_id: str | None = None
    ) -> list[str]:
        """Queue the n samples of a prompt as requests of their own.

        Args:
            prompt_ids: token ids of the prompt.
            sampling: of all of them; sample i uses `seed` + i.
            request_id: made up if None.

        Returns:
            Their ids, `request_id` followed by "-0", "-1" and so on.

        Raises:
            RequestError: as for `add_request`; none is then queued.
        """
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        requests = [
            self._new_request(f"{name}-{index}", prompt_ids, one, sample_index=index)
            for index, one in enumerate(samples_of(sampling))
        ]
        for request in requests:
            self._queue(request)
        return [request.request_id for request in requests]

    def _new_request(
        self, name: str, prompt_ids: Sequence[int], sampling: SamplingParameters, *, sample_index: int = 0
    ) -> RunningRequest:
        if name in self._requests:
            raise RequestError(f"a request named {name!r} is still running")
        mode = sampling.draft_length or self.settings.draft_length
        draft_method = self._proposer.name if self._proposer is not None and mode != "off" else "plain"
        return self._intake.new_request(
            name, prompt_ids, sampling, draft_method=draft_method, sample_index=sample_index
        )

    def _queue(self, request: RunningRequest) -> None:
        self._results.forget(request.request_id)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """End a request now and free its slot; what it delivered stays available. Unknown and ended ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.output.finish()
            self._finish(request, "abort")

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests)

    def result(self, request_id: str) -> RequestResult:
        """A finished request. The last 4096 are kept.

        Raises:
            RequestError: unknown, or not finished.
        """
        result = self._results.get(request_id)
        if result is not None:
            return result
        state = "has not ended yet" if request_id in self._requests else "is not known, or ended long ago"
        raise RequestError(f"request {request_id!r} {state}")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParameters | Sequence[SamplingParameters],
    ) -> list[RequestResult]:
        """Run prompts to their ends, as many at once as there are slots.

        Args:
            prompts: token ids of each.
            sampling: for all of them, or one each.

        Returns:
            The results by prompt; those of a prompt's n samples follow each other.

        Raises:
            RequestError: a request cannot be served; none is then started.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParameters) else list(sampling)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts came with {len(each)} sampling parameters")
        names: dict[str, None] = {}  # an ordered set
        finished: dict[str, RequestResult] = {}
        try:
            for prompt, parameters in zip(prompts, each, strict=True):
                if parameters.n == 1:
                    names[self.add_request(prompt, parameters)] = None
                else:
                    names.update(dict.fromkeys(self.add_samples(prompt, parameters)))
            while len(finished) < len(names):
                for delta in self.step():
                    if delta.finish_reason is not None and delta.request_id in names:
                        finished[delta.request_id] = self._results.take(delta.request_id)
        except BaseException:
            for name in names:
                self.abort(name)
            raise
        return [finished[name] for name in names]

    def stream(self, prompt_ids: Sequence[int], sampling: SamplingParameters) -> Iterator[RequestDelta]:
        """Run one request and yield what each step adds; closing the iterator aborts it.

        Other requests of the engine run along; their deltas are not yielded here.
        """
        name = self.add_request(prompt_ids, sampling)
        try:
            while name in self._requests:
                for delta in self.step():
                    if delta.request_id == name:
                        yield delta
        finally:
            self.abort(name)

    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        drafter_cache = self._proposer.cache if self._proposer is not None else None
        return self._counters.snapshot(
            self._planner,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_slots=len(self._free_slots),
            target_cache_bytes=self._cache.num_bytes,
            drafter_cache_bytes=drafter_cache.num_bytes if drafter_cache is not None else 0,
            token_rules_bytes=self._state.tokens.num_bytes,
            linear_mode=self._loaded_target.linear_mode,
            method=self._proposer.name if self._proposer is not None else "plain",
            short_list=self._short_list,
        )

    def canary(self) -> CanaryReport:
        """Check the bookkeeping of engines made like this one with drafts that are known to be right."""
        from paceline.engine.canary import run_canary  # it makes engines of its own

        return run_canary(self._loaded_target, self._loaded_drafter, self.settings)

    def wrap_proposer(self, wrap: Callable[[Proposer], Proposer]) -> None:
        """Put something around what drafts, before the first request; for the canary and for tests."""
        assert self._proposer is not None and not self._requests, "there is nothing to wrap, or requests are running"
        self._proposer = wrap(self._proposer)

    def request_in_slot(self, slot: int) -> str | None:
        """The id of the request that holds a slot."""
        return next((request.request_id for request in self._running if request.slot == slot), None)

    # The loop

    def step(self) -> list[RequestDelta]:
        """Admit, run prompt chunks, run one decode step.

        Whatever interrupts it, Ctrl-C included, the engine stays usable: the next step starts from what the host knows.

        Returns:
            One delta per request that got tokens, text or an end.
        """
        with torch.inference_mode():
            if self._is_mid_step:
                self._restore_slots()
            deltas = self._admit()
            self._is_mid_step = True
            deltas += self._prefill()
            deltas += self._decode()
            self._is_mid_step = False
        return deltas

    def _restore_slots(self) -> None:
        """After an interrupted step the device may be ahead of the host; what was not delivered is done again."""
        for request in list(self._running):
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason)
                continue
            self._restore(request)
            request.grammar = self._intake.start_grammar(request.sampling)
            if request.grammar is not None:
                request.grammar.advance(request.output.token_ids)

    def _restore(self, request: RunningRequest) -> None:
        assert request.slot is not None, "only admitted requests have a state on the device"
        num_steps, token_ids = len(request.trace.records), request.output.token_ids
        request.num_drawn = request.num_waiting = 0
        self._state.tokens.restore(request.slot, request.prompt_ids, token_ids)
        if request.is_decoding:
            self._state.restore(request.slot, length=request.num_cached, anchor=token_ids[-1], step=num_steps)

    def _retry_without_drafts(self, request: RunningRequest) -> None:
        """A block with NaN or infinity says nothing of the request itself: run its anchor again, alone."""
        assert request.slot is not None, "only admitted requests are run"
        self._counters.num_spoiled_blocks += 1
        self._restore(request)
        self._clear_rows(request.slot, request.num_cached)

    def _admit(self) -> list[RequestDelta]:
        failed: list[RequestDelta] = []
        while self._waiting and (self._free_slots or self._waiting[0].slot is not None):
            request = self._waiting[0]
            if request.slot is None:
                request.slot = self._free_slots.pop()
            try:
                self._state.admit(
                    request.slot, request.sampling, request.seed, limits=request.limits, prompt_ids=request.prompt_ids
                )
            except Exception as error:  # such as no memory for its rules: those behind it in the queue go on
                failed.append(self._passed_on(request, request.fail(error)))
                continue
            request.draft_length = request.sampling.draft_length or self.settings.draft_length
            request.is_drafted = self._proposer is not None and request.draft_length != "off"
            if request.is_drafted and request.draft_length == "adaptive":
                request.is_drafted = self._prepare_adapting().wants_another_request
            request.admitted_s = time.perf_counter()
            self._stop_drafting_beyond(request, len(request.prompt_ids))
            self._running.append(self._waiting.popleft())
        return failed

    def _prepare_adapting(self) -> DraftLengthController:
        if self._stopper is None:
            self._stopper = DraftStopper(self.settings.max_num_seqs, self._planner.num_draft_tokens, self._state.device)
        return self._planner.prepare()

    def _prefill(self) -> list[RequestDelta]:
        deltas: list[RequestDelta] = []
        num_tokens = 0
        while num_tokens < self.settings.prefill_chunk_size:
            request = next((request for request in self._running if not request.is_decoding), None)
            if request is None:
                break
            num_before = request.num_prefilled
            delta = self._prefill_next_chunk(request)
            num_tokens += request.num_prefilled - num_before
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _prefill_next_chunk(self, request: RunningRequest) -> RequestDelta | None:
        started_s = time.perf_counter()
        chunk = next_chunk(
            request, self._state, self.settings, plan=lambda: self._plan([request]), stopper=self._stopper
        )
        proposer = self._proposer if request.is_drafted else None
        first = prefill_chunk(self._target, proposer, self._cache, self._state, self._choice, chunk)
        self._counters.num_prefill_tokens += len(chunk.token_ids)
        request.trace.prefill_ms += (time.perf_counter() - started_s) * 1e3
        if first is None:
            request.num_prefilled += len(chunk.token_ids)
            return None
        request.num_drawn = chunk.plan.most if chunk.plan is not None else 0
        request.num_waiting = first.num_waiting
        return self._passed_on(request, request.take_first(first))

    def _decode(self) -> list[RequestDelta]:
        requests = [request for request in self._running if request.is_decoding]
        if not requests:
            return []
        started_s = time.perf_counter()
        plan = self._plan(requests)
        limit = self._planner.limit(len(requests))
        batch = step_batch(
            requests,
            self._state,
            self.settings,
            plan,
            flags=self._flags.of(requests),
            most_drafts=limit,
            stopper=self._stopper,
        )
        output = decode_step(self._target, self._proposer, self._cache, self._state, self._choice, batch)
        steps = output.to_host()
        step_ms = (time.perf_counter() - started_s) * 1e3
        self._counters.num_steps += 1
        self._counters.total_step_ms += step_ms
        deltas = []
        for request, step, num_drawn in zip(requests, steps, plan.num_drafts, strict=True):
            delta = request.take_step(step, step_ms)
            self._observe(request, step)
            request.num_drawn, request.num_waiting = num_drawn, step.num_waiting
            self._counters.num_impossible_drafts += step.num_zero_q
            if request.finish_reason is None:
                self._stop_drafting_beyond(request, request.num_cached)
            if step.fault == NOT_A_NUMBER and request.finish_reason is None:
                self._retry_without_drafts(request)
            elif step.fault == NOT_A_NUMBER:
                request.has_bad_numbers = True  # it ended within its block, but the rows behind may hold anything
            deltas.append(self._passed_on(request, delta))
        if self._planner.has_given_up:
            for request in requests:
                if request.draft_length == "adaptive" and request.num_waiting == 0:
                    request.is_drafted = False
        return deltas

    def _plan(self, requests: list[RunningRequest]) -> DraftPlan:
        return self._planner.plan(
            [request.draft_length if request.is_drafted else "off" for request in requests],
            teaches=[not request.has_token_rules for request in requests],
            num_requests=sum(request.is_decoding or request in requests for request in self._running),
        )

    def _observe(self, request: RunningRequest, step: HostStep) -> None:
        """Let the planner learn from a block that was judged."""
        num_judged = len(step.draft_ids)
        if step.fault == NOT_A_NUMBER and num_judged > 0:
            return  # it is run again without drafts
        if request.draft_length == "adaptive":
            self._counters.num_held_back += request.num_drawn - request.num_waiting
        self._planner.observe(
            request.draft_length, num_drawn=request.num_drawn, num_judged=num_judged, num_accepted=step.num_accepted
        )

    def _stop_drafting_beyond(self, request: RunningRequest, length: int) -> None:
        """Go on without drafts once a block after `length` cached positions would leave the drafter's positions."""
        proposer = self._proposer
        if proposer is None or not request.is_drafted or length + proposer.num_draft_tokens < proposer.max_positions:
            return
        request.is_drafted = False
        self._counters.num_undrafted += 1
        if self._counters.num_undrafted == 1:
            _log.warning(
                "request %s reached position %d; the drafter ends at %d, so it goes on without drafts "
                "(said once; stats count further ones)",
                request.request_id,
                length,
                proposer.max_positions,
            )

    def _passed_on(self, request: RunningRequest, delta: RequestDelta) -> RequestDelta:
        self._counters.num_output_tokens += len(delta.token_ids)
        if delta.step is not None:
            self._counters.count_step(delta.step)
        if delta.finish_reason is not None:
            self._finish(request, delta.finish_reason)
        return delta

    def _finish(self, request: RunningRequest, reason: FinishReason) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._running:
            self._running.remove(request)
        if request.slot is not None:
            if request.has_bad_numbers:
                self._clear_rows(request.slot, 0)
            self._free_slots.append(request.slot)
            request.slot = None
        del self._requests[request.request_id]
        self._results.put(request.result(reason))
        self._counters.num_finished += 1
        self._counters.num_aborted += reason == "abort"
        self._counters.num_numeric_errors += reason == "error" and request.has_bad_numbers
        self._counters.num_dead_ends += reason == "error" and request.has_dead_end

    def _clear_rows(self, slot: int, start: int) -> None:
        """A masked key counts nothing, but a masked NaN spoils the sum, so none may wait where a batch reads."""
        self._cache.clear_rows(slot, start)
        if self._proposer is not None and self._proposer.cache is not None:
            self._proposer.cache.clear_rows(slot, start)
