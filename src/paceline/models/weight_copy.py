"""How weights get from their files into a model."""

from __future__ import annotations

from torch import Tensor

from paceline.checkpoint import weights
from paceline.ops.native import finite_copy


def copy_weight(to: Tensor, stored: Tensor) -> bool:
    """Copy a tensor and say whether what arrived is finite, in the way that costs least here.

    Args:
        to: a parameter or rows of one.
        stored: the same shape, on the CPU.
    """
    if finite_copy.can_copy(to, stored):
        return finite_copy.copy_if_finite(to, stored)
    return weights.copy_if_finite(to, stored)
