"""How long a pass took on its device, asked once it is known to be done."""

from __future__ import annotations

import time

import torch


class PassTimer:
    """Times what is queued between its making and `stop`; on a CPU that is done when it is queued.

    Args:
        device: where the pass runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        self._started_s = time.perf_counter()
        self._host_ms = 0.0

    def stop(self) -> None:
        """Everything that counts is queued."""
        self._host_ms = (time.perf_counter() - self._started_s) * 1e3
        if self._events is not None:
            self._events[1].record()

    def milliseconds(self) -> float:
        """Device time; waits for it on a GPU, so ask when results of a later pass have come."""
        if self._events is None:
            return self._host_ms
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))
