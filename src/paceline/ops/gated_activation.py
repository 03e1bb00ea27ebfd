"""The product inside a gated MLP or expert: act(gate) * up, computed in float32 and rounded once.

    silu   g * sigmoid(g) * u
    situ   beta * tanh(g / beta) * sigmoid(g) * u',   u' = linear_beta * tanh(u / linear_beta), or u without that bound

SiTU is SiLU between bounds: for |g| far below beta both agree. T rows, I width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, dependent_launch, kernel, needs_gradient, tl, triton
from paceline.ops.early_launch import wait_for_launch_ahead
from paceline.ops.elementwise import sigmoid, widen

_LARGEST_BLOCK = 1024  # channels per program
# Which part of the projection comes first: 0 its first channels, 1 its last ones, 2 its last rows. What a product wrote
# last may still lie in the L2 cache, and what is written last here the next product finds there.
_ORDER = 0


class Activation(NamedTuple):
    """Which function it is; the betas are SiTU's bounds on the gate and on `up` (None: unbounded)."""

    kind: Literal["silu", "situ"]
    beta: float = 1.0
    linear_beta: float | None = None


def gated_activation_reference(gate_TI: Tensor, up_TI: Tensor, activation: Activation) -> Tensor:
    """The definition."""
    gate, up = widen(gate_TI), widen(up_TI)
    if activation.kind == "silu":
        return (gate * sigmoid(gate) * up).to(gate_TI.dtype)
    bounded = activation.beta * torch.tanh(gate / activation.beta) * sigmoid(gate)
    if activation.linear_beta is not None:
        up = activation.linear_beta * torch.tanh(up / activation.linear_beta)
    return (bounded * up).to(gate_TI.dtype)


@kernel
def tanh_of(x: tl.tensor) -> tl.tensor:
    """tanh in float32: near zero, where 1 - exp(-2|x|) loses its digits, by a continued fraction."""
    square = x * x
    numerator = ((square + 378.0) * square + 17325.0) * square + 135135.0
    denominator = ((28.0 * square + 3150.0) * square + 62370.0) * square + 135135.0
    shrunk = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(tl.abs(x) < 0.5, x * numerator / denominator, tl.where(x < 0, -large, large))


@kernel
def activate(
    gate: tl.tensor,
    up: tl.tensor,
    beta: tl.tensor,
    linear_beta: tl.tensor,
    IS_SITU: tl.constexpr,
    BOUNDS_UP: tl.constexpr,
) -> tl.tensor:
    """act(gate) * up of float32 tiles."""
    open_share = 1.0 / (1.0 + tl.exp(-gate))
    if IS_SITU:
        gate = beta * tanh_of(gate / beta)
    if BOUNDS_UP:
        up = linear_beta * tanh_of(up / linear_beta)
    return gate * open_share * up


def activation_arguments(activation: Activation) -> tuple[tuple[float, float], dict[str, bool]]:
    """What a kernel around `activate` is launched with: both betas, and the constants by name."""
    is_situ = activation.kind == "situ"
    constants = {"IS_SITU": is_situ, "BOUNDS_UP": is_situ and activation.linear_beta is not None}
    return (float(activation.beta), float(activation.linear_beta or 1.0)), constants


@kernel
def _gated_activation_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    width: tl.tensor,
    beta: tl.tensor,
    linear_beta: tl.tensor,
    IS_SITU: tl.constexpr,
    BOUNDS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
    ORDER: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    wait_for_launch_ahead(USE_PDL)
    place, num_runs = tl.program_id(0), tl.cdiv(width, BLOCK)
    if ORDER > 0:
        place = tl.num_programs(0) - 1 - place
    if ORDER == 2:
        row, run = place // num_runs, place % num_runs
    else:
        num_rows = tl.num_programs(0) // num_runs
        row, run = place % num_rows, place // num_rows
    row = row.to(tl.int64)
    column = run * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, up, beta, linear_beta, IS_SITU, BOUNDS_UP)
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def gated_activation_triton(gate_TI: Tensor, up_TI: Tensor, activation: Activation) -> Tensor:
    """Launch one program per row and run of channels; halves of one projection are read where they lie."""
    y_TI = torch.empty_like(gate_TI, memory_format=torch.contiguous_format)
    width = gate_TI.shape[-1]
    gate, up = gate_TI.reshape(-1, width), up_TI.reshape(-1, width)
    if gate.stride(1) != 1 or up.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(width))
    is_dependent = dependent_launch(gate.shape[0])
    betas, constants = activation_arguments(activation)
    with torch.cuda.device_of(gate_TI):
        _gated_activation_kernel[gate.shape[0] * triton.cdiv(width, block),](
            gate,
            up,
            y_TI,
            gate.stride(0),
            up.stride(0),
            width,
            *betas,
            **constants,
            BLOCK=block,
            ORDER=_ORDER,
            USE_PDL=is_dependent,
            launch_pdl=is_dependent,
        )
    return y_TI


def gated_activation(gate_TI: Tensor, up_TI: Tensor, activation: Activation) -> Tensor:
    """Multiply an activated gate with the up projection.

    Args:
        gate_TI: [..., I], any float dtype; may be a half of a wider projection.
        up_TI: the same shape.
        activation: the function and its bounds.
    Returns:
        [..., I] in the gate's dtype. Differentiable in both.
    Raises:
        ShapeError: the shapes differ.
    """
    if gate_TI.shape != up_TI.shape:
        raise ShapeError("up", expected=gate_TI.shape, found=up_TI.shape)
    if gate_TI.numel() == 0 or needs_gradient(gate_TI, up_TI):
        return gated_activation_reference(gate_TI, up_TI, activation)
    run = choose("gated_activation", gate_TI, gated_activation_reference, gated_activation_triton)
    return run(gate_TI, up_TI, activation)
