"""The end of a sublayer between convolutions: convolution, residual sum, and the norm of the next one, in one launch.

    sum = x + grouped_convolution(z);   normed = sum / sqrt(mean(sum^2) + eps) * gain

The convolution is rounded before it is added, the sum before it is normed. R flat rows, T taps, D width, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.add_norm import add_norm_reference
from paceline.ops.dispatch import choose, dependent_launch, kernel, tl, triton
from paceline.ops.early_launch import wait_for_launch_ahead
from paceline.ops.grouped_convolution import grouped_convolution_reference


def convolved_residual_reference(
    z_RD: Tensor,
    base_TD: Tensor,
    delta_RTG: Tensor,
    offset_R: Tensor,
    x_RD: Tensor,
    gain_D: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The definition; without a gain the second result is the sum, too."""
    convolved_RD = grouped_convolution_reference(z_RD, base_TD, delta_RTG, offset_R)
    if gain_D is None:
        sum_RD = x_RD + convolved_RD
        return sum_RD, sum_RD
    return add_norm_reference(x_RD, convolved_RD, gain_D, eps)


@kernel
def _convolved_residual_kernel(
    z_ptr: tl.tensor,
    base_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    width: tl.tensor,
    num_groups: tl.tensor,
    group_size: tl.tensor,
    delta_stride: tl.tensor,
    eps: tl.tensor,
    TAPS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_channel = column < width
    wait_for_launch_ahead(USE_PDL)
    group = column // group_size
    offset = tl.load(offset_ptr + row)
    x = tl.load(x_ptr + row * width + column, mask=is_channel, other=0.0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        inside = is_channel & (offset >= tap)
        z = tl.load(z_ptr + (row - tap) * width + column, mask=inside, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + tap * width + column, mask=is_channel, other=0.0).to(tl.float32)
        delta_at = delta_ptr + row * delta_stride + tap * num_groups + group
        total += z * (base + tl.load(delta_at, mask=is_channel, other=0.0).to(tl.float32))
    x = (x.to(tl.float32) + total.to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * width + column, x, mask=is_channel)
    if HAS_GAIN:
        gain = tl.load(gain_ptr + column, mask=is_channel, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps) * gain
        tl.store(normed_ptr + row * width + column, normed.to(normed_ptr.dtype.element_ty), mask=is_channel)


def convolved_residual_triton(
    z_RD: Tensor,
    base_TD: Tensor,
    delta_RTG: Tensor,
    offset_R: Tensor,
    x_RD: Tensor,
    gain_D: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Launch one program per row; `delta_RTG` may be one half of a wider projection, uncopied."""
    z_RD, x_RD = z_RD.contiguous(), x_RD.contiguous()
    num_rows, width = x_RD.shape
    num_taps, num_groups = delta_RTG.shape[1:]
    if delta_RTG.stride()[1:] != (num_groups, 1):
        delta_RTG = delta_RTG.contiguous()
    sum_RD = torch.empty_like(x_RD)
    normed_RD = sum_RD if gain_D is None else torch.empty_like(x_RD)
    is_dependent = dependent_launch(num_rows)
    with torch.cuda.device_of(x_RD):
        _convolved_residual_kernel[(num_rows,)](
            z_RD,
            base_TD.contiguous(),
            delta_RTG,
            offset_R,
            x_RD,
            x_RD if gain_D is None else gain_D,
            sum_RD,
            normed_RD,
            width,
            num_groups,
            width // num_groups,
            delta_RTG.stride(0),
            eps,
            TAPS=num_taps,
            HAS_GAIN=gain_D is not None,
            BLOCK=triton.next_power_of_2(width),
            USE_PDL=is_dependent,
            launch_pdl=is_dependent,
        )
    return sum_RD, normed_RD


def convolved_residual(
    z_RD: Tensor,
    base_TD: Tensor,
    delta_RTG: Tensor,
    offset_R: Tensor,
    x_RD: Tensor,
    gain_D: Tensor | None,
    *,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Convolve a sublayer's output along its block, add it to the stream, and norm the sum for the next sublayer.

    Args:
        z_RD: the sublayer's output.
        base_TD: coefficients that all rows share.
        delta_RTG: what each row adds to them.
        offset_R: int64, each row's index in its own block.
        x_RD: the stream; it stays as it is.
        gain_D: of the next norm, any float dtype; None where none follows.
        eps: of that norm.
    Returns:
        The sum, and the sum normed; without a gain the sum twice.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    num_rows, width = x_RD.shape
    if z_RD.shape != x_RD.shape:
        raise ShapeError("z", expected=x_RD.shape, found=z_RD.shape)
    if delta_RTG.dim() != 3 or delta_RTG.shape[0] != num_rows or width % delta_RTG.shape[2]:
        raise ShapeError("delta", expected=f"[{num_rows}, T, G] with G a divisor of {width}", found=delta_RTG.shape)
    if base_TD.shape != (delta_RTG.shape[1], width):
        raise ShapeError("base", expected=[delta_RTG.shape[1], width], found=base_TD.shape)
    if offset_R.shape != (num_rows,):
        raise ShapeError("offset", expected=[num_rows], found=offset_R.shape)
    run = choose("convolved_residual", x_RD, convolved_residual_reference, convolved_residual_triton)
    return run(z_RD, base_TD, delta_RTG, offset_R, x_RD, gain_D, eps)
