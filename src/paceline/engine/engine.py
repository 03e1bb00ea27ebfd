"""The engine: requests in, deltas out, one device. Admission is first come first served into free slots.

One call of `step` runs prompt chunks up to `prefill_chunk_size` tokens, then one decode step of every request whose
prompt is done. An engine belongs to one thread; call `abort` between steps.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract
from paceline.engine.attends import AttentionChoice
from paceline.engine.cache import KeyValueCache
from paceline.engine.counters import Counters, EngineStats
from paceline.engine.output import RequestOutput
from paceline.engine.prefill import PrefillChunk, prefill_chunk
from paceline.engine.proposal import BlockProposer, Proposer, Rows
from paceline.engine.request import FinishReason, RequestDelta, RequestResult, SamplingParameters, check_prompt
from paceline.engine.running import RunningRequest
from paceline.engine.sequential_proposal import SequentialProposer, spare_positions
from paceline.engine.settings import EngineSettings, context_length, draft_tokens_per_step
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.step import StepBatch, decode_step
from paceline.errors import CompatibilityError, RequestError
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.trace.step import RequestTrace

if TYPE_CHECKING:
    from paceline.engine.canary import CanaryReport

NUM_KEPT_RESULTS = 4096

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
        _refuse_another_target(target, drafter)
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
        if drafter is not None and proposer is None:
            self._proposer = self._own_proposer(drafter, num_draft_tokens, capacity)
        self._state = SlotState(
            settings.max_num_seqs,
            num_draft_tokens=num_draft_tokens,
            num_candidates=self._proposer.num_candidates if self._proposer is not None else 0,
            device=weight.device,
        )
        self._free_slots = list(reversed(range(settings.max_num_seqs)))
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._requests: dict[str, RunningRequest] = {}
        self._results: OrderedDict[str, RequestResult] = OrderedDict()
        self._names = itertools.count()
        self._counters = Counters(num_draft_tokens)
        self._is_mid_step = False

    def _own_proposer(self, drafter: LoadedDrafter, num_draft_tokens: int, capacity: int) -> Proposer:
        model, contract = drafter.model, drafter.contract
        method = self.settings.draft_sample_method or contract.draft_sample_method
        if isinstance(model, Eagle3Drafter):
            cache = self._drafter_cache(
                contract, model.cache_shape, capacity + spare_positions(num_draft_tokens), model.fc.weight
            )
            return SequentialProposer(
                self._target, model, cache, self._choice, num_draft_tokens=num_draft_tokens, method=method
            )
        backbone = model.backbone
        cache = self._drafter_cache(contract, backbone.cache_shape, capacity, backbone.fc.weight)
        return BlockProposer(self._target, model, cache, self._choice, num_draft_tokens=num_draft_tokens, method=method)

    def _drafter_cache(
        self, contract: DrafterContract, shape: tuple[int, int], capacity: int, weight: Tensor
    ) -> KeyValueCache:
        num_kv_heads, head_size = shape
        return KeyValueCache(
            num_layers=contract.num_layers,
            num_slots=self.settings.max_num_seqs,
            num_kv_heads=num_kv_heads,
            capacity=capacity,
            head_size=head_size,
            dtype=weight.dtype,
            device=weight.device,
        )

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
            RequestError: the prompt is empty or too long, a token id is not in the vocabulary, or the id is taken.
        """
        contract = self._loaded_target.contract
        prompt = check_prompt(prompt_ids, vocab_size=contract.vocab_size, max_model_len=self.max_model_len)
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        if name in self._requests:
            raise RequestError(f"a request named {name!r} is still running")
        outside = [token for token in sampling.stop_token_ids if token >= contract.vocab_size]
        if outside:
            raise RequestError(f"stop_token_ids holds {outside[0]}; the vocabulary has {contract.vocab_size} ids")
        self._results.pop(name, None)
        request = RunningRequest(
            request_id=name,
            prompt_ids=prompt,
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(64) - 2**63,
            output=RequestOutput(
                self._loaded_target.tokenizer,
                sampling,
                max_tokens=min(sampling.max_tokens, self.max_model_len - len(prompt)),
                target_stop_ids=contract.stop_token_ids,
            ),
            trace=RequestTrace(name, len(prompt), method=self._proposer.name if self._proposer else "plain"),
            flags=SamplingFlags.of([sampling]),
        )
        self._requests[name] = request
        self._waiting.append(request)
        return name

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
        if request_id in self._results:
            return self._results[request_id]
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
                names[self.add_request(prompt, parameters)] = None
            while len(finished) < len(names):
                for delta in self.step():
                    if delta.finish_reason is not None and delta.request_id in names:
                        finished[delta.request_id] = self._results.pop(delta.request_id)
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
        counters = self._counters
        drafter_cache = self._proposer.cache if self._proposer is not None else None
        return EngineStats(
            num_steps=counters.num_steps,
            num_request_steps=counters.num_request_steps,
            num_draft_tokens=sum(counters.drafted_per_position),
            num_accepted=sum(counters.accepted_per_position),
            drafted_per_position=tuple(counters.drafted_per_position),
            accepted_per_position=tuple(counters.accepted_per_position),
            num_prefill_tokens=counters.num_prefill_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_finished=counters.num_finished,
            num_aborted=counters.num_aborted,
            num_numeric_errors=counters.num_numeric_errors,
            num_undrafted=counters.num_undrafted,
            num_impossible_drafts=counters.num_impossible_drafts,
            num_spoiled_blocks=counters.num_spoiled_blocks,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_slots=len(self._free_slots),
            target_cache_bytes=self._cache.num_bytes,
            drafter_cache_bytes=drafter_cache.num_bytes if drafter_cache is not None else 0,
            linear_mode=self._loaded_target.linear_mode,
            method=self._proposer.name if self._proposer is not None else "plain",
            mean_step_ms=counters.total_step_ms / max(1, counters.num_steps),
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
            self._admit()
            self._is_mid_step = True
            deltas = self._prefill()
            deltas += self._decode()
            self._is_mid_step = False
        return deltas

    def _restore_slots(self) -> None:
        """After an interrupted step the device may be ahead of the host; what was not delivered is done again."""
        for request in list(self._running):
            if request.finish_reason is not None:
                self._finish(request, request.finish_reason)
            elif request.is_decoding:
                self._restore(request)

    def _restore(self, request: RunningRequest) -> None:
        assert request.slot is not None, "only admitted requests have a state on the device"
        num_steps, token_ids = len(request.trace.records), request.output.token_ids
        self._state.restore(request.slot, length=request.num_cached, anchor=token_ids[-1], step=num_steps)

    def _retry_without_drafts(self, request: RunningRequest) -> None:
        """A block with NaN or infinity says nothing of the request itself: run its anchor again, alone."""
        assert request.slot is not None, "only admitted requests are run"
        self._counters.num_spoiled_blocks += 1
        self._restore(request)
        self._clear_rows(request.slot, request.num_cached)

    def _admit(self) -> None:
        while self._waiting and (self._free_slots or self._waiting[0].slot is not None):
            request = self._waiting[0]
            if request.slot is None:
                request.slot = self._free_slots.pop()
            self._state.admit(request.slot, request.sampling, request.seed)
            request.is_drafted = self._proposer is not None
            request.admitted_s = time.perf_counter()
            self._stop_drafting_beyond(request, len(request.prompt_ids))
            self._running.append(self._waiting.popleft())

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
        assert request.slot is not None, "only admitted requests are run"
        started_s = time.perf_counter()
        # Chunks end at multiples of their size, so that a request's arithmetic does not depend on its neighbours.
        start = request.num_prefilled
        end = min(start + self.settings.prefill_chunk_size, len(request.prompt_ids))
        chunk = PrefillChunk(
            slot=request.slot,
            token_ids=request.prompt_ids[start:end],
            start=start,
            next_id=request.prompt_ids[end] if end < len(request.prompt_ids) else None,
            flags=request.flags,
            proposes=request.output.max_tokens > 1,
        )
        proposer = self._proposer if request.is_drafted else None
        first_token = prefill_chunk(self._target, proposer, self._cache, self._state, self._choice, chunk)
        self._counters.num_prefill_tokens += end - start
        request.trace.prefill_ms += (time.perf_counter() - started_s) * 1e3
        if first_token is None:
            request.num_prefilled = end
            return None
        return self._passed_on(request, request.take_first(first_token))

    def _decode(self) -> list[RequestDelta]:
        requests = [request for request in self._running if request.is_decoding]
        if not requests:
            return []
        started_s = time.perf_counter()
        batch = self._batch(requests)
        output = decode_step(self._target, self._proposer, self._cache, self._state, self._choice, batch)
        steps = output.to_host()
        step_ms = (time.perf_counter() - started_s) * 1e3
        self._counters.num_steps += 1
        self._counters.total_step_ms += step_ms
        deltas = []
        for request, step in zip(requests, steps, strict=True):
            delta = request.take_step(step, step_ms)
            self._counters.num_impossible_drafts += step.num_zero_q
            self._stop_drafting_beyond(request, request.num_cached)
            if step.is_bad and request.finish_reason is None:
                self._retry_without_drafts(request)
            elif step.is_bad:
                request.has_bad_numbers = True  # it ended within its block, but the rows behind may hold anything
            deltas.append(self._passed_on(request, delta))
        return deltas

    def _batch(self, requests: list[RunningRequest]) -> StepBatch:
        slots = [request.slot for request in requests if request.slot is not None]
        starts = [request.num_cached for request in requests]
        proposer = self._proposer if any(request.is_drafted for request in requests) else None
        num_rows = 1 + (proposer.num_draft_tokens if proposer is not None else 0)
        device = self._state.device
        return StepBatch(
            rows=Rows(slots, torch.tensor(slots, device=device), starts, torch.tensor(starts, device=device), num_rows),
            flags=SamplingFlags.of([request.sampling for request in requests]),
            writes_context=proposer is not None,
            proposes=proposer is not None,
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
        self._results[request.request_id] = request.result(reason)
        while len(self._results) > NUM_KEPT_RESULTS:
            self._results.popitem(last=False)
        self._counters.num_finished += 1
        self._counters.num_aborted += reason == "abort"
        self._counters.num_numeric_errors += reason == "error"

    def _clear_rows(self, slot: int, start: int) -> None:
        """A masked key counts nothing, but a masked NaN spoils the sum, so none may wait where a batch reads."""
        self._cache.clear_rows(slot, start)
        if self._proposer is not None and self._proposer.cache is not None:
            self._proposer.cache.clear_rows(slot, start)


def _refuse_another_target(target: LoadedTarget, drafter: LoadedDrafter | None) -> None:
    """A drafter that was checked on one target may fit no other, however equal their sizes."""
    if drafter is not None and drafter.checked_on is not None and drafter.checked_on is not target.model:
        raise CompatibilityError(
            "the drafter was loaded for another target than this engine's; what was checked there says nothing here",
            origin={"drafter": drafter.contract.origin, "target": target.contract.origin},
            hint="load_drafter(name, target) with this engine's target",
        )
