"""The residual sum and its root-mean-square norm in one launch: both are needed, one reads what the other writes.

    sum = x + y;   normed = sum / sqrt(mean(sum^2) + eps) * gain        (sum rounded to its dtype before the norm)

Where a product adds to the stream by itself there is nothing left to add, and the norm reads one tensor and writes one;
whoever goes on to change the stream in place asks for a copy, which costs writing it.

T rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, dependent_launch, kernel, tl, triton
from paceline.ops.early_launch import wait_for_launch_ahead
from paceline.ops.rms_norm import rms_norm_reference

_LARGEST_ROW = 16_384  # channels that one program holds


def add_norm_reference(
    x_TD: Tensor, y_TD: Tensor | None, gain_D: Tensor, eps: float, copies: bool = False
) -> tuple[Tensor, Tensor]:
    """The definition."""
    sum_TD = x_TD + y_TD if y_TD is not None else x_TD.clone() if copies else x_TD
    return sum_TD, rms_norm_reference(sum_TD, gain_D, eps)


@kernel
def _add_norm_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)  # constant: read before the wait
    wait_for_launch_ahead(USE_PDL)
    at = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    if ADDS or COPIES:
        tl.store(sum_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps) * gain
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def add_norm_triton(
    x_TD: Tensor, y_TD: Tensor | None, gain_D: Tensor, eps: float, copies: bool = False
) -> tuple[Tensor, Tensor]:
    """Launch one program per row."""
    x_TD = x_TD.contiguous()
    width = x_TD.shape[-1]
    normed_TD = torch.empty_like(x_TD)
    sum_TD = torch.empty_like(x_TD) if copies or y_TD is not None else x_TD
    block, num_rows = triton.next_power_of_2(width), x_TD.numel() // width
    is_dependent = dependent_launch(num_rows)
    with torch.cuda.device_of(x_TD):
        _add_norm_kernel[(num_rows,)](
            x_TD,
            x_TD if y_TD is None else y_TD.contiguous(),
            gain_D,
            sum_TD,
            normed_TD,
            width,
            eps,
            ADDS=y_TD is not None,
            COPIES=copies,
            BLOCK=block,
            USE_PDL=is_dependent,
            num_warps=4 if block <= 4096 else 8,
            launch_pdl=is_dependent,
        )
    return sum_TD, normed_TD


def add_norm(
    x_TD: Tensor, y_TD: Tensor | None, gain_D: Tensor, *, eps: float, copies: bool = False
) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the stream and norm the sum for the next one.

    Args:
        x_TD: the stream, [..., D]; it stays as it is.
        y_TD: the same shape and dtype; None norms the stream as it is.
        gain_D: of the norm, any float dtype.
        eps: added to the mean square.
        copies: whether the sum is a new tensor even where nothing is added.
    Returns:
        The sum, which without `copies` is `x_TD` itself where nothing is added, and the normed sum, both in the
        stream's dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    if gain_D.shape != x_TD.shape[-1:]:
        raise ShapeError("gain", expected=x_TD.shape[-1:], found=gain_D.shape)
    if y_TD is not None and y_TD.shape != x_TD.shape:
        raise ShapeError("y", expected=x_TD.shape, found=y_TD.shape)
    if x_TD.numel() == 0 or x_TD.shape[-1] > _LARGEST_ROW:
        return add_norm_reference(x_TD, y_TD, gain_D, eps, copies)
    run = choose("add_norm", x_TD, add_norm_reference, add_norm_triton)
    return run(x_TD, y_TD, gain_D, eps, copies)
