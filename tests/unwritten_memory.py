"""Memory that nobody has written holds NaN in every test, not what lay there before.

What `torch.empty` gives is zeros or an older tensor's values on most days, so a test that forgets to fill a parameter,
or an operation that reads a row which it has not written, passes on most days. Spoilt, it fails on all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

LARGEST = 2**20  # elements; models larger than this are counted in tests, never computed with, and take no memory


def spoil() -> None:
    """Change torch's allocating functions: on a CPU their tensors are NaN, the largest integer, or True throughout."""
    with torch.device("meta"):  # it lists the functions that obey it when it is first used; these are to be in the list
        assert torch.empty(1).is_meta
    for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (Tensor, ("new_empty",))):
        for name in names:
            allocate = getattr(owner, name)
            if not hasattr(allocate, "spoils"):
                setattr(owner, name, _spoiling(allocate))


def _spoiling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def spoilt(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        # Tensors of other kinds (fake ones, say) have no memory, and `out` has an owner who may have written it. A test
        # that watches every operation would see this one, too.
        is_ours = tensor.is_cpu and type(tensor) is Tensor and "out" not in kwargs
        if is_ours and tensor.numel() <= LARGEST and _get_current_dispatch_mode() is None:
            # some 150 times a step of an engine: what need not be asked or made is not
            if tensor.requires_grad:
                with torch.no_grad():
                    tensor.fill_(_nonsense(tensor.dtype))
            else:
                tensor.fill_(_nonsense(tensor.dtype))
        return tensor

    spoilt.spoils = True  # type: ignore[attr-defined]
    return spoilt


@functools.cache
def _nonsense(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
