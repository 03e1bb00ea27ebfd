"""Grouped dynamic causal convolution over the rows of draft blocks.

    y[r, c] = sum over taps t of [offset[r] >= t] * (base[t, c] + delta[r, t, c // S]) * x[r - t, c]

Tap 0 is the row itself. The other taps look back, never past the start of the row's own block: a block's values do not
depend on its neighbours, nor on how many rows follow. The coefficient is that of the row that is written.
Source: DFlash2, spec 4.7. R flat rows of any number of blocks, T taps, D width, G groups of S channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, needs_gradient, tl, triton

_LARGEST_BLOCK = 1024  # channels per program


def grouped_convolution_reference(x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, offset_R: Tensor) -> Tensor:
    """The definition: float32 sums, tap by tap, rounded once."""
    num_rows, width = x_RD.shape
    num_taps, num_groups = delta_RTG.shape[1:]
    x_RGS = x_RD.float().view(num_rows, num_groups, -1)
    base_TGS = base_TD.float().view(num_taps, num_groups, -1)
    delta_RTG1 = delta_RTG.float().unsqueeze(-1)
    y_RGS = x_RGS * (base_TGS[0] + delta_RTG1[:, 0])
    for tap in range(1, min(num_taps, num_rows)):
        earlier_RGS = functional.pad(x_RGS[:-tap], (0, 0, 0, 0, tap, 0))
        # The neighbour's rows are cut off before the product: whatever they hold, 0 * NaN is NaN.
        earlier_RGS = earlier_RGS.masked_fill((offset_R < tap).view(-1, 1, 1), 0.0)
        y_RGS = y_RGS + earlier_RGS * (base_TGS[tap] + delta_RTG1[:, tap])
    return y_RGS.reshape(num_rows, width).to(x_RD.dtype)


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
) -> None:
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
        )
    return y_RD


def grouped_convolution(x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, offset_R: Tensor) -> Tensor:
    """Convolve the rows of draft blocks, each inside its own block.

    Args:
        x_RD: flat rows, any float dtype; blocks lie one after the other and may differ in length.
        base_TD: coefficients that all rows share.
        delta_RTG: what each row adds to them, one value per tap and group of channels.
        offset_R: int64, each row's index in its own block.
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
    if offset_R.shape != (num_rows,):
        raise ShapeError("offset", expected=[num_rows], found=offset_R.shape)
    if num_rows == 0 or needs_gradient(x_RD, base_TD, delta_RTG):
        return grouped_convolution_reference(x_RD, base_TD, delta_RTG, offset_R)
    run = choose("grouped_convolution", x_RD, grouped_convolution_reference, grouped_convolution_triton)
    return run(x_RD, base_TD, delta_RTG, offset_R)
