"""Grouped dynamic causal convolution over the rows of draft blocks.

    y[r, c] = sum over taps t of [offset[r] >= t] * (base[t, c] + delta[r, t, c // S]) * x[r - t, c]

Tap 0 is the row itself. The other taps look back, never past the start of the row's own block: a block's values do not
depend on its neighbours, nor on how many rows follow. The coefficient is that of the row that is written.
Source: DFlash2, spec 4.7. R flat rows of any number of blocks, T taps, D width, G groups of S channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, dependent_launch, kernel, needs_gradient, tl, triton
from paceline.ops.early_launch import wait_for_launch_ahead

_LARGEST_BLOCK = 1024  # channels per program
_GRADIENT_ROWS = 16  # rows per program of the backward pass: fewer make more partial sums of the shared coefficients


def grouped_convolution_reference(x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, offset_R: Tensor | None) -> Tensor:
    """The definition: float32 sums, tap by tap, rounded once."""
    return convolve(x_RD, convolution_factors(base_TD, delta_RTG), offset_R)


def convolution_factors(base_TD: Tensor, delta_RTG: Tensor) -> tuple[Tensor, ...]:
    """What rows are multiplied with, one float32 [R, G, S] per tap.

    The taps may be those of several convolutions, one behind the other: all take no more operations than one.
    """
    num_taps, num_groups = delta_RTG.shape[1:]
    factors_RTGS = base_TD.float().view(num_taps, num_groups, -1) + delta_RTG.float().unsqueeze(-1)
    return factors_RTGS.unbind(1)


def convolve(x: Tensor, factors: Sequence[Tensor], offset_R: Tensor | None) -> Tensor:
    """`grouped_convolution_reference` with its factors at hand; x is [R, D], or [B, Q, D] with R = B * Q."""
    first_RGS, *further = factors
    num_rows = first_RGS.shape[0]
    x_RGS = x.float().view(first_RGS.shape)
    y_RGS = x_RGS * first_RGS
    for tap, factor_RGS in enumerate(further[: max(0, num_rows - 1)], start=1):
        num_behind = num_rows - tap
        earlier_RGS = x_RGS.narrow(0, 0, num_behind)
        if offset_R is not None:
            # The neighbour's rows are cut off before the product: whatever they hold, 0 * NaN is NaN.
            is_outside_R = offset_R.narrow(0, tap, num_behind) < tap
            earlier_RGS = earlier_RGS.masked_fill(is_outside_R.view(-1, 1, 1), 0.0)
        y_RGS.narrow(0, tap, num_behind).add_(earlier_RGS * factor_RGS.narrow(0, tap, num_behind))
    return y_RGS.view(x.shape).to(x.dtype)


@kernel
def _grouped_convolution_kernel(
    x_ptr: tl.tensor,
    base_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    y_ptr: tl.tensor,
    width: tl.tensor,
    num_groups: tl.tensor,
    group_size: tl.tensor,
    delta_stride: tl.tensor,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    wait_for_launch_ahead(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = column < width
    group = column // group_size
    offset = tl.load(offset_ptr + row)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        inside = is_channel & (offset >= tap)
        x = tl.load(x_ptr + (row - tap) * width + column, mask=inside, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + tap * width + column, mask=is_channel, other=0.0).to(tl.float32)
        delta_at = delta_ptr + row * delta_stride + tap * num_groups + group
        delta = tl.load(delta_at, mask=is_channel, other=0.0).to(tl.float32)
        total += x * (base + delta)
    tl.store(y_ptr + row * width + column, total.to(y_ptr.dtype.element_ty), mask=is_channel)


def grouped_convolution_triton(x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, offset_R: Tensor) -> Tensor:
    """Launch one program per row and run of channels; `delta_RTG` may be one half of a wider projection, uncopied."""
    x_RD, base_TD, offset_R = x_RD.contiguous(), base_TD.contiguous(), offset_R.contiguous()
    num_rows, width = x_RD.shape
    num_taps, num_groups = delta_RTG.shape[1:]
    if delta_RTG.stride()[1:] != (num_groups, 1):
        delta_RTG = delta_RTG.contiguous()
    y_RD = torch.empty_like(x_RD)
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(width))
    is_dependent = dependent_launch(num_rows)
    with torch.cuda.device_of(x_RD):
        _grouped_convolution_kernel[num_rows, triton.cdiv(width, block)](
            x_RD,
            base_TD,
            delta_RTG,
            offset_R,
            y_RD,
            width,
            num_groups,
            width // num_groups,
            delta_RTG.stride(0),
            TAPS=num_taps,
            BLOCK=block,
            USE_PDL=is_dependent,
            launch_pdl=is_dependent,
        )
    return y_RD


@kernel
def _grouped_convolution_gradient_kernel(
    x_ptr: tl.tensor,
    base_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dbase_ptr: tl.tensor,
    ddelta_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    num_groups: tl.tensor,
    group_size: tl.tensor,
    delta_stride: tl.tensor,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    # One program per run of rows and tile of groups; a tile is [GROUPS, SIZE] channels, so a group's sum is a row's.
    program = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    member = tl.arange(0, SIZE)
    is_group = group < num_groups
    is_channel = is_group[:, None] & (member < group_size)[None, :]
    column = group[:, None] * group_size + member[None, :]
    for tap in tl.static_range(TAPS):
        base = tl.load(base_ptr + tap * width + column, mask=is_channel, other=0.0).to(tl.float32)
        dbase = tl.zeros([GROUPS, SIZE], dtype=tl.float32)
        for step in range(ROWS):
            row = program * ROWS + step
            exists = row < num_rows
            offset = tl.load(offset_ptr + row, mask=exists, other=-1)
            # What this row's output owes to the row `tap` before it.
            reads = is_channel & (offset >= tap)
            dy = tl.load(dy_ptr + row * width + column, mask=reads, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + (row - tap) * width + column, mask=reads, other=0.0).to(tl.float32)
            dbase += dy * x
            ddelta_at = ddelta_ptr + (row * TAPS + tap) * num_groups + group
            tl.store(ddelta_at, tl.sum(dy * x, axis=1).to(ddelta_ptr.dtype.element_ty), mask=is_group & exists)
        dbase_at = dbase_ptr + (program * TAPS + tap) * width + column
        tl.store(dbase_at, dbase, mask=is_channel)
    for step in range(ROWS):
        row = program * ROWS + step
        exists = row < num_rows
        total = tl.zeros([GROUPS, SIZE], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            # What the row `tap` after this one owes to it.
            later = row + tap
            offset = tl.load(offset_ptr + later, mask=later < num_rows, other=-1)
            reads = is_channel & (offset >= tap) & exists
            dy = tl.load(dy_ptr + later * width + column, mask=reads, other=0.0).to(tl.float32)
            base = tl.load(base_ptr + tap * width + column, mask=is_channel, other=0.0).to(tl.float32)
            delta_at = delta_ptr + later * delta_stride + tap * num_groups + group
            delta = tl.load(delta_at, mask=is_group & (offset >= tap) & exists, other=0.0).to(tl.float32)
            total += dy * (base + delta[:, None])
        dx_at = dx_ptr + row * width + column
        tl.store(dx_at, total.to(dx_ptr.dtype.element_ty), mask=is_channel & exists)


def grouped_convolution_gradients_triton(
    x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, offset_R: Tensor, dy_RD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, base and delta in their dtypes, from the gradient of the result; summed in float32.

    Every sum has a fixed order, so two runs agree bit for bit.
    """
    x_RD, base_TD, offset_R, dy_RD = (t.contiguous() for t in (x_RD, base_TD, offset_R, dy_RD))
    num_rows, width = x_RD.shape
    num_taps, num_groups = delta_RTG.shape[1:]
    if delta_RTG.stride()[1:] != (num_groups, 1):
        delta_RTG = delta_RTG.contiguous()
    group_size = width // num_groups
    size = triton.next_power_of_2(group_size)
    groups = max(1, min(_LARGEST_BLOCK // size, triton.next_power_of_2(num_groups)))
    num_programs = triton.cdiv(num_rows, _GRADIENT_ROWS)
    dx_RD = torch.empty_like(x_RD)
    ddelta_RTG = torch.empty_like(delta_RTG, memory_format=torch.contiguous_format)
    dbase_PTD = torch.empty(num_programs, num_taps, width, dtype=torch.float32, device=x_RD.device)
    with torch.cuda.device_of(x_RD):
        _grouped_convolution_gradient_kernel[num_programs, triton.cdiv(num_groups, groups)](
            x_RD,
            base_TD,
            delta_RTG,
            offset_R,
            dy_RD,
            dx_RD,
            dbase_PTD,
            ddelta_RTG,
            num_rows,
            width,
            num_groups,
            group_size,
            delta_RTG.stride(0),
            TAPS=num_taps,
            ROWS=_GRADIENT_ROWS,
            GROUPS=groups,
            SIZE=size,
        )
    return dx_RD, dbase_PTD.sum(0).to(base_TD.dtype), ddelta_RTG


class _GroupedConvolution(torch.autograd.Function):
    """The two kernels as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, offset_R: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, base_TD, delta_RTG, offset_R)
        return grouped_convolution_triton(x_RD, base_TD, delta_RTG, offset_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_RD, base_TD, delta_RTG, offset_R = ctx.saved_tensors
        found = grouped_convolution_gradients_triton(x_RD, base_TD, delta_RTG, offset_R, gradients[0])
        return *found, None


def grouped_convolution_differentiable_triton(
    x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, offset_R: Tensor
) -> Tensor:
    """`grouped_convolution_triton` for training."""
    apply: Callable[..., Tensor] = _GroupedConvolution.apply
    return apply(x_RD, base_TD, delta_RTG, offset_R)


def grouped_convolution(x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, offset_R: Tensor | None) -> Tensor:
    """Convolve the rows of draft blocks, each inside its own block.

    Args:
        x_RD: flat rows, any float dtype; blocks lie one after the other and may differ in length.
        base_TD: coefficients that all rows share.
        delta_RTG: what each row adds to them, one value per tap and group of channels.
        offset_R: int64, each row's index in its own block; None where all rows are one block.
    Returns:
        [R, D] in x's dtype, summed in float32. Differentiable in all but the offsets.
    Raises:
        ShapeError: the tensors do not fit each other, or the groups do not divide the width.
    """
    num_rows, width = x_RD.shape
    if delta_RTG.dim() != 3 or delta_RTG.shape[0] != num_rows or width % delta_RTG.shape[2]:
        raise ShapeError("delta", expected=f"[{num_rows}, T, G] with G a divisor of {width}", found=delta_RTG.shape)
    if base_TD.shape != (delta_RTG.shape[1], width):
        raise ShapeError("base", expected=[delta_RTG.shape[1], width], found=base_TD.shape)
    if offset_R is not None and offset_R.shape != (num_rows,):
        raise ShapeError("offset", expected=[num_rows], found=offset_R.shape)
    if num_rows == 0:
        return grouped_convolution_reference(x_RD, base_TD, delta_RTG, offset_R)
    is_trained = needs_gradient(x_RD, base_TD, delta_RTG)
    kernels = grouped_convolution_differentiable_triton if is_trained else grouped_convolution_triton
    run = choose("grouped_convolution", x_RD, grouped_convolution_reference, kernels)
    if run is grouped_convolution_reference:
        return grouped_convolution_reference(x_RD, base_TD, delta_RTG, offset_R)
    return run(x_RD, base_TD, delta_RTG, torch.arange(num_rows, device=x_RD.device) if offset_R is None else offset_R)
