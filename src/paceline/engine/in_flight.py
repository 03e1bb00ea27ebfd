"""Passes that were launched, in order, until their results are read. No device is touched here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.engine.running import RunningRequest
from paceline.engine.step import HostStep, SentOutput, StepOutput
from paceline.engine.step_kind import StepSize
from paceline.errors import EngineFaultError


class Ahead(NamedTuple):
    """How far the device may be ahead of the host with one request.

    Attributes:
        num_passes: unread ones that give it a token at least.
        num_rows: tokens that they may give it, at most.
        num_waiting: drafts that wait for its next step, at most.
    """

    num_passes: int
    num_rows: int
    num_waiting: int


@dataclass(frozen=True, eq=False)
class Launched:
    """One pass whose results are wanted. They belong to requests, whatever slot these have by the time they are read.

    Attributes:
        number: passes launched so far, this one included.
        requests: in the order of the results.
        epochs: each request's at launch.
        num_drawn: drafts planned behind it, for each request.
        num_rows: tokens that it may give each request, at most.
        is_decode: a decode step; else the last chunk of one request's text.
        output: on its way to the host.
        started_s: before it was put together, on the performance counter.
        size: as its cost goes; None where that says nothing.
    """

    number: int
    requests: Sequence[RunningRequest]
    epochs: Sequence[int]
    num_drawn: Sequence[int]
    num_rows: int
    is_decode: bool
    output: SentOutput
    started_s: float
    size: StepSize | None = None

    def is_step_of(self, requests: Sequence[RunningRequest]) -> bool:
        """Whether it is a decode step of these very requests, and what it brings counts for all of them."""
        if not self.is_decode or self.requests != requests:
            return False
        return self.epochs == [request.epoch for request in requests]

    def ahead(self) -> list[Ahead]:
        """How far the device may be ahead with each request, if nothing else is unread and it gives tokens."""
        # Few numbers are drawn in one pass, and what says the same is made once.
        each = {num_drawn: Ahead(1, self.num_rows, num_drawn) for num_drawn in set(self.num_drawn)}
        return [each[num_drawn] for num_drawn in self.num_drawn]

    def wait(self) -> None:
        """Wait until the results have come."""
        self.output.packed.wait()

    def read(self) -> list[tuple[RunningRequest, HostStep, int]]:
        """Wait for the results and give those that still count: request, its part of the step, drafts planned behind.

        What belongs to a request that has ended, or whose state on the device became void, is dropped.

        Raises:
            EngineFaultError: host and device disagree on where a request stood.
        """
        wanted, is_decode = [], self.is_decode
        parts = zip(self.requests, self.epochs, self.output.read(), self.num_drawn, strict=True)
        for request, epoch, step, num_drawn in parts:
            if request.epoch != epoch or request.finish_reason is not None:
                continue
            wanted.append((request, step, num_drawn))
            if is_decode and step.position != request.num_cached:
                stands = "has ended" if step.position < 0 else f"stands at {step.position}"
                raise EngineFaultError(
                    f"request {request.request_id} {stands} on the device and stands at {request.num_cached} on the "
                    "host: a step committed something else than it said"
                )
        return wanted


class InFlight:
    """Numbers passes, and keeps those whose results are to be read.

    Attributes:
        last: number of the last pass launched.
    """

    def __init__(self) -> None:
        self.last = 0
        self._unread: deque[Launched] = deque()

    def __len__(self) -> int:
        return len(self._unread)

    def count(self) -> int:
        """Number one more pass, before it is launched."""
        self.last += 1
        return self.last

    def keep(
        self,
        requests: Sequence[RunningRequest],
        output: StepOutput,
        *,
        num_drawn: Sequence[int],
        num_rows: int,
        is_decode: bool,
        started_s: float,
        size: StepSize | None = None,
    ) -> None:
        """Remember the pass that was launched last, as its results are wanted, and send for them."""
        epochs = [request.epoch for request in requests]
        sent = output.send()
        self._unread.append(
            Launched(self.last, requests, epochs, num_drawn, num_rows, is_decode, sent, started_s, size)
        )

    def ahead(self, requests: Sequence[RunningRequest]) -> list[Ahead]:
        """How far the device may be ahead of the host with each of some requests."""
        if len(self._unread) == 1 and self._unread[0].is_step_of(requests):  # nearly every time
            return self._unread[0].ahead()
        found: dict[RunningRequest, Ahead] = {}
        for launched in self._unread:
            for request, epoch, alone in zip(launched.requests, launched.epochs, launched.ahead(), strict=True):
                if request.epoch != epoch:
                    continue
                # A resumed request's first pass gives it drafts and no token.
                gives = launched.is_decode or not request.is_resumed
                before = found.get(request)
                if before is None and gives:
                    found[request] = alone
                    continue
                num_passes, num_rows = (0, 0) if before is None else before[:2]
                found[request] = Ahead(num_passes + gives, num_rows + alone.num_rows * gives, alone.num_waiting)
        return [found.get(request) or Ahead(0, 0, request.num_waiting) for request in requests]

    def has_before(self, number: int) -> bool:
        """Whether results of a pass are unread that was launched before pass `number`."""
        return bool(self._unread) and self._unread[0].number < number

    def pop(self) -> Launched:
        """The oldest pass whose results were not read."""
        return self._unread.popleft()

    def drop(self) -> None:
        """Forget all results: what they belong to is done again."""
        self._unread.clear()


def milliseconds_since(started_s: float) -> float:
    """Wall time since a moment of the performance counter."""
    return (time.perf_counter() - started_s) * 1e3
