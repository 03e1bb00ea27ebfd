"""Moving small tensors between host and device without making either wait; on a CPU nothing moves at all."""

from __future__ import annotations

import torch
from torch import Tensor


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on a device now is recorded into a graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor of the host to a device, behind what is queued there.

    The host's memory is pinned for that, and not given to anybody else before the copy is done, whatever becomes of
    `tensor`: torch keeps pinned memory back until the copies from it have ended.

    Args:
        tensor: on the CPU.
        device: where to.
    """
    if device.type != "cuda":
        return tensor.to(device)
    assert not is_capturing(device), "a recorded pass would read memory of the host that is somebody else's by then"
    return tensor.pin_memory().to(device, non_blocking=True)


def write_to(target: Tensor, tensor: Tensor) -> None:
    """Write a tensor of the host into one that stays, behind what is queued on its device.

    Args:
        target: on any device.
        tensor: on the CPU, of the same shape; as for `to_device`, it may be given up at once.
    """
    assert not is_capturing(target.device), "as for `to_device`"
    target.copy_(tensor.pin_memory() if target.device.type == "cuda" else tensor, non_blocking=True)


class HostCopy:
    """A copy of a device's tensor on its way to the host.

    Args:
        tensor: on any device; what is queued there when this is made is what counts.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._tensor = tensor
            return
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensor.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> Tensor:
        """Wait until it has arrived, not for what was queued behind it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
