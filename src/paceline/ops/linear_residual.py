"""A product with everything around it in one launch: a norm's factor, bias and residual stream; and what the norm after
it needs.

    y[t, o]       = f[t] * (sum over i of x[t, i] * W[o, i])  + bias[o]  + residual[t, o]
    scaled[t, o]  = round(y[t, o] * gain[o]),   squares[t, s] = sum over the outputs o of run s of y[t, o]^2

Summed in float32; y is rounded once, and scaled and squared as rounded. f is 1, or 1 / sqrt(mean of squares + eps) of
rows that come scaled themselves (`skinny_product.ScaledRows`).
T rows (at most 64 in the kernel), I in, O out, S partial sums of squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.begin_run import begin_run
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.scale_rows import scale_rows_reference
from paceline.ops.skinny_launch import skinny_launch
from paceline.ops.skinny_product import (
    ScaledRows,
    check_product,
    load_squares,
    multiply_reference,
    norm_factor,
    product_of_run,
)
from paceline.ops.skinny_tile import Tile, choose_tile


def linear_residual_reference(
    x_TI: Tensor,
    squares_TS: Tensor | None,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    gain_O: Tensor | None,
    eps: float,
) -> Tensor | ScaledRows:
    """The definition; prepared for a norm where there is a gain."""
    sums_TO = multiply_reference(x_TI, weight_OI, squares_TS, eps)
    if bias_O is not None:
        sums_TO = sums_TO + bias_O.float()
    if residual_TO is not None:
        sums_TO = sums_TO + residual_TO.float()
    y_TO = sums_TO.to(x_TI.dtype)
    return y_TO if gain_O is None else scale_rows_reference(y_TO, gain_O)


@kernel
def _linear_residual_kernel(
    x_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    y_ptr: tl.tensor,
    scaled_ptr: tl.tensor,
    next_squares_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    eps: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    SQUARES: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    CUT: tl.constexpr,
) -> None:
    output = tl.program_id(0).to(tl.int64) * CUT.outputs + tl.arange(0, CUT.outputs)
    existing = tl.minimum(output, NUM_OUTPUTS - 1)
    is_output = output < NUM_OUTPUTS
    held = begin_run(weight_ptr, existing, existing, CUT)
    row = tl.arange(0, CUT.rows)
    is_cell = (row < num_rows)[:, None] & is_output[None, :]
    cell = row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :]
    bias = tl.load(bias_ptr + output, mask=is_output & HAS_BIAS, other=0.0)
    gain = tl.load(gain_ptr + output, mask=is_output & HAS_GAIN, other=0.0)
    residual = tl.load(residual_ptr + cell, mask=is_cell & HAS_RESIDUAL, other=0.0)
    squares = load_squares(squares_ptr, num_rows, num_squares, CUT.rows, SQUARES)
    sums, _, is_last = product_of_run(
        x_ptr, weight_ptr, parts_ptr, counter_ptr, existing, existing, held, num_rows, CUT
    )
    if HAS_SQUARES:
        sums *= norm_factor(squares, eps, CUT.width)
    if HAS_BIAS:
        sums += bias.to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        sums += residual.to(tl.float32)
    y = sums.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + cell, y, mask=is_cell & is_last)
    if HAS_GAIN:
        wide = tl.where(is_cell, y.to(tl.float32), 0.0)
        scaled = (wide * gain.to(tl.float32)[None, :]).to(y_ptr.dtype.element_ty)
        tl.store(scaled_ptr + cell, scaled, mask=is_cell & is_last)
        squares_at = next_squares_ptr + row * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares_at, tl.sum(wide * wide, axis=1), mask=(row < num_rows) & is_last)


def linear_residual_triton(
    x_TI: Tensor,
    squares_TS: Tensor | None,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    gain_O: Tensor | None,
    eps: float,
    *,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor | ScaledRows:
    """Launch one program per run of outputs and part."""
    num_rows, num_outputs = x_TI.shape[0], weight_OI.shape[0]
    x_TI = x_TI.contiguous()
    tile = tile or choose_tile(num_rows, num_outputs, x_TI.shape[1])
    num_runs = triton.cdiv(num_outputs, tile.outputs)
    y_TO = torch.empty((num_rows, num_outputs), dtype=x_TI.dtype, device=x_TI.device)
    scaled_TO, next_squares_TS = y_TO, y_TO
    if gain_O is not None:
        scaled_TO = torch.empty_like(y_TO)
        next_squares_TS = torch.empty((num_rows, num_runs), dtype=torch.float32, device=x_TI.device)
    launch = skinny_launch(tile, num_runs, x_TI, squares_TS, weight_OI, bias_O, counters)
    with torch.cuda.device_of(x_TI):
        _linear_residual_kernel[launch.grid](
            *launch.operands,
            x_TI if residual_TO is None else residual_TO.contiguous(),
            x_TI if gain_O is None else gain_O,
            y_TO,
            scaled_TO,
            next_squares_TS,
            *launch.workspace,
            eps,
            NUM_OUTPUTS=num_outputs,
            HAS_RESIDUAL=residual_TO is not None,
            HAS_GAIN=gain_O is not None,
            **launch.constants,
        )
    return y_TO if gain_O is None else ScaledRows(y_TO, scaled_TO, next_squares_TS)


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
        x_TI: rows; at most `skinny_tile.LARGEST_ROWS` on a GPU.
        weight_OI: contiguous, in the rows' dtype.
        residual_TO: what the product is added to; it stays as it is.
        bias_O: of the product.
        tile: how the product is cut, by default from `choose_tile`.
        counters: from `skinny_launch.new_counters`; without, a launch that needs some makes them.
    Returns:
        [T, O] in the rows' dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    y_TO = _add(x_TI, weight_OI, bias_O, residual_TO, None, tile, counters)
    assert isinstance(y_TO, Tensor)
    return y_TO


def linear_residual_scaled(
    x_TI: Tensor,
    weight_OI: Tensor,
    residual_TO: Tensor | None,
    gain_O: Tensor,
    *,
    bias_O: Tensor | None = None,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> ScaledRows:
    """`linear_residual`, and the sum prepared for the norm that comes next, whose gain, of any float dtype, this is.

    Without a residual stream it is the product alone that is prepared.
    """
    if gain_O.shape != weight_OI.shape[:1]:
        raise ShapeError("gain", expected=weight_OI.shape[:1], found=gain_O.shape)
    rows = _add(x_TI, weight_OI, bias_O, residual_TO, gain_O, tile, counters)
    assert isinstance(rows, ScaledRows)
    return rows


def _add(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    gain_O: Tensor | None,
    tile: Tile | None,
    counters: Tensor | None,
) -> Tensor | ScaledRows:
    check_product(x_TI, weight_OI, bias_O)
    if residual_TO is not None and residual_TO.shape != (x_TI.shape[0], weight_OI.shape[0]):
        raise ShapeError("residual", expected=[x_TI.shape[0], weight_OI.shape[0]], found=residual_TO.shape)
    given = x_TI, None, weight_OI, bias_O, residual_TO, gain_O, 0.0
    run = choose("linear_residual", x_TI, linear_residual_reference, linear_residual_triton)
    if run is linear_residual_reference:
        return linear_residual_reference(*given)
    return linear_residual_triton(*given, tile=tile, counters=counters)


def linear_rows(
    x_TI: Tensor,
    weight_OI: Tensor,
    *,
    bias_O: Tensor | None = None,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """The product alone; arguments as for `linear_residual`."""
    y_TO = _add(x_TI, weight_OI, bias_O, None, None, tile, counters)
    assert isinstance(y_TO, Tensor)
    return y_TO


def norm_linear(
    rows: ScaledRows,
    weight_OI: Tensor,
    *,
    eps: float,
    bias_O: Tensor | None = None,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Multiply normed rows with a weight; `eps` is the norm's, all else as for `linear_residual`."""
    check_product(rows.scaled_TD, weight_OI, bias_O, rows.squares_TS)
    run = choose("norm_linear", rows.x_TD, linear_residual_reference, linear_residual_triton)
    given = rows.scaled_TD, rows.squares_TS, weight_OI, bias_O, None, None, eps
    if run is linear_residual_reference:
        y_TO = linear_residual_reference(*given)
    else:
        y_TO = linear_residual_triton(*given, tile=tile, counters=counters)
    assert isinstance(y_TO, Tensor)
    return y_TO
