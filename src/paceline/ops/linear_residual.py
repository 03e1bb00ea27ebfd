"""A product with everything around it in one launch: norm before, bias and residual stream behind.

    y[t, o] = sum over i of n[t, i] * W[o, i]  + bias[o]  + residual[t, o]
    n       = x, or x / sqrt(mean(x^2) + eps) * gain

Summed in float32 and rounded once. The norm's row factor multiplies the sums, as in `skinny_product.py`.
T rows (at most 64 in the kernel), I in, O out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.skinny_product import (
    Tile,
    begin_run,
    check_product,
    choose_tile,
    launch_options,
    new_parts,
    norm_times_weight,
    product_of_run,
)


def linear_residual_reference(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    gain_I: Tensor | None,
    eps: float,
) -> Tensor:
    """The definition."""
    sums = norm_times_weight(x_TI, weight_OI, gain_I, eps)
    if bias_O is not None:
        sums = sums + bias_O.float()
    if residual_TO is not None:
        sums = sums + residual_TO.float()
    return sums.to(x_TI.dtype)


@kernel
def _linear_residual_kernel(
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_rows: tl.tensor,
    eps: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCHED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    existing = tl.minimum(output, NUM_OUTPUTS - 1)
    begin_run(weight_ptr, existing, existing, WIDTH, PART, False, PREFETCHED, IS_DEPENDENT)
    row = tl.arange(0, ROWS)
    is_output = output < NUM_OUTPUTS
    is_cell = (row < num_rows)[:, None] & is_output[None, :]
    cell = row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :]
    residual = tl.load(residual_ptr + cell, mask=is_cell & HAS_RESIDUAL, other=0.0)
    bias = tl.load(bias_ptr + output, mask=is_output & HAS_BIAS, other=0.0)
    sums, _, squares, is_last = product_of_run(
        x_ptr,
        gain_ptr,
        weight_ptr,
        parts_ptr,
        counter_ptr,
        existing,
        existing,
        num_rows,
        WIDTH,
        PART,
        PARTS,
        ROWS,
        OUTPUTS,
        BLOCK,
        HAS_GAIN,
        False,
    )
    if HAS_GAIN:
        sums *= tl.rsqrt(squares / WIDTH + eps)[:, None]
    if HAS_BIAS:
        sums += bias.to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        sums += residual.to(tl.float32)
    tl.store(y_ptr + cell, sums.to(y_ptr.dtype.element_ty), mask=is_cell & is_last)


def linear_residual_triton(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    gain_I: Tensor | None,
    eps: float,
    *,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Launch one program per run of outputs and part."""
    num_rows, num_outputs = x_TI.shape[0], weight_OI.shape[0]
    x_TI = x_TI.contiguous()
    tile = tile or choose_tile(num_rows, num_outputs, x_TI.shape[1])
    y_TO = torch.empty((num_rows, num_outputs), dtype=x_TI.dtype, device=x_TI.device)
    num_runs = triton.cdiv(num_outputs, tile.outputs)
    with torch.cuda.device_of(x_TI):
        _linear_residual_kernel[num_runs, tile.parts](
            x_TI,
            x_TI if gain_I is None else gain_I,
            weight_OI,
            x_TI if bias_O is None else bias_O,
            x_TI if residual_TO is None else residual_TO.contiguous(),
            y_TO,
            *new_parts(tile, num_runs, x_TI, counters),
            num_rows,
            eps,
            NUM_OUTPUTS=num_outputs,
            HAS_BIAS=bias_O is not None,
            HAS_RESIDUAL=residual_TO is not None,
            HAS_GAIN=gain_I is not None,
            **launch_options(tile, x_TI),
        )
    return y_TO


def linear_residual(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor,
    *,
    bias_O: Tensor | None = None,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Add a product to the residual stream.

    Args:
        x_TI: rows; at most `skinny_product.LARGEST_ROWS` on a GPU.
        weight_OI: contiguous, in the rows' dtype.
        residual_TO: what the product is added to; it stays as it is.
        bias_O: of the product.
        tile: how the product is cut, by default from `choose_tile`.
        counters: from `skinny_product.new_counters`; without, a launch that needs some makes them.
    Returns:
        [T, O] in the rows' dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    check_product(x_TI, weight_OI, bias_O)
    if residual_TO.shape != (x_TI.shape[0], weight_OI.shape[0]):
        raise ShapeError("residual", expected=[x_TI.shape[0], weight_OI.shape[0]], found=residual_TO.shape)
    run = choose("linear_residual", x_TI, linear_residual_reference, linear_residual_triton)
    if run is linear_residual_reference:
        return linear_residual_reference(x_TI, weight_OI, bias_O, residual_TO, None, 0.0)
    return linear_residual_triton(x_TI, weight_OI, bias_O, residual_TO, None, 0.0, tile=tile, counters=counters)


def norm_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    gain_I: Tensor,
    *,
    eps: float,
    bias_O: Tensor | None = None,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Multiply normed rows with a weight: `gain_I` and `eps` are the norm's, all else as for `linear_residual`."""
    check_product(x_TI, weight_OI, bias_O)
    run = choose("norm_linear", x_TI, linear_residual_reference, linear_residual_triton)
    if run is linear_residual_reference:
        return linear_residual_reference(x_TI, weight_OI, bias_O, None, gain_I, eps)
    return linear_residual_triton(x_TI, weight_OI, bias_O, None, gain_I, eps, tile=tile, counters=counters)
