"""Elementwise functions in float32 that give a value the same bits wherever in a tensor it lies.

torch's own sigmoid, SiLU and softplus compute the last few values of a tensor by another instruction sequence than the
rest, so a row's bits depend on how many rows follow. `exp`, `log1p`, `tanh` and the four operations do not have this
fault; the functions here are made of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.dispatch import needs_gradient

_SOFTPLUS_IS_LINEAR_ABOVE = 20.0


def widen(x: Tensor) -> Tensor:
    """The precision that operations compute in: float32, or float64 for what came in it."""
    return x if x.dtype == torch.float64 else x.float()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of any float dtype, in float32."""
    wide = widen(x)
    if needs_gradient(wide):  # far below zero, the gradient of the form below is 0 * inf
        return torch.sigmoid(wide)
    return torch.exp(-wide).add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """ln(1 + exp(x)) of any float dtype, in float32; x itself above 20."""
    wide = widen(x)
    if needs_gradient(wide):
        return functional.softplus(wide, threshold=_SOFTPLUS_IS_LINEAR_ABOVE)
    return torch.where(wide > _SOFTPLUS_IS_LINEAR_ABOVE, wide, torch.exp(wide).log1p_())
