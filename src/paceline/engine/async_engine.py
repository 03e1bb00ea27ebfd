"""An engine for many callers of an event loop: one thread runs it, and each request is an async iterator of deltas.

```
engine = AsyncEngine(lambda: Engine(target, drafter, settings))
async with engine:
    async for delta in engine.generate(prompt_ids, SamplingParameters()):
        print(delta.text, end="")
```
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from paceline.engine.delta_stream import DeltaStream
from paceline.engine.engine_thread import EngineThread, ServedEngine, Submission
from paceline.engine.request import RequestDelta, RequestResult, SamplingParameters
from paceline.engine.start_checks import CANARY_MODES, CanaryMode
from paceline.errors import ConfigError, EngineClosedError

if TYPE_CHECKING:
    from paceline.engine.canary_report import CanaryReport
    from paceline.engine.counters import EngineStats

_SECONDS_AT_EXIT = 10.0  # a thread that is left over gets so long to finish its step


class AsyncEngine:
    """Serves requests of any number of coroutines, in one event loop after another.

    Every method may be called from any event loop while the engine runs; what is done with the engine is done on its
    own thread, between two steps.

    Args:
        make_engine: makes the engine; called on its thread by every `start`. Models that shall outlive a restart are
            loaded outside.
        canary: "start" refuses to serve with a drafter until the canary has passed; see `start_checks.py`.
        most_waiting_deltas: of a request whose reader is slow; further ones are joined to the last.
        most_failures: steps in a row that may fail; with the last of them the engine is dead.
        freezes_heap: keep what was loaded out of garbage collections while it serves, so that no token waits for a full
            one. For a process that lives with its engines and stops them; see `frozen_heap.py`.

    Raises:
        ConfigError: a value is impossible.
    """

    def __init__(
        self,
        make_engine: Callable[[], ServedEngine],
        *,
        canary: CanaryMode = "start",
        most_waiting_deltas: int = 64,
        most_failures: int = 3,
        freezes_heap: bool = False,
    ) -> None:
        if canary not in CANARY_MODES:
            raise ConfigError(f"canary is {canary!r}, not one of {', '.join(map(repr, CANARY_MODES))}")
        for name, value in (("most_waiting_deltas", most_waiting_deltas), ("most_failures", most_failures)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it has to be at least 1")
        self._make_engine, self._canary = make_engine, canary
        self._most_waiting, self._most_failures = most_waiting_deltas, most_failures
        self._freezes_heap = freezes_heap
        self._thread: EngineThread | None = None
        self._end_with_me: weakref.finalize[..., AsyncEngine] | None = None

    # Starting and stopping

    async def start(self) -> None:
        """Make the engine and begin to serve; nothing happens if it runs already.

        Raises:
            CompatibilityError: the canary found a fault.
            EngineClosedError: it was told to stop meanwhile.
            Exception: what `make_engine` raised.
        """
        thread = self._thread
        if thread is not None and thread.phase not in ("starting", "serving"):
            await self.stop()  # what is left of an engine that died or is stopping
            thread = self._thread
        if thread is None:
            thread = EngineThread(
                self._make_engine,
                canary=self._canary,
                most_failures=self._most_failures,
                freezes_heap=self._freezes_heap,
            )
            self._thread = thread
            self._end_with_me = weakref.finalize(self, _end, thread)  # at the exit of the process, too
            thread.start()
        try:
            await asyncio.wrap_future(thread.started)
        except BaseException:  # a start that was cancelled leaves no thread either
            thread.stop(drains=False)
            if thread.ended.done():
                self._forget(thread)
            raise

    async def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no further requests, end, and give the memory back. `start` makes another engine.

        A stop that is cancelled goes on without waiting for requests.

        Args:
            drain: let requests run to their ends; else they end now, with the reason "abort".
            timeout_s: how long; then the rest end, too. None waits for all.
        """
        thread = self._thread
        if thread is None:
            return
        thread.stop(drains=drain, timeout_s=timeout_s)
        try:
            await asyncio.wrap_future(thread.ended)
        except asyncio.CancelledError:
            thread.stop(drains=False)
            raise
        self._forget(thread)

    def _forget(self, thread: EngineThread) -> None:
        thread.join()  # it has said that it is done
        if self._thread is thread:
            self._thread = None
            if self._end_with_me is not None:
                self._end_with_me.detach()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.stop(drain=error is None)

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._thread is not None and self._thread.phase == "serving"

    @property
    def is_healthy(self) -> bool:
        """Whether it takes requests and no canary has found a fault since it started."""
        report = self._thread.last_report if self._thread is not None else None
        return self.is_running and (report is None or report.has_passed)

    # Requests

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        interval_s: float = 0.0,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Run a request and yield what each step adds; closing or cancelling the iterator ends the request.

        Args:
            prompt_ids: as for `Engine.add_request`, and so are the others.
            sampling: of one sample.
            request_id: made up if None.
            priority: lower goes first.
            timeout_s: after it the request ends with the reason "abort".
            cache_salt: only requests of the same salt share cached prefixes.
            interval_s: least time between two deltas, see `DeltaStream`; what came meanwhile is one.

        Yields:
            Deltas; the last of them has a reason.

        Raises:
            RequestError: it cannot be served as asked.
            QueueFullError: as many requests wait as may wait.
            EngineClosedError: the engine does not run.
            EngineDeadError: it kept failing, now or before.
        """
        thread = self._require_thread()
        stream = DeltaStream(asyncio.get_running_loop(), self._most_waiting, interval_s)
        thread.submit(Submission(prompt_ids, sampling, request_id, priority, timeout_s, cache_salt), stream)
        has_ended = False
        try:
            while not has_ended:
                delta = await stream.get()
                has_ended = delta.finish_reason is not None
                yield delta
        finally:
            if not has_ended:
                thread.abandon(stream)

    async def abort(self, request_id: str) -> None:
        """End a request now; its iterator yields a last delta. Unknown and ended ids are ignored."""
        await asyncio.wrap_future(self._require_thread().abort(request_id))

    async def result(self, request_id: str) -> RequestResult:
        """A finished request, see `Engine.result`."""
        return await asyncio.wrap_future(self._require_thread().ask(lambda engine: engine.result(request_id)))

    async def take_result(self, request_id: str) -> RequestResult:
        """A finished request, which is then forgotten, see `Engine.take_result`."""
        return await asyncio.wrap_future(self._require_thread().ask(lambda engine: engine.take_result(request_id)))

    # The engine as a whole

    async def stats(self) -> EngineStats:
        """Its counters, see `Engine.stats`."""
        return await asyncio.wrap_future(self._require_thread().ask(lambda engine: engine.stats()))

    async def check(self) -> CanaryReport:
        """Run the canary while requests run, in small pieces between their steps; a fault shows in `is_healthy`."""
        return await asyncio.wrap_future(self._require_thread().check())

    async def clear_prefix_cache(self) -> int:
        """Drop what no running request holds, see `Engine.clear_prefix_cache`."""
        return await asyncio.wrap_future(self._require_thread().ask(lambda engine: engine.clear_prefix_cache()))

    def _require_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineClosedError("the engine has not been started, or has stopped", hint="await engine.start()")
        return self._thread


def _end(thread: EngineThread) -> None:
    """End a thread that nobody stopped; not a method, as it must not keep its engine from being collected."""
    thread.stop(drains=False)
    thread.join(_SECONDS_AT_EXIT)
