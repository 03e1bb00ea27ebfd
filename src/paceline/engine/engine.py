"""The engine: requests in, deltas out, one device.

One call of `step` makes room for the requests that decode, runs prompt chunks of one request after the other, as many
tokens as `ChunkPace` allows, and then one decode step of every request whose prompt is done (`loop.py`). An engine
belongs to one thread; call `abort` and all else between steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.engine.block_stats import BlockStats
from paceline.engine.counters import EngineStats
from paceline.engine.draft_length import BelievedStep
from paceline.engine.generating import run_prompts, stream_prompt
from paceline.engine.intake import Intake
from paceline.engine.loop import EngineLoop
from paceline.engine.make_proposer import refuse_another_target
from paceline.engine.parts import make_parts
from paceline.engine.proposal import Proposer
from paceline.engine.request import QueueOptions, RequestDelta, RequestResult, SamplingParameters
from paceline.engine.running import RunningRequest
from paceline.engine.sampling import samples_of
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.settings import EngineSettings
from paceline.engine.start_checks import check_at_start
from paceline.engine.step_kind import StepAhead, StepKind, TextKind
from paceline.errors import EngineClosedError, RequestError, shown
from paceline.models.loading import LoadedDrafter, LoadedTarget

if TYPE_CHECKING:
    from paceline.engine.canary_report import CanaryReport

__all__ = ["Engine", "EngineSettings"]


class Engine:
    """Runs requests on one device, with or without a drafter. The output is the target's own either way.

    Args:
        target: the model that decides.
        drafter: the model that proposes; None decodes plainly.
        settings: sizes and choices.
        proposer: something else that proposes, instead of `drafter`; for the canary and for tests.
        all_did: where other processes run the same steps on the same requests, with collectives among them: whether
            something worked in all of them. None where there are no others.

    Raises:
        ConfigError: a setting asks for more than the models can do.
        CompatibilityError: the drafter was loaded, and so checked, for another target, or the canary found a fault.
        CapacityError: the caches do not fit into memory.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter | None = None,
        settings: EngineSettings | None = None,
        *,
        proposer: Proposer | None = None,
        all_did: Callable[[bool], bool] | None = None,
    ) -> None:
        refuse_another_target(target, drafter)
        self.settings = settings = settings or EngineSettings()
        if drafter is not None and settings.canary == "start":
            check_at_start(target, drafter, settings)
        parts = make_parts(target, drafter, settings, proposer)
        self.max_model_len = parts.max_model_len
        self._intake = Intake(target, max_model_len=self.max_model_len, verify_method=settings.verify_method)
        self._loop = EngineLoop(parts, settings, self._intake, all_did)
        self._names = itertools.count()
        self._is_closed = False

    # Requests in and out

    def add_request(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request.

        Args:
            prompt_ids: token ids of the prompt.
            sampling: `max_tokens` is cut to the room that the context leaves; the request then ends with "length".
            request_id: made up if None.
            priority: see `QueueOptions`, like the next two.
            timeout_s: the request then ends with "abort".
            cache_salt: keeps its cached text apart from others'.

        Returns:
            Its id.

        Raises:
            RequestError: the prompt is empty or too long, a token id is not in the vocabulary, the form of the output
                cannot be compiled, more than one sample is wanted, or the id is taken.
            QueueFullError: as many requests wait as may wait.
            EngineClosedError: after `close`.
        """
        self._require_open()
        if sampling.n != 1:
            raise RequestError(
                f"n is {sampling.n}; a request is one sample", hint="Engine.add_samples, or Engine.generate"
            )
        name = self._name_of(request_id)
        self._queue([self._new_request(name, prompt_ids, sampling, QueueOptions(priority, timeout_s, cache_salt))])
        return name

    def add_samples(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
    ) -> list[str]:
        """Queue the n samples of a prompt as requests of their own.

        Args:
            prompt_ids: token ids of the prompt.
            sampling: of all of them; sample i uses `seed` + i.
            request_id: made up if None.
            priority: of each, as for `add_request`, like the next two.
            timeout_s: of each.
            cache_salt: of all.

        Returns:
            Their ids, `request_id` followed by "-0", "-1" and so on.

        Raises:
            RequestError: as for `add_request`; none is then queued.
            QueueFullError: likewise.
            EngineClosedError: after `close`.
        """
        self._require_open()
        name = self._name_of(request_id)
        options = QueueOptions(priority, timeout_s, cache_salt)
        requests = [
            self._new_request(f"{name}-{index}", prompt_ids, one, options, sample_index=index)
            for index, one in enumerate(samples_of(sampling))
        ]
        self._queue(requests)
        return [request.request_id for request in requests]

    def _name_of(self, request_id: object) -> str:
        """The caller's name of a request, or one that no caller has given to a request that still runs."""
        if request_id is not None:
            if not isinstance(request_id, str):
                raise RequestError(f"the request's id is {shown(request_id)}; it has to be a text")
            return request_id
        taken = self._loop.requests
        return next(
            name
            for name in (f"request-{number}" for number in self._names)
            if name not in taken and f"{name}-0" not in taken
        )

    def _new_request(
        self,
        name: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        options: QueueOptions,
        *,
        sample_index: int = 0,
    ) -> RunningRequest:
        if name in self._loop.requests:
            raise RequestError(f"a request named {name!r} is still running")
        mode = sampling.draft_length or self.settings.draft_length
        draft_method = self._loop.parts.method if mode != "off" else "plain"
        return self._intake.new_request(
            name, prompt_ids, sampling, draft_method=draft_method, options=options, sample_index=sample_index
        )

    def _queue(self, requests: Sequence[RunningRequest]) -> None:
        self._loop.scheduler.require_room(len(requests))
        for request in requests:
            self._loop.forget(request.request_id)
            self._loop.requests[request.request_id] = request
            self._loop.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request now and free what it holds; what it delivered stays available. Unknown ids are ignored."""
        self._loop.end(request_id, lambda request: RequestDelta(request_id, (), request.output.finish(), "abort"))

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request now, like `abort`, but with the reason "error" and what happened."""
        self._loop.end(request_id, lambda request: request.fail(error))

    def preempt(self, request_id: str) -> bool:
        """Let a running request step back, as for lack of blocks; False if it does not run. For tests."""
        return self._loop.preempt(request_id)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do, or to return."""
        return bool(self._loop.requests or self._loop.deltas)

    @property
    def is_recording(self) -> bool:
        """Whether decode steps are recorded as CUDA graphs."""
        return self._loop.is_recording

    def running_ids(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot."""
        return tuple(request.request_id for request in self._loop.requests.values() if request.slot is not None)

    def result(self, request_id: str) -> RequestResult:
        """A finished request. The last 4096 are kept.

        Raises:
            RequestError: unknown, or not finished.
        """
        result = self._loop.results.get(request_id)
        if result is not None:
            return result
        state = "has not ended yet" if request_id in self._loop.requests else "is not known, or ended long ago"
        raise RequestError(f"request {request_id!r} {state}")

    def take_result(self, request_id: str) -> RequestResult:
        """A finished request, and keep it no longer; errors as for `result`."""
        self.result(request_id)
        return self._loop.results.take(request_id)

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
            QueueFullError: there are more prompts than may wait.
        """
        return run_prompts(self, prompts, sampling)

    def stream(self, prompt_ids: Sequence[int], sampling: SamplingParameters) -> Iterator[RequestDelta]:
        """Run one request and yield what each step adds; closing the iterator aborts it.

        Other requests of the engine run along; their deltas are not yielded here.
        """
        return stream_prompt(self, prompt_ids, sampling)

    def stats(self) -> EngineStats:
        """Counters since the engine was made, its blocks at this moment, and its components."""
        self._require_open()
        loop = self._loop
        return loop.counters.snapshot(
            loop.drafting.planner,
            BlockStats.of(loop.scheduler),
            loop.parts.stats(),
            short_list=loop.parts.short_list,
        )

    def believed_steps(self, sampling: SamplingParameters, num_requests: int) -> list[BelievedStep]:
        """What "adaptive" reckons with at this moment, for each number of drafts.

        Args:
            sampling: of the requests of a step.
            num_requests: in it, all alike.

        Returns:
            From 0 drafts on; nothing where nobody has adapted yet.
        """
        controller = self._loop.drafting.planner.controller
        if controller is None:
            return []
        flags = SamplingFlags.of([sampling])
        text = TextKind(not flags.all_greedy, flags.any_rules)
        return controller.believed(StepAhead(StepKind.of(flags), num_requests, ((text, num_requests),)))

    def clear_prefix_cache(self) -> int:
        """Forget cached text that no running request uses; returns how many blocks that were."""
        return self._loop.blocks.pool.clear_cache()

    def canary(self) -> CanaryReport:
        """Check the bookkeeping of engines made like this one with drafts that are known to be right."""
        from paceline.engine.canary import run_canary  # it makes engines of its own

        self._require_open()
        return run_canary(self._loop.parts.target, self._loop.parts.drafter, self.settings)

    def canary_steps(self) -> Generator[None, None, CanaryReport]:
        """The canary in small pieces, so that running requests need not wait for all of it."""
        from paceline.engine.canary import canary_steps

        self._require_open()
        return canary_steps(self._loop.parts.target, self._loop.parts.drafter, self.settings)

    def wrap_proposer(self, wrap: Callable[[Proposer], Proposer]) -> None:
        """Put something around what drafts, before the first request; for the canary and for tests."""
        parts = self._loop.parts
        assert parts.proposer is not None and not self._loop.requests, (
            "there is nothing to wrap, or requests are running"
        )
        parts.proposer = wrap(parts.proposer)

    def request_in_slot(self, slot: int) -> str | None:
        """The id of the request that holds a slot."""
        return next((request.request_id for request in self._loop.scheduler.running if request.slot == slot), None)

    def step(self) -> list[RequestDelta]:
        """Make room, admit, run prompt chunks, run one decode step.

        Whatever interrupts it, Ctrl-C included, the engine stays usable: the next step starts from what the host knows,
        and returns what this one had come to.

        Returns:
            Deltas of requests that got tokens, text or an end.

        Raises:
            EngineClosedError: after `close`.
        """
        self._require_open()
        return self._loop.step()

    def close(self) -> None:
        """Abort what runs and give the memory of the caches back. Results stay; everything else raises from now on."""
        if not self._is_closed:
            for name in list(self._loop.requests):
                self.abort(name)
            self._is_closed = True
            self._loop.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("this engine was closed; its caches are gone", hint="another Engine")
