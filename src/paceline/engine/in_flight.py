"""Passes that were launched, in order, until their results are read. No device is touched here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.running import RunningRequest
from paceline.engine.step import HostStep, StepOutput


@dataclass(frozen=True, eq=False)
class Launched:
    """One pass whose results are wanted. They belong to requests, whatever slot these have by the time they are read.

    Attributes:
        number: passes launched so far, this one included.
        requests: in the order of the results.
        epochs: each request's at launch.
        num_drawn: drafts planned behind it, for each request.
        is_decode: a decode step; else the last chunk of one request's text.
        output: on the device.
        started_s: before it was put together, on the performance counter.
    """

    number: int
    requests: Sequence[RunningRequest]
    epochs: Sequence[int]
    num_drawn: Sequence[int]
    is_decode: bool
    output: StepOutput
    started_s: float

    def read(self) -> list[tuple[RunningRequest, HostStep, int]]:
        """Wait for the results and give those that still count: request, its part of the step, drafts planned behind.

        What belongs to a request that has ended, or whose state on the device became void, is dropped.
        """
        steps = self.output.to_host()
        parts = zip(self.requests, self.epochs, steps, self.num_drawn, strict=True)
        return [
            (request, step, num_drawn)
            for request, epoch, step, num_drawn in parts
            if request.epoch == epoch and request.finish_reason is None
        ]


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
        is_decode: bool,
        started_s: float,
    ) -> None:
        """Remember the pass that was launched last, as its results are wanted."""
        epochs = [request.epoch for request in requests]
        self._unread.append(Launched(self.last, requests, epochs, num_drawn, is_decode, output, started_s))

    def pop(self) -> Launched:
        """The oldest pass whose results were not read."""
        return self._unread.popleft()

    def drop(self) -> None:
        """Forget all results: what they belong to is done again."""
        self._unread.clear()


def milliseconds_since(started_s: float) -> float:
    """Wall time since a moment of the performance counter."""
    return (time.perf_counter() - started_s) * 1e3
