"""Work that a step does beside its main line: launched on a stream of its own, waited for before its results are read.

A recording takes it along: the side joins the capture by waiting for it, and the end of the work is a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A second stream of a GPU; elsewhere everything simply happens in order.

    What the side writes may be read, and what it reads may be written or freed, only after `join`. Memory that it
    allocates for itself is used again by itself alone, whose next work waits for all that was launched before it.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: tuple[Tensor, ...] = ()

    @contextmanager
    def forked(self, *held: Tensor) -> Iterator[None]:
        """Launch what is in here beside what follows it, up to `join`.

        Args:
            held: tensors that it reads. They are kept until then: once freed, their memory could be given to what runs
                beside it.
        """
        if self._stream is None:
            yield
            return
        self._held += held
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what follows wait for the side; without anything there, nothing happens."""
        if self._stream is None or not self._held:
            return
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._held = ()
