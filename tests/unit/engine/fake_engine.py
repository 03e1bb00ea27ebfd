"""An engine without models for tests of what runs one: counts up from the prompt, fails where it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from paceline.engine.canary_report import CanaryReport
from paceline.engine.engine import EngineSettings
from paceline.engine.request import RequestDelta, RequestResult, SamplingParameters
from paceline.errors import RequestError
from paceline.trace.step import RequestTrace

SOUND = CanaryReport(9, 63, (), 0, 70, 70)
FAULTY = CanaryReport(9, 63, ("draft 2 of step 1 was 7, the plain text",), 0, 70, 70)


@dataclass
class FakeRequest:
    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters
    expires_s: float
    token_ids: list[int] = field(default_factory=list)


class FakeEngine:
    """Each step gives each of the first `max_num_seqs` requests one token: prompt length, then one more, and so on.

    Args:
        max_num_seqs: requests in slots.
        step_s: seconds per step.
        fail_step: is given the number of the step, from 0, before anything happens in it; may raise.
        fail_late: the same, behind the tokens of the step and before they are handed out; the next step has them.
        report: of the canary, which takes 5 pieces.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 2,
        step_s: float = 0.0,
        fail_step: Callable[[int], None] = lambda _step: None,
        fail_late: Callable[[int], None] = lambda _step: None,
        report: CanaryReport = SOUND,
        **settings: Any,
    ) -> None:
        self.settings = EngineSettings(**settings)
        self.max_num_seqs, self.step_s, self.report = max_num_seqs, step_s, report
        self.fail_step, self.fail_late = fail_step, fail_late
        self.waiting: dict[str, FakeRequest] = {}
        self.running: dict[str, FakeRequest] = {}
        self.results: dict[str, RequestResult] = {}
        self.order: list[str] = []
        self.deltas: list[RequestDelta] = []
        self.num_steps = self.num_names = self.num_checks = 0
        self.is_closed = False
        self.threads = {threading.get_ident()}

    def _here(self) -> None:
        self.threads.add(threading.get_ident())
        assert not self.is_closed

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
        self._here()
        if not prompt_ids:
            raise RequestError("the prompt is empty")
        name = request_id or f"fake-{self.num_names}"
        self.num_names += 1
        if name in self.waiting | self.running:
            raise RequestError(f"a request named {name!r} is still running")
        expires_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        self.waiting[name] = FakeRequest(tuple(prompt_ids), sampling, expires_s)
        self.order.append(f"{name} {priority}")
        return name

    def step(self) -> list[RequestDelta]:
        self._here()
        time.sleep(self.step_s)
        number, self.num_steps = self.num_steps, self.num_steps + 1
        while self.waiting and len(self.running) < self.max_num_seqs:
            name = next(iter(self.waiting))
            self.running[name] = self.waiting.pop(name)
        self.fail_step(number)
        for name, request in list(self.running.items()):
            token = len(request.prompt_ids) + len(request.token_ids)
            request.token_ids.append(token)
            is_last = len(request.token_ids) == request.sampling.max_tokens
            is_late = time.monotonic() > request.expires_s
            reason = "length" if is_last else "abort" if is_late else None
            self.deltas.append(RequestDelta(name, (token,), f"{token} ", reason))
            if reason is not None:
                self._finish(name, reason)
        self.fail_late(number)
        deltas, self.deltas = self.deltas, []
        return deltas

    def _finish(self, name: str, reason: Any, error: str | None = None) -> None:
        request = self.running.pop(name, None) or self.waiting.pop(name, None)
        if request is None:
            return
        self.results[name] = RequestResult(
            request_id=name,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(request.token_ids),
            text="".join(f"{token} " for token in request.token_ids),
            finish_reason=reason,
            stop_reason=None,
            trace=RequestTrace(name, len(request.prompt_ids), method="fake"),
            error=error,
        )

    def _end(self, name: str, reason: Any, error: str | None = None) -> None:
        if name in self.running or name in self.waiting:
            self._finish(name, reason, error)
            self.deltas = [delta for delta in self.deltas if delta.request_id != name]

    def abort(self, request_id: str) -> None:
        self._here()
        self._end(request_id, "abort")

    def fail(self, request_id: str, error: Exception) -> None:
        self._here()
        self._end(request_id, "error", f"{type(error).__name__}: {error}")

    def running_ids(self) -> tuple[str, ...]:
        return tuple(self.running)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.deltas)

    def result(self, request_id: str) -> RequestResult:
        self._here()
        if request_id not in self.results:
            raise RequestError(f"request {request_id!r} is not known")
        return self.results[request_id]

    def take_result(self, request_id: str) -> RequestResult:
        return self.results.pop(request_id)

    def stats(self) -> Any:
        self._here()
        return SimpleNamespace(method="fake", num_steps=self.num_steps, num_running=len(self.running))

    def clear_prefix_cache(self) -> int:
        self._here()
        return 3

    def canary_steps(self) -> Generator[None, None, CanaryReport]:
        self._here()
        for _ in range(5):
            self.num_checks += 1
            yield
        return self.report

    def close(self) -> None:
        self._here()
        self.is_closed = True
