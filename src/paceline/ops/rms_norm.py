"""Root-mean-square norm: x * w / sqrt(mean(x^2) + eps), statistics in float32, returned in x's dtype.

On a CPU it goes through torch's layer norm, one kernel where its RMS norm is ten: over (x, -x) the mean is 0 and the
variance the mean square of x. D width, C copies.
"""

from __future__ import annotations

from typing import NamedTuple

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
        mirrored = torch.stack((x, -x), dim=-2)
        return torch.layer_norm(mirrored, mirrored.shape[-2:], weight.expand(2, -1), None, eps).select(-2, 0)
    y = functional.rms_norm(x, weight.shape, weight, eps)
    # Autocast may return float32 from a norm and so widen the whole residual stream.
    return y if y.dtype == x.dtype else y.to(x.dtype)


class MirroredGain(NamedTuple):
    """A gain for `rms_norm_mirrored`: itself, once per copy, and the signs of the copies, 1 and -1 in turn."""

    gain_CD: Tensor
    signs_C1: Tensor


def mirror_gain(weight_D: Tensor, num_copies: int) -> MirroredGain:
    """Prepare a gain, once: this takes longer than the norm of a row.

    Args:
        weight_D: gain in the dtype of the rows.
        num_copies: C, even.
    """
    signs_C1 = torch.tensor([[1.0], [-1.0]], dtype=weight_D.dtype, device=weight_D.device).repeat(num_copies // 2, 1)
    return MirroredGain(weight_D.detach().repeat(num_copies, 1), signs_C1)


def rms_norm_mirrored(x_1D: Tensor, gain: MirroredGain, *, eps: float) -> Tensor:
    """`rms_norm` of each row on a CPU, in C copies: y, -y, y, -y, ...; with 2, y has the bits of `rms_norm`.

    Args:
        x_1D: [..., 1, D], in the gain's dtype.
        gain: from `mirror_gain`.
        eps: added to the mean square.
    Returns:
        [..., C, D].
    """
    return torch.layer_norm(x_1D * gain.signs_C1, gain.gain_CD.shape, gain.gain_CD, None, eps)
