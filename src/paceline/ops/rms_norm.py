"""Root-mean-square norm: x * w / sqrt(mean(x^2) + eps), statistics in float32, returned in x's dtype. D width."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The definition: everything in float32, one rounding at the end."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight_D.float()).to(x.dtype)


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Normalise the last dimension to unit root mean square and scale it.

    Args:
        x: [..., D], any float dtype.
        weight_D: gain, plain (not `1 + w`); cast to x's dtype.
        eps: added to the mean square.
    Returns:
        [..., D] in x's dtype. torch's fused operation keeps the statistics in float32 for 16-bit inputs.
    """
    weight = weight_D if weight_D.dtype == x.dtype else weight_D.to(x.dtype)
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if x.device.type == "cpu" and not needs_gradient:
        return _by_layer_norm(x, weight, eps)
    y = functional.rms_norm(x, weight.shape, weight, eps)
    # Autocast may return float32 from a norm and so widen the whole residual stream.
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _by_layer_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The same function through torch's layer norm, which on a CPU is one kernel where its RMS norm is ten.

    The mean of (x, -x) is 0 and its variance the mean square of x.
    """
    width = x.shape[-1]
    y = functional.layer_norm(torch.cat((x, -x), dim=-1), (2 * width,), None, None, eps)
    return y[..., :width] * weight_D
