"""Stopping at a step border: the first Ctrl-C or TERM asks, a later one insists."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SAME_REQUEST_S = 1.0  # `timeout` signals the process and its group, a terminal the group and its shell: a few ms apart

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopRequest:
    """While active, turns SIGINT and SIGTERM into `is_set`; one that follows later raises KeyboardInterrupt at once.

    Signals within a second of the first are the same request: it often arrives twice, and taking the echo for
    insistence would lose the checkpoint that the first one asked for.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._asked_s = 0.0
        self._previous: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.is_set:
            self.is_set, self._asked_s = True, now
        elif now - self._asked_s > _SAME_REQUEST_S:
            raise KeyboardInterrupt
