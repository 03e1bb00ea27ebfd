"""A tile of an expert's two products, in a kernel: the rows that one program has, a run of outputs, all inputs.

    inside[p]    = act(gate_e x[row(p)], up_e x[row(p)])        for pairs p of row and expert e
    y[target(p)] = down_e inside[p]

Which rows those are is what `expert_products` and `few_expert_products` differ in. Rows of other experts may hold
anything, NaN included: they are not read. Projections are rounded to the rows' dtype where the modules of a dense layer
round.
"""

from __future__ import annotations

from typing import Final

from paceline.ops.dispatch import kernel, tl
from paceline.ops.gated_activation import activate

TILE_OUTPUTS: Final = 64  # of a weight
TILE_INPUTS: Final = 64


@kernel
def gate_up_tile(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    inside_ptr: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    row_stride: tl.tensor,
    pair: tl.tensor,
    is_pair: tl.tensor,
    width: tl.tensor,
    inside_size: tl.tensor,
    beta: tl.tensor,
    linear_beta: tl.tensor,
    IS_SITU: tl.constexpr,
    BOUNDS_UP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Write the inside of some pairs, at the outputs of the program's second index.

    Args:
        x_ptr: [rows, width], rows of `row_stride`.
        weight_ptr: [experts, 2 * inside_size, width], gates first.
        inside_ptr: [pairs, inside_size].
        expert: int64.
        row: [ROWS] that are read.
        row_stride: see `x_ptr`.
        pair: [ROWS] that are written.
        is_pair: [ROWS] bool.
        width: X.
        inside_size: I.
        beta: as for `activate`, and so the next three.
        linear_beta: see `beta`.
        IS_SITU: see `beta`.
        BOUNDS_UP: see `beta`.
        ROWS: of the tile.
        OUTPUTS: of the tile.
        INPUTS: per turn.
    """
    out_at = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_out = out_at < inside_size
    gate = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    weight_at = weight_ptr + (expert * 2 * inside_size + out_at[None, :]) * width
    for first in range(0, width, INPUTS):
        in_at = first + tl.arange(0, INPUTS)
        is_in = in_at < width
        x_at = x_ptr + row[:, None] * row_stride + in_at[None, :]
        x = tl.load(x_at, mask=is_pair[:, None] & is_in[None, :], other=0.0)
        is_cell = is_in[:, None] & is_out[None, :]
        w_gate = tl.load(weight_at + in_at[:, None], mask=is_cell, other=0.0)
        w_up = tl.load(weight_at + inside_size * width + in_at[:, None], mask=is_cell, other=0.0)
        gate += tl.dot(x, w_gate, input_precision="ieee")
        up += tl.dot(x, w_up, input_precision="ieee")
    dtype = inside_ptr.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    y = activate(gate, up, beta, linear_beta, IS_SITU, BOUNDS_UP)
    inside_at = inside_ptr + pair[:, None] * inside_size + out_at[None, :]
    tl.store(inside_at, y.to(dtype), mask=is_pair[:, None] & is_out[None, :])


@kernel
def down_tile(
    inside_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    expert: tl.tensor,
    pair: tl.tensor,
    target: tl.tensor,
    is_pair: tl.tensor,
    width: tl.tensor,
    inside_size: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Write what an expert says to some pairs, at the outputs of the program's second index.

    Args:
        inside_ptr: [pairs, inside_size].
        weight_ptr: [experts, width, inside_size].
        y_ptr: [pairs, width].
        expert: int64.
        pair: [ROWS] that are read.
        target: [ROWS] that are written.
        is_pair: [ROWS] bool.
        width: X.
        inside_size: I.
        ROWS: as for `gate_up_tile`, and so the next two.
        OUTPUTS: see `ROWS`.
        INPUTS: see `ROWS`.
    """
    out_at = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_out = out_at < width
    y = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    weight_at = weight_ptr + (expert * width + out_at[None, :]) * inside_size
    for first in range(0, inside_size, INPUTS):
        in_at = first + tl.arange(0, INPUTS)
        is_in = in_at < inside_size
        inside_at = inside_ptr + pair[:, None] * inside_size + in_at[None, :]
        inside = tl.load(inside_at, mask=is_pair[:, None] & is_in[None, :], other=0.0)
        weight = tl.load(weight_at + in_at[:, None], mask=is_in[:, None] & is_out[None, :], other=0.0)
        y += tl.dot(inside, weight, input_precision="ieee")
    y_at = y_ptr + target[:, None] * width + out_at[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_pair[:, None] & is_out[None, :])
