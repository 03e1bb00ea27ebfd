"""The thread that owns an engine: takes commands between steps, hands deltas to their streams, survives failures.

Everything that touches the engine runs here: making it, every step, every check, closing it. Others leave commands,
which run in order between two steps. A canary that was asked for runs in small pieces, one after each step, so that
requests that are running wait for one piece and no more.

A step that raises ends the requests that took part in it; those that wait go on, since the engine recovers itself at
the next step. After a few failures in a row the engine is dead: all streams raise.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from paceline.engine.delta_stream import DeltaStream
from paceline.engine.frozen_heap import frozen_heap
from paceline.engine.request import RequestDelta, RequestResult, SamplingParameters
from paceline.engine.start_checks import CanaryMode, require_sound
from paceline.errors import EngineClosedError, EngineDeadError, PacelineError, RequestError

if TYPE_CHECKING:
    from paceline.engine.canary_report import CanaryReport
    from paceline.engine.counters import EngineStats
    from paceline.engine.settings import EngineSettings

Phase = Literal["starting", "serving", "draining", "stopped", "dead"]
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_log = logging.getLogger(__name__)


class ServedEngine(Protocol):
    """What an `Engine` offers to the thread that owns it."""

    settings: EngineSettings

    def add_request(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
    ) -> str: ...
    def step(self) -> list[RequestDelta]: ...
    def abort(self, request_id: str) -> None: ...
    def fail(self, request_id: str, error: Exception) -> None: ...
    def running_ids(self) -> tuple[str, ...]: ...
    def has_unfinished(self) -> bool: ...
    def result(self, request_id: str) -> RequestResult: ...
    def take_result(self, request_id: str) -> RequestResult: ...
    def stats(self) -> EngineStats: ...
    def clear_prefix_cache(self) -> int: ...
    def canary_steps(self) -> Generator[None, None, CanaryReport]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Submission:
    """A request on its way to the engine; the fields are those of `Engine.add_request`."""

    prompt_ids: Sequence[int]
    sampling: SamplingParameters
    request_id: str | None
    priority: int
    timeout_s: float | None
    cache_salt: str | None


@dataclass(frozen=True)
class _Command:
    """Something to do on the thread, and whom to tell if it never comes to that."""

    run: Callable[[ServedEngine], None]
    refuse: Callable[[EngineClosedError], object]


@dataclass
class _Served:
    """A request that the engine knows, and how much of it was delivered."""

    stream: DeltaStream
    num_tokens: int = 0
    num_characters: int = 0


@dataclass
class _Check:
    """A canary that is under way."""

    pieces: Generator[None, None, CanaryReport]
    answer: Future[CanaryReport]


class EngineThread:
    """Runs one engine from its making to its end.

    Args:
        make_engine: called on the thread.
        canary: "start" refuses to serve with a drafter until the engine has passed its canary.
        most_failures: steps in a row that may fail; with the last of them the engine is dead.
        freezes_heap: keep what was loaded out of garbage collections while it serves; see `frozen_heap.py`.

    Attributes:
        started: is given None once requests can be served, or the error that prevented it.
        ended: is given None when the thread is done, whatever the reason.
        phase: where it stands.
        error: what killed the engine, if something did.
        last_report: of the newest canary.
    """

    def __init__(
        self,
        make_engine: Callable[[], ServedEngine],
        *,
        canary: CanaryMode,
        most_failures: int,
        freezes_heap: bool = False,
    ) -> None:
        self._make_engine, self._canary, self._most_failures = make_engine, canary, most_failures
        self._freezes_heap = freezes_heap
        self.phase: Phase = "starting"
        self.error: BaseException | None = None
        self.last_report: CanaryReport | None = None
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()
        for future in (self.started, self.ended):  # else somebody who stops waiting for it would cancel it for all
            future.set_running_or_notify_cancel()
        self._commands: deque[_Command] = deque()
        self._condition = threading.Condition()
        self._drains, self._deadline_s = False, float("inf")
        self._served: dict[str, _Served] = {}
        self._checks: list[_Check] = []
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    # Called by others

    def start(self) -> None:
        """Begin to make the engine."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended; not from itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, submission: Submission, stream: DeltaStream) -> None:
        """Hand a request over; its deltas, or the error that refuses it, come through the stream.

        Raises:
            EngineClosedError: nothing is served any more.
            EngineDeadError: because the engine died.
        """
        with self._condition:
            if self.phase != "serving":
                raise self._refusal()
            self._commands.append(_Command(lambda engine: self._add(engine, submission, stream), stream.fail))
            self._condition.notify()

    def abandon(self, stream: DeltaStream) -> None:
        """End the request of a stream that nobody reads any more; a request that ended is left alone."""
        stream.is_abandoned = True
        self._post(_Command(lambda engine: self._drop(engine, stream), lambda _closed: None))

    def abort(self, request_id: str) -> Future[None]:
        """End a request; its stream gets a last delta with the reason "abort"."""
        return self.ask(lambda engine: self._abort(engine, request_id))

    def ask(self, question: Callable[[ServedEngine], T]) -> Future[T]:
        """Run something on the thread between two steps.

        Returns:
            Its answer, or an `EngineClosedError` where the thread has ended or ends before.
        """
        answer: Future[T] = Future()

        def run(engine: ServedEngine) -> None:
            try:
                answer.set_result(question(engine))
            except Exception as error:
                answer.set_exception(_released(error))

        answer.set_running_or_notify_cancel()  # somebody who stops waiting for it does not take it back
        self._post(_Command(run, answer.set_exception))
        return answer

    def check(self) -> Future[CanaryReport]:
        """Run the canary between steps."""
        answer: Future[CanaryReport] = Future()
        answer.set_running_or_notify_cancel()
        self._post(
            _Command(lambda engine: self._checks.append(_Check(engine.canary_steps(), answer)), answer.set_exception)
        )
        return answer

    def stop(self, *, drains: bool, timeout_s: float | None = None) -> None:
        """Take no further requests, and end once those that are known have ended, or at once.

        A second call may only hurry: it never makes a thread that ends at once wait again.

        Args:
            drains: let known requests run to their ends.
            timeout_s: how long; then the rest are aborted.
        """
        with self._condition:
            is_first = self.phase in ("starting", "serving")
            if is_first:
                self.phase = "draining"
            deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
            self._drains = drains if is_first else self._drains and drains
            self._deadline_s = min(self._deadline_s, deadline_s)
            self._condition.notify()

    def _post(self, command: _Command) -> None:
        with self._condition:
            if self.phase not in ("stopped", "dead"):
                self._commands.append(command)
                self._condition.notify()
                return
        command.refuse(self._refusal())

    def _refusal(self) -> EngineClosedError:
        if self.phase == "dead":
            return self._death()
        said = {"starting": "has not started yet", "draining": "is stopping"}.get(self.phase, "has stopped")
        return EngineClosedError(f"the engine {said}", hint="AsyncEngine.start(), and a request behind it")

    def _death(self) -> EngineDeadError:
        """A new one each time: an exception that several coroutines raise would mix up their tracebacks."""
        error = EngineDeadError(
            f"the engine is dead: {type(self.error).__name__}: {self.error}",
            hint="the log has the whole story; AsyncEngine.stop() and start() make another engine",
        )
        error.__cause__ = self.error
        return error

    # On the thread

    def _run(self) -> None:
        engine: ServedEngine | None = None
        try:
            engine = self._make_engine()
            self._check_at_start(engine)
            if self._begins_to_serve():
                self.started.set_result(None)
                with frozen_heap() if self._freezes_heap else contextlib.nullcontext():
                    self._serve(engine)
        except BaseException as error:
            if self.started.done():
                _log.critical("the engine is dead\n%s", _story(error))
                _released(error)
            else:  # `start` raises it, and its reader wants to know where it comes from
                traceback.clear_frames(error.__traceback__)
            self.error = error
            with self._condition:
                self.phase = "dead"
        try:
            self._end(engine)
        except BaseException as error:  # such as a device that is gone; whoever waits has to be told all the same
            _log.critical("the engine did not end as it should\n%s", _story(error))
            self.error = self.error or _released(error)
            for served in self._served.values():
                served.stream.fail(self._refusal())
        del engine  # before anybody learns of the end, and measures memory
        self.ended.set_result(None)
        if not self.started.done():
            self.started.set_exception(self.error or self._refusal())

    def _begins_to_serve(self) -> bool:
        with self._condition:
            if self.phase == "starting":  # else it was told to stop meanwhile
                self.phase = "serving"
            return self.phase == "serving"

    def _check_at_start(self, engine: ServedEngine) -> None:
        is_done = engine.settings.canary == "start"  # by the engine itself
        if self._canary == "off" or is_done or engine.stats().method == "plain":
            return
        pieces = engine.canary_steps()
        while self.phase == "starting":
            try:
                next(pieces)
            except StopIteration as done:
                report: CanaryReport = done.value
                self.last_report = report
                require_sound(report)
                return
        pieces.close()

    def _serve(self, engine: ServedEngine) -> None:
        while True:
            for _ in range(self._await_commands(is_idle=not engine.has_unfinished() and not self._checks)):
                self._commands.popleft().run(engine)  # one at a time: where one raises, the others get refused
            if self.phase == "draining" and not self._goes_on(engine):
                return
            self._advance_checks()
            if engine.has_unfinished():
                self._step(engine)

    def _await_commands(self, *, is_idle: bool) -> int:
        """How many commands wait; with nothing else to do, waits for one."""
        with self._condition:
            if is_idle:
                self._condition.wait_for(lambda: self._commands or self.phase != "serving")
            return len(self._commands)

    def _goes_on(self, engine: ServedEngine) -> bool:
        return self._drains and time.monotonic() < self._deadline_s and engine.has_unfinished()

    def _step(self, engine: ServedEngine) -> None:
        try:
            deltas = engine.step()
        except Exception as error:
            self._recover(engine, error)
            return
        self._num_failures = 0
        for delta in deltas:
            self._deliver(engine, delta)

    def _recover(self, engine: ServedEngine, error: Exception) -> None:
        """End the requests of a failed step; what they got before is theirs.

        One that ended in it is no longer among them: the next step returns its last delta.
        """
        self._num_failures += 1
        _log.error(
            "a step failed, %d of at most %d in a row\n%s", self._num_failures, self._most_failures, _story(error)
        )
        if self._num_failures >= self._most_failures:
            raise error
        _released(error)
        for name in engine.running_ids():
            engine.fail(name, error)
            self._close(engine, name)

    def _deliver(self, engine: ServedEngine, delta: RequestDelta) -> None:
        served = self._served.get(delta.request_id)
        if served is None:
            return
        served.num_tokens += len(delta.token_ids)
        served.num_characters += len(delta.text)
        is_read = served.stream.put(delta)
        if delta.finish_reason is not None:
            del self._served[delta.request_id]
        elif not is_read:
            del self._served[delta.request_id]
            engine.abort(delta.request_id)

    def _add(self, engine: ServedEngine, submission: Submission, stream: DeltaStream) -> None:
        if stream.is_abandoned:
            return
        try:
            self._close_ended(engine, submission.request_id)
            name = engine.add_request(
                submission.prompt_ids,
                submission.sampling,
                submission.request_id,
                priority=submission.priority,
                timeout_s=submission.timeout_s,
                cache_salt=submission.cache_salt,
            )
        except Exception as error:  # of this request alone, whatever it is
            if not isinstance(error, PacelineError):
                _log.error("a request could not be added\n%s", _story(error))
            stream.fail(_released(error))
            return
        self._served[name] = _Served(stream)

    def _drop(self, engine: ServedEngine, stream: DeltaStream) -> None:
        for name, served in list(self._served.items()):
            if served.stream is stream:
                del self._served[name]
                engine.abort(name)

    def _abort(self, engine: ServedEngine, name: str) -> None:
        engine.abort(name)
        self._close(engine, name)

    def _close_ended(self, engine: ServedEngine, name: str | None) -> None:
        """A request that ended in a step that failed may still wait for its last delta when its id is used again."""
        if name is None or name not in self._served:
            return
        try:
            engine.result(name)
        except RequestError:
            return  # it runs, and the engine refuses the id
        self._close(engine, name)

    def _close(self, engine: ServedEngine, name: str) -> None:
        """Give a request that was ended between steps what its stream has not got, and the reason."""
        served = self._served.pop(name, None)
        if served is None:
            return
        result = engine.result(name)
        logprobs = None if result.logprobs is None else result.logprobs[served.num_tokens :]
        served.stream.put(
            RequestDelta(
                name,
                result.token_ids[served.num_tokens :],
                result.text[served.num_characters :],
                result.finish_reason,
                None,
                logprobs,
            )
        )

    def _advance_checks(self) -> None:
        if not self._checks:
            return
        check = self._checks[0]
        try:
            next(check.pieces)
            return
        except StopIteration as done:
            report: CanaryReport = done.value
            self.last_report = report
            if not report.has_passed:
                _log.error("the canary found a fault: %s", "; ".join(report.faults()))
            check.answer.set_result(report)
        except Exception as error:
            check.answer.set_exception(_released(error))
        del self._checks[0]

    def _end(self, engine: ServedEngine | None) -> None:
        """Let go of everything: nobody waits for an answer, no request is left, no memory either."""
        with self._condition:
            self.phase = "dead" if self.phase == "dead" else "stopped"
            self._commands, commands = deque(), self._commands
        for command in commands:
            command.refuse(self._refusal())
        checks, self._checks = self._checks, []
        for check in checks:
            check.answer.set_exception(self._refusal())
        for check in checks:
            check.pieces.close()
        if engine is None:
            return
        for name, served in list(self._served.items()):
            if self.phase == "stopped":
                self._abort(engine, name)
            else:
                served.stream.fail(self._refusal())
        self._served.clear()
        engine.close()


def _story(error: BaseException) -> str:
    """What a log says of an error. Text, since a handler may keep records, and with them the frames of an error."""
    return "".join(traceback.format_exception(error)).rstrip()


def _released(error: E) -> E:
    """An error without the frames that it came through: a caller may keep it, and the engine must be able to go.

    Emptying the frames would not do, since each knows the one that called it. The log has been told of them.
    """
    chained: BaseException | None = error
    seen: set[int] = set()
    while chained is not None and id(chained) not in seen:  # an error may be its own cause
        seen.add(id(chained))
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return error
