"""The first half of a gated MLP in one launch: a norm's factor, gate and up projections, activation.

    y[t, i] = silu(gate[t, i]) * up[t, i],   [gate, up] = f * (x @ W^T) + bias

Summed in float32 and rounded once. f is 1, or the factor of a norm that rows were prepared for
(`skinny_product.ScaledRows`). A program takes a run of gates and the same run of the up projection.
T rows (at most 64 in the kernel), D in, I out, S partial sums of squares, X = 2 * I.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.begin_run import begin_run
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.gated_activation import Activation, gated_activation_reference
from paceline.ops.skinny_launch import skinny_launch
from paceline.ops.skinny_product import check_product, load_squares, multiply_reference, norm_factor, product_of_run
from paceline.ops.skinny_tile import Tile, choose_tile

_SILU = Activation("silu")


def linear_gated_reference(
    x_TD: Tensor, squares_TS: Tensor | None, weight_XD: Tensor, bias_X: Tensor | None, eps: float
) -> Tensor:
    """The definition."""
    both_TX = multiply_reference(x_TD, weight_XD, squares_TS, eps)
    if bias_X is not None:
        both_TX = both_TX + bias_X.float()
    gate_TI, up_TI = both_TX.chunk(2, dim=-1)
    return gated_activation_reference(gate_TI, up_TI, _SILU).to(x_TD.dtype)


@kernel
def _linear_gated_kernel(
    x_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    eps: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    SQUARES: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CUT: tl.constexpr,
) -> None:
    output = tl.program_id(0).to(tl.int64) * CUT.outputs + tl.arange(0, CUT.outputs)
    existing = tl.minimum(output, NUM_OUTPUTS - 1)
    held = begin_run(weight_ptr, existing, existing + NUM_OUTPUTS, CUT)
    is_output = output < NUM_OUTPUTS
    gate_bias = tl.load(bias_ptr + output, mask=is_output & HAS_BIAS, other=0.0)
    up_bias = tl.load(bias_ptr + NUM_OUTPUTS + output, mask=is_output & HAS_BIAS, other=0.0)
    squares = load_squares(squares_ptr, num_rows, num_squares, CUT.rows, SQUARES)
    gate, up, is_last = product_of_run(
        x_ptr, weight_ptr, parts_ptr, counter_ptr, existing, existing + NUM_OUTPUTS, held, num_rows, CUT
    )
    if HAS_SQUARES:
        factor = norm_factor(squares, eps, CUT.width)
        gate *= factor
        up *= factor
    if HAS_BIAS:
        gate += gate_bias.to(tl.float32)[None, :]
        up += up_bias.to(tl.float32)[None, :]
    y = gate * up / (1.0 + tl.exp(-gate))
    row = tl.arange(0, CUT.rows)
    cell = row.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :]
    stores = (row < num_rows)[:, None] & is_output[None, :] & is_last
    tl.store(y_ptr + cell, y.to(y_ptr.dtype.element_ty), mask=stores)


def linear_gated_triton(
    x_TD: Tensor,
    squares_TS: Tensor | None,
    weight_XD: Tensor,
    bias_X: Tensor | None,
    eps: float,
    *,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Launch one program per run of gates and part."""
    num_rows, num_outputs = x_TD.shape[0], weight_XD.shape[0] // 2
    x_TD = x_TD.contiguous()
    tile = tile or choose_tile(num_rows, 2 * num_outputs, x_TD.shape[1], least_outputs=32)
    y_TI = torch.empty((num_rows, num_outputs), dtype=x_TD.dtype, device=x_TD.device)
    num_runs = triton.cdiv(2 * num_outputs, tile.outputs)
    launch = skinny_launch(tile, num_runs, x_TD, squares_TS, weight_XD, bias_X, counters, is_pair=True)
    with torch.cuda.device_of(x_TD):
        _linear_gated_kernel[launch.grid](
            *launch.operands, y_TI, *launch.workspace, eps, NUM_OUTPUTS=num_outputs, **launch.constants
        )
    return y_TI


def linear_gated(
    x_TD: Tensor,
    squares_TS: Tensor | None,
    weight_XD: Tensor,
    *,
    eps: float,
    bias_X: Tensor | None = None,
    tile: Tile | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Activated gates times the up projection.

    Args:
        x_TD: rows, scaled where a norm comes before; at most `skinny_tile.LARGEST_ROWS` on a GPU.
        squares_TS: float32, of that norm; None where there is none.
        weight_XD: contiguous, in the rows' dtype; X = 2 * I, gates first.
        eps: of the norm.
        bias_X: of the projections.
        tile: how the product is cut, by default from `choose_tile`.
        counters: from `skinny_launch.new_counters`; without, a launch that needs some makes them.
    Returns:
        [T, I] in the rows' dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    check_product(x_TD, weight_XD, bias_X, squares_TS)
    if weight_XD.shape[0] % 2:
        raise ShapeError("weight", expected="[an even number, D]", found=weight_XD.shape)
    run = choose("linear_gated", x_TD, linear_gated_reference, linear_gated_triton)
    if run is linear_gated_reference:
        return linear_gated_reference(x_TD, squares_TS, weight_XD, bias_X, eps)
    return linear_gated_triton(x_TD, squares_TS, weight_XD, bias_X, eps, tile=tile, counters=counters)
