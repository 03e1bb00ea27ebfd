"""Norm first, then the gate: y = x / sqrt(mean(x^2) + eps) * w * sigmoid(gate), in float32, rounded once.

The output of KDA: one weight for all heads, and a sigmoid where other gated norms have SiLU. Latent attention has the
gate without the norm. T rows, N heads, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, needs_gradient, tl, triton
from paceline.ops.elementwise import sigmoid, widen

_GATE_BLOCK = 1024  # channels per program


def gated_rms_norm_reference(x_TNH: Tensor, gate_TNH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """The definition."""
    x = widen(x_TNH)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * widen(weight_H)
    return (normed * sigmoid(gate_TNH)).to(gate_TNH.dtype)


@kernel
def _gated_rms_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_heads: tl.tensor,
    head_size: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head, channel = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    inside = (head < num_heads)[:, None] & (channel < head_size)[None, :]
    cell = head[:, None] * head_size + channel[None, :]
    at = row * num_heads * head_size + cell
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + cell, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=channel < head_size, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / head_size + eps)
    y = x * scale[:, None] * weight[None, :] * (1.0 / (1.0 + tl.exp(-gate)))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


def gated_rms_norm_triton(x_TNH: Tensor, gate_TNH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Launch one program per row and run of heads."""
    num_heads, head_size = x_TNH.shape[-2:]
    y_TNH = torch.empty(gate_TNH.shape, dtype=gate_TNH.dtype, device=gate_TNH.device)
    gate = gate_TNH.reshape(-1, num_heads, head_size)
    if gate.stride()[1:] != (head_size, 1):
        gate = gate.contiguous()
    heads = min(8, triton.next_power_of_2(num_heads))
    with torch.cuda.device_of(x_TNH):
        _gated_rms_norm_kernel[gate.shape[0], triton.cdiv(num_heads, heads)](
            x_TNH.contiguous(),
            gate,
            weight_H.contiguous(),
            y_TNH,
            num_heads,
            head_size,
            gate.stride(0),
            eps,
            HEADS=heads,
            CHANNELS=triton.next_power_of_2(head_size),
        )
    return y_TNH


def gated_rms_norm(x_TNH: Tensor, gate_TNH: Tensor, weight_H: Tensor, *, eps: float) -> Tensor:
    """Normalise each head and gate it.

    Args:
        x_TNH: [..., N, H], any float dtype.
        gate_TNH: logits of the gate, the same shape.
        weight_H: gain, shared by all heads.
        eps: added to the mean square.
    Returns:
        [..., N, H] in the gate's dtype. Differentiable.
    Raises:
        ShapeError: the shapes differ.
    Source: Kimi-Linear, the output of KDA.
    """
    if gate_TNH.shape != x_TNH.shape:
        raise ShapeError("gate", expected=x_TNH.shape, found=gate_TNH.shape)
    if weight_H.shape != x_TNH.shape[-1:]:
        raise ShapeError("weight", expected=x_TNH.shape[-1:], found=weight_H.shape)
    if x_TNH.numel() == 0 or needs_gradient(x_TNH, gate_TNH, weight_H):
        return gated_rms_norm_reference(x_TNH, gate_TNH, weight_H, eps)
    run = choose("gated_rms_norm", x_TNH, gated_rms_norm_reference, gated_rms_norm_triton)
    return run(x_TNH, gate_TNH, weight_H, eps)


def gate_by_sigmoid_reference(x: Tensor, gate: Tensor) -> Tensor:
    """The definition."""
    return (widen(x) * sigmoid(gate)).to(x.dtype)


@kernel
def _gate_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    y_ptr: tl.tensor,
    width: tl.tensor,
    gate_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = x * (1.0 / (1.0 + tl.exp(-gate)))
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def gate_by_sigmoid_triton(x: Tensor, gate: Tensor) -> Tensor:
    """Launch one program per row and run of channels; the gate may be a part of wider rows."""
    width = x.shape[-1]
    x, gate = x.contiguous(), gate.reshape(-1, width)
    if gate.stride(1) != 1:
        gate = gate.contiguous()
    y = torch.empty_like(x)
    block = min(_GATE_BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device_of(x):
        _gate_kernel[gate.shape[0], triton.cdiv(width, block)](x, gate, y, width, gate.stride(0), BLOCK=block)
    return y


def gate_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) of any float dtypes, in float32, rounded once to x's dtype.

    Raises:
        ShapeError: the shapes differ.
    """
    if gate.shape != x.shape:
        raise ShapeError("gate", expected=x.shape, found=gate.shape)
    if x.numel() == 0 or needs_gradient(x, gate):
        return gate_by_sigmoid_reference(x, gate)
    return choose("gate_by_sigmoid", x, gate_by_sigmoid_reference, gate_by_sigmoid_triton)(x, gate)
