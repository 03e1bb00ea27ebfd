"""Working memory of native calls, kept from call to call.

A thread's calls run one after the other and leave nothing in it that anybody reads later, so one buffer does for all of
them. Engines in different threads have buffers of their own.
"""

from __future__ import annotations

import threading
from typing import Final

import torch
from torch import Tensor

_MOST_KEPT: Final = 2**24  # numbers: long prompts of a wide model get memory of their own


class _OfThread(threading.local):
    buffer: Tensor | None = None


_kept = _OfThread()


def scratch(size: int) -> Tensor:
    """At least so many numbers of bf16, whatever they are; good until this thread asks again."""
    if size > _MOST_KEPT:
        return torch.empty(size, dtype=torch.bfloat16)
    held = _kept.buffer
    if held is None or held.numel() < size:
        held = _kept.buffer = torch.empty(size, dtype=torch.bfloat16)
    return held
