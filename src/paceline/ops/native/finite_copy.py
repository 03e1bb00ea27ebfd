"""A copy of a weight that knows whether everything that arrived is finite, in one pass over memory.

Looking at half a gigabyte that was just copied costs a tenth of a load in float32, even piece by piece while it is in
the processor's cache; looking at it on its way costs nothing, as a copy waits for memory.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from paceline.ops.native.build import library, loaded_library

_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TARGET_KINDS: Final = (torch.float32, torch.bfloat16)


def can_copy(to: Tensor, stored: Tensor) -> bool:
    """Whether this copy can be native: contiguous tensors of one shape on a CPU that has the library."""
    return (
        to.dtype in _TARGET_KINDS
        and stored.dtype in _KINDS
        and to.device.type == stored.device.type == "cpu"
        and to.shape == stored.shape
        and to.is_contiguous()
        and stored.is_contiguous()
        and library() is not None
    )


def copy_if_finite(to: Tensor, stored: Tensor) -> bool:
    """Fill `to` with what `copy_` would fill it with, and say whether all of that is finite.

    Args:
        to: float32 or bf16; is filled even where the answer is no. Autograd does not see it.
        stored: float32, bf16 or float16, a pair that `can_copy`.
    """
    is_finite = ctypes.c_int32(0)
    loaded_library().paceline_copy_if_finite(
        stored.data_ptr(),
        _KINDS[stored.dtype],
        to.data_ptr(),
        _KINDS[to.dtype],
        to.numel(),
        ctypes.addressof(is_finite),
        torch.get_num_threads(),
    )
    return bool(is_finite.value)
