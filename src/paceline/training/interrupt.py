"""Stopping at a step border: the first Ctrl-C or TERM asks, a later one insists, and a watchdog bites."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SAME_REQUEST_S = 1.0  # `timeout` signals the process and its group, a terminal the group and its shell: a few ms apart
_WATCHDOG_S = 1800.0  # from the request to the end of the step, of an evaluation that is due, and of what is saved

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopRequest:
    """While active, turns SIGINT and SIGTERM into `is_set`; one that follows later raises KeyboardInterrupt at once.

    Signals within a second of the first are the same request: it often arrives twice, and taking the echo for
    insistence would lose the checkpoint that the first one asked for.

    Who asks does not wait for ever: a process that has not left this context some time after the request, because it
    waits for a rank or a disk that does not answer, says where it hangs and ends. Checkpoints are whole at any moment.

    Args:
        watchdog_s: how long that may take.
    """

    def __init__(self, *, watchdog_s: float = _WATCHDOG_S) -> None:
        self.is_set = False
        self._watchdog_s = watchdog_s
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
        if self.is_set:
            faulthandler.cancel_dump_traceback_later()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.is_set:
            self.is_set, self._asked_s = True, now
            if sys.__stderr__ is not None:  # the one with a descriptor, whatever stands in for it
                # A timer in C: it needs neither this thread, which may hang, nor the interpreter's lock.
                faulthandler.dump_traceback_later(self._watchdog_s, exit=True, file=sys.__stderr__)
        elif now - self._asked_s > _SAME_REQUEST_S:
            raise KeyboardInterrupt
