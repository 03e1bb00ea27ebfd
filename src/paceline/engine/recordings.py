"""Work that is done again from a recording: a CUDA graph on a GPU, the work itself in tests.

A piece of work of one shape (`Recorded`) runs as it is the first time, which compiles what there is to compile; the
second time it is captured, which runs nothing, and played back from then on.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.engine.counters import Counters
from paceline.errors import ConfigError
from paceline.ops.dispatch import HAS_TRITON

_log = logging.getLogger(__name__)


class Recording(Protocol):
    """Work that can be done again."""

    def replay(self) -> Any:
        """Do it on what its inputs hold now; the result's tensors are written again by the next call."""
        ...


@dataclass(frozen=True)
class Repeated:
    """Work that is simply done again: what a recording is on a CPU, for tests."""

    body: Callable[[], Any]

    def replay(self) -> Any:
        """Do it."""
        return self.body()


class CudaRecording:
    """A CUDA graph.

    Args:
        body: the work; it was done before with the same shapes.
        pool: memory that all recordings share, a handle of torch's.
        device: where.
    """

    def __init__(self, body: Callable[[], Any], pool: Any, device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        was_enabled = gc.isenabled()
        gc.disable()  # memory that is freed meanwhile would break the capture
        try:
            with torch.cuda.stream(stream):
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._output = body()
                finally:
                    self._graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()

    def replay(self) -> Any:
        """Play it back on the current stream."""
        self._graph.replay()
        return self._output


Record = Callable[[Callable[[], Any]], Recording]


class Recorded:
    """Work of one shape: the first time it is done as it is, from then on from a recording.

    Args:
        body: the work.
        name: for whoever reads the log.
    """

    def __init__(self, body: Callable[[], Any], name: str) -> None:
        self._body, self._name = body, name
        self._recording: Recording | None = None
        self._was_done = self._cannot_be_recorded = False

    @property
    def is_recorded(self) -> bool:
        """Whether it was played back the last time it was done."""
        return self._recording is not None

    def do(self, record: Record, counters: Counters) -> Any:
        """Do it."""
        if self._recording is None and self._was_done and not self._cannot_be_recorded:
            try:
                self._recording = record(self._body)
                counters.num_recordings += 1
            except Exception as error:  # whatever it is, the work itself can still be done
                self._cannot_be_recorded = True
                counters.num_failed_recordings += 1
                _log.error("%s cannot be recorded: %s", self._name, error)
        self._was_done = True
        return self._body() if self._recording is None else self._recording.replay()


def make_recorder(device: torch.device, *, wanted: bool | None) -> Record | None:
    """What captures the steps of an engine, all into one pool of memory; None where they are not recorded.

    Args:
        device: of the models.
        wanted: None is wherever it is possible.

    Raises:
        ConfigError: it was asked for where there are no graphs.
    """
    if device.type != "cuda" or not HAS_TRITON:
        if wanted:
            raise ConfigError(f"cuda_graphs is on; on {device.type} without a GPU and Triton there are none")
        return None
    if wanted is False:
        return None
    pool = torch.cuda.graph_pool_handle()
    return lambda body: CudaRecording(body, pool, device)
