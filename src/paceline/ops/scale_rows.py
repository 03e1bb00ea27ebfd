"""Rows prepared for the norm and product that come next, where no fused product wrote them: the first layer's.

    scaled[t, d] = round(x[t, d] * gain[d]),   squares[t] = sum over d of x[t, d]^2

T rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, dependent_launch, kernel, tl, triton
from paceline.ops.early_launch import wait_for_launch_ahead
from paceline.ops.skinny_product import ScaledRows


def scale_rows_reference(x_TD: Tensor, gain_D: Tensor) -> ScaledRows:
    """The definition."""
    wide = x_TD.float()
    return ScaledRows(x_TD, (wide * gain_D.float()).to(x_TD.dtype), wide.square().sum(-1, keepdim=True))


@kernel
def _scale_rows_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    scaled_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)  # constant: read before the wait
    wait_for_launch_ahead(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + row * width + column, (x * gain).to(scaled_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + row, tl.sum(x * x, axis=0))


def scale_rows_triton(x_TD: Tensor, gain_D: Tensor) -> ScaledRows:
    """Launch one program per row."""
    x_TD = x_TD.contiguous()
    num_rows, width = x_TD.shape
    scaled_TD = torch.empty_like(x_TD)
    squares_T1 = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TD.device)
    is_dependent = dependent_launch(num_rows)
    with torch.cuda.device_of(x_TD):
        _scale_rows_kernel[(num_rows,)](
            x_TD,
            gain_D,
            scaled_TD,
            squares_T1,
            width,
            BLOCK=triton.next_power_of_2(width),
            USE_PDL=is_dependent,
            launch_pdl=is_dependent,
        )
    return ScaledRows(x_TD, scaled_TD, squares_T1)


def scale_rows(x_TD: Tensor, gain_D: Tensor) -> ScaledRows:
    """Prepare rows for a norm of this gain.

    Args:
        x_TD: rows of the residual stream.
        gain_D: of the norm, any float dtype.
    Raises:
        ShapeError: the widths differ.
    """
    if gain_D.shape != x_TD.shape[-1:]:
        raise ShapeError("gain", expected=x_TD.shape[-1:], found=gain_D.shape)
    return choose("scale_rows", x_TD, scale_rows_reference, scale_rows_triton)(x_TD, gain_D)
