"""Which implementation of an operation runs: its reference, or the Triton kernel beside it.

This file alone imports Triton and hands out `kernel`, `tl` and `triton`, so every operation's file can be imported
where Triton is not installed; its launchers cannot be called there. Whether Triton compiles or interprets is its own
business (`TRITON_INTERPRET`, read when it is first imported).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = tl = None

__all__ = [
    "HAS_TRITON",
    "allow_dependent_launch",
    "choose",
    "dependent_launch",
    "implementations",
    "kernel",
    "needs_gradient",
    "tl",
    "triton",
]

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])
# (operation, device type) to implementation: the only state, kept so that a choice is reported once and can be listed.
_chosen: dict[tuple[str, str], str] = {}
_LEAST_CAPABILITY = (9, 0)  # of a GPU that can launch a kernel before the one ahead of it has ended
_is_dependent_launch_allowed = False


def kernel(function: Callable[..., None]) -> Any:
    """Make a Triton kernel of a function; without Triton, the function as it is, which nothing calls."""
    return triton.jit(function) if HAS_TRITON else function


def choose(name: str, tensor: Tensor, reference: _Function, triton_version: _Function) -> _Function:
    """Pick the kernel for tensors on a GPU where Triton is installed, else the reference; log each new choice once.

    Args:
        name: of the operation, for the report.
        tensor: says on which device the operation will run.
        reference: the definition, in torch.
        triton_version: launcher of the kernel, called the same way. It has no gradients.
    """
    device = tensor.device.type
    takes_kernel = HAS_TRITON and device == "cuda"
    if (name, device) not in _chosen:
        _report(name, device, "triton" if takes_kernel else "reference")
    return triton_version if takes_kernel else reference


def implementations() -> dict[str, str]:
    """What has run so far: `operation on device type` to "triton" or "reference", sorted."""
    return {f"{name} on {device}": version for (name, device), version in sorted(_chosen.items())}


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd will want this operation's graph, which kernels do not make."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def allow_dependent_launch(is_allowed: bool) -> None:
    """Settle `dependent_launch` for the process; whoever sets up an engine or a measurement asks the environment."""
    global _is_dependent_launch_allowed
    _is_dependent_launch_allowed = is_allowed


def dependent_launch() -> bool:
    """Whether kernels that can are launched while the one ahead of them still runs (`launch_pdl`, `USE_PDL`).

    Such a kernel calls `tl.extra.cuda.gdc_wait()` before it reads anything that the one ahead wrote, and before it
    writes at all. It calls `gdc_launch_dependents()` after that wait: so whoever runs early knows that everything but
    the last kernel has ended, and may read what is older before its own wait. Never while Triton interprets.
    """
    if not (_is_dependent_launch_allowed and HAS_TRITON) or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _LEAST_CAPABILITY


def _report(name: str, device: str, version: str) -> None:
    _chosen[name, device] = version
    if device == "cuda" and version == "reference":
        _log.warning("%s runs without its kernel: Triton is not installed", name)
    else:
        _log.debug("%s on %s: %s", name, device, version)
