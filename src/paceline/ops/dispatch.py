"""Which implementation of an operation runs: its reference, or what is beside it for a GPU or a CPU.

This file alone imports Triton and hands out `kernel`, `tl` and `triton`, so every operation's file can be imported
where Triton is not installed; its launchers cannot be called there. Whether Triton compiles or interprets is its own
business (`TRITON_INTERPRET`, read when it is first imported).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
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
    "DEPENDENT_LAUNCH_RULES",
    "HAS_TRITON",
    "allow_dependent_launch",
    "choose",
    "dependent_launch",
    "implementations",
    "kernel",
    "needs_gradient",
    "next_begins",
    "report",
    "tl",
    "triton",
]

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])
# (operation, device type) to implementation: the only state, kept so that a choice is reported once and can be listed.
_chosen: dict[tuple[str, str], str] = {}
_LEAST_CAPABILITY = (9, 0)  # of a GPU that can launch a kernel before the one ahead of it has ended
# When a launch lets the one behind it begin, as kernels' constant BEGINS has it: at once, behind its own wait for the
# one ahead, or when its products are summed. By rule: launches of few programs, and all others.
_AT_ONCE, _AFTER_WAIT, _LATE = 1, 2, 3
DEPENDENT_LAUNCH_RULES = {
    "at-once": (_AT_ONCE, _AT_ONCE),
    "after-wait": (_AFTER_WAIT, _AFTER_WAIT),
    "mixed": (_AT_ONCE, _AFTER_WAIT),
    "late": (_LATE, _LATE),
}
_DEFAULT_RULE = "after-wait"
_MOST_EARLY_ROWS = 16  # of a pass: steps of 128 rows took 4 % longer with early launches (`benchmarks/gpu_steps`)
_dependent_launch_rule: str | None = None
_most_early_rows = _MOST_EARLY_ROWS


def kernel(function: Callable[..., None]) -> Any:
    """Make a Triton kernel of a function; without Triton, the function as it is, which nothing calls."""
    return triton.jit(function) if HAS_TRITON else function


def choose(
    name: str,
    tensor: Tensor,
    reference: _Function,
    triton_version: _Function,
    native_version: _Function | None = None,
) -> _Function:
    """Pick the kernel for tensors on a GPU where Triton is installed, else the reference; log each new choice once.

    Args:
        name: of the operation, for the report.
        tensor: says on which device the operation will run.
        reference: the definition, in torch.
        triton_version: launcher of the kernel, called the same way. It has no gradients.
        native_version: the call of the native library, for tensors on a CPU; None where there is none for these.
    """
    device = tensor.device.type
    run, version = reference, "reference"
    if HAS_TRITON and device == "cuda":
        run, version = triton_version, "triton"
    elif native_version is not None and device == "cpu":
        run, version = native_version, "native"
    if _chosen.get((name, device)) != version:
        _report(name, device, version)
    return run


def implementations() -> dict[str, str]:
    """What has run so far: `operation on device type` to "triton", "native", "reference" or more exactly, sorted."""
    return {f"{name} on {device}": version for (name, device), version in sorted(_chosen.items())}


def tensor_descriptor(tensor: Tensor, block: Sequence[int]) -> Any:
    """What a kernel loads blocks of a contiguous tensor by, in one request each; its rows begin at 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, list(block))


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd will want this operation's graph, which kernels do not make."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def allow_dependent_launch(how: str, most_rows: int = _MOST_EARLY_ROWS) -> None:
    """Settle `dependent_launch` for the process; whoever sets up an engine or a measurement asks the environment.

    Args:
        how: "off"; one of `DEPENDENT_LAUNCH_RULES`; or "on", for the one that measured best.
        most_rows: of a pass whose launches may begin early.
    """
    global _dependent_launch_rule, _most_early_rows
    assert how in ("off", "on", *DEPENDENT_LAUNCH_RULES), how
    _dependent_launch_rule = {"off": None, "on": _DEFAULT_RULE}.get(how, how)
    _most_early_rows = most_rows


def dependent_launch(num_rows: int) -> bool:
    """Whether kernels that can are launched while the one ahead of them still runs (`launch_pdl`, `USE_PDL`).

    Such a kernel calls `tl.extra.cuda.gdc_launch_dependents()`, most when `next_begins` says, and `gdc_wait()` before
    it writes, and before it reads what any kernel of the kind wrote. Several of them may be resident at once, each
    waiting for the one ahead; a kernel of another kind, such as torch's, ends before the next begins. So weights,
    tables, rows of a step and keys of earlier passes may be read before the wait where two kernels of another kind lie
    between. Never while Triton interprets.

    Args:
        num_rows: of the pass.
    """
    return _dependent_launch_rule is not None and num_rows <= _most_early_rows and _can_launch_early()


def next_begins(*, is_small: bool) -> int:
    """When a launch that may begin early lets the next one begin: the constant BEGINS of its kernel, 1 to 3.

    Args:
        is_small: a launch of few programs, which leaves room for what waits.
    """
    return DEPENDENT_LAUNCH_RULES[_dependent_launch_rule or _DEFAULT_RULE][0 if is_small else 1]


@functools.cache
def _can_launch_early() -> bool:
    """Asked at every launch of a kernel, and the same for all."""
    if not HAS_TRITON or triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= _LEAST_CAPABILITY


def report(name: str, device: str, version: str) -> None:
    """Note what carries out an operation that has more than a reference and a kernel; each new choice is logged once.

    Args:
        name: of the operation.
        device: type of the device.
        version: what runs, as a report says it.
    """
    if _chosen.get((name, device)) != version:
        _report(name, device, version)


def _report(name: str, device: str, version: str) -> None:
    _chosen[name, device] = version
    if device == "cuda" and version == "reference":
        _log.warning("%s runs without its kernel: Triton is not installed", name)
    else:
        _log.debug("%s on %s: %s", name, device, version)
