"""The product of few rows with a weight, as the fused operations of a layer use it: x @ W^T, summed in float32.

With at most 64 rows such a product is bound by reading the weight. So a program takes a run of outputs, keeps several
tiles of the weight in flight, and holds all rows in one tile; what comes behind (rotation, activation, residual)
happens in the same launch. Nothing is computed on the way from memory to the matrix units. A norm before a product is
therefore prepared by whoever writes the rows (`ScaledRows`): they come multiplied with its gain, and with their squares
summed, and the norm's row factor f multiplies the sums: x * f * gain @ W^T = f * ((x * gain) @ W^T).

Where there are too few runs of outputs to fill the multiprocessors, several programs share one: each leaves its part of
the sums in a workspace, and whoever arrives last adds them in the order of the parts, so that results do not depend on
who that is.

This file has what is computed; `skinny_tile.py` how it is cut, `skinny_launch.py` how it is launched, `begin_run.py`
what a program does before all else. T rows, I in, O out, S partial sums of squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import kernel, tl
from paceline.ops.skinny_tile import LARGEST_ROWS


class ScaledRows(NamedTuple):
    """Rows of the residual stream, prepared for the norm and product that come next.

    Attributes:
        x_TD: the rows.
        scaled_TD: rows times the norm's gain, rounded.
        squares_TS: float32, sums of squares of `x_TD`, in parts.
    """

    x_TD: Tensor
    scaled_TD: Tensor
    squares_TS: Tensor


def check_product(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    squares_TS: Tensor | None = None,
    *,
    holds_any_number: bool | None = None,
) -> None:
    """Refuse what does not fit.

    Args:
        x_TI: rows.
        weight_OI: the weight.
        bias_O: its bias.
        squares_TS: of a norm before.
        holds_any_number: of rows, as references do; by default on a CPU.
    Raises:
        ShapeError: widths differ, or there are more rows than the kernel holds on the device that would run it.
    """
    if x_TI.dim() != 2 or weight_OI.shape[1] != x_TI.shape[1]:
        raise ShapeError("weight", expected=f"[O, {x_TI.shape[-1]}]", found=weight_OI.shape)
    if bias_O is not None and bias_O.shape != weight_OI.shape[:1]:
        raise ShapeError("bias", expected=weight_OI.shape[:1], found=bias_O.shape)
    if squares_TS is not None and squares_TS.shape[:1] != x_TI.shape[:1]:
        raise ShapeError("squares", expected=f"[{x_TI.shape[0]}, S]", found=squares_TS.shape)
    if holds_any_number is None:
        holds_any_number = x_TI.device.type == "cpu"
    if not holds_any_number and x_TI.shape[0] > LARGEST_ROWS:
        raise ShapeError("rows", expected=f"[at most {LARGEST_ROWS}, {x_TI.shape[1]}]", found=x_TI.shape)


def multiply_reference(x_TI: Tensor, weight_OI: Tensor, squares_TS: Tensor | None, eps: float) -> Tensor:
    """float32 [T, O]: the sums of a product, times the norm's factor where there are squares."""
    sums_TO = x_TI.float() @ weight_OI.float().T
    if squares_TS is None:
        return sums_TO
    return sums_TO * torch.rsqrt(squares_TS.sum(-1, keepdim=True) / x_TI.shape[-1] + eps)


@kernel
def load_squares(
    squares_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    ROWS: tl.constexpr,
    SQUARES: tl.constexpr,
) -> tl.tensor:
    """[ROWS, SQUARES] sums of squares. They are only added behind the product: adding waits for them to arrive."""
    row, part = tl.arange(0, ROWS), tl.arange(0, SQUARES)
    is_cell = (row < num_rows)[:, None] & (part < num_squares)[None, :]
    return tl.load(squares_ptr + row[:, None] * num_squares + part[None, :], mask=is_cell, other=0.0)


@kernel
def norm_factor(squares: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """[ROWS, 1] factors of a norm from `load_squares`, added in one fixed order."""
    return tl.rsqrt(tl.sum(squares, axis=1) / WIDTH + eps)[:, None]


@kernel
def _added_slices(batch: tl.tensor, other_batch: tl.tensor, IS_PAIR: tl.constexpr) -> tl.tensor:
    # Both runs at once: what is added across warps waits for all of them.
    if IS_PAIR:
        sums, other_sums = tl.split(tl.sum(tl.join(batch, other_batch), axis=0))
    else:
        sums = tl.sum(batch, axis=0)
        other_sums = sums
    return sums, other_sums


@kernel
def _sums_of_slices(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output: tl.tensor,
    other_output: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    CUT: tl.constexpr,
) -> tl.tensor:
    # Products of a batch of slices go to different warps, which add their sums up once, at the end, in order.
    SLICES: tl.constexpr = CUT.slices
    ROWS: tl.constexpr = CUT.rows
    OUTPUTS: tl.constexpr = CUT.outputs
    SLICE: tl.constexpr = CUT.block // SLICES
    IS_WHOLE: tl.constexpr = CUT.width == CUT.part * CUT.parts
    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[None, :, None]
    first = (tl.arange(0, SLICES) * SLICE)[:, None, None]
    x_column = first + tl.arange(0, SLICE)[None, None, :]
    column = first + tl.arange(0, SLICE)[None, :, None]
    sums = tl.zeros([SLICES, ROWS, OUTPUTS], dtype=tl.float32)
    other_sums = tl.zeros([SLICES, ROWS, OUTPUTS], dtype=tl.float32)
    x_at = x_ptr + row.to(tl.int64)[None, :, None] * CUT.width + x_column
    weight_at = weight_ptr + output[None, None, :] * CUT.width + column
    other_at = weight_ptr + other_output[None, None, :] * CUT.width + column
    for done in range(0, CUT.part, CUT.block):
        if IS_WHOLE:
            x = tl.load(x_at + done, mask=is_row, other=0.0)
            weight = tl.load(weight_at + done)
        else:
            x = tl.load(x_at + done, mask=is_row & (x_column < num_inputs - done), other=0.0)
            weight = tl.load(weight_at + done, mask=column < num_inputs - done, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
        if CUT.is_pair:
            if IS_WHOLE:
                other_weight = tl.load(other_at + done)
            else:
                other_weight = tl.load(other_at + done, mask=column < num_inputs - done, other=0.0)
            other_sums = tl.dot(x, other_weight, other_sums, input_precision="ieee")
    return _added_slices(sums, other_sums, CUT.is_pair)


@kernel
def _rows_of_slices(
    x_ptr: tl.tensor, num_rows: tl.tensor, CUT: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr
) -> tl.tensor:
    # [slices, rows, SIZE], what is held is multiplied with.
    row = tl.arange(0, CUT.rows)[None, :, None]
    within = FIRST + tl.arange(0, SIZE)[None, None, :]
    start = (tl.arange(0, CUT.slices) * CUT.part)[:, None, None]
    is_input = (within < CUT.part) & (start + within < CUT.width)
    return tl.load(x_ptr + row.to(tl.int64) * CUT.width + start + within, mask=is_input & (row < num_rows), other=0.0)


@kernel
def _sums_of_held(x_ptr: tl.tensor, held: tl.tensor, num_rows: tl.tensor, CUT: tl.constexpr) -> tl.tensor:
    x = _rows_of_slices(x_ptr, num_rows, CUT, 0, CUT.block)
    x_rest = x
    if CUT.rest > 0:
        x_rest = _rows_of_slices(x_ptr, num_rows, CUT, CUT.block, CUT.rest)
    batch = tl.dot(x, held[0], input_precision="ieee")
    if CUT.rest > 0:
        batch = tl.dot(x_rest, held[1], batch, input_precision="ieee")
    other_batch = batch
    if CUT.is_pair:
        other_batch = tl.dot(x, held[2], input_precision="ieee")
        if CUT.rest > 0:
            other_batch = tl.dot(x_rest, held[3], other_batch, input_precision="ieee")
    return _added_slices(batch, other_batch, CUT.is_pair)


@kernel
def _sums_of_part(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output: tl.tensor,
    other_output: tl.tensor,
    num_rows: tl.tensor,
    first: tl.tensor,
    CUT: tl.constexpr,
) -> tl.tensor:
    # In one tile, all warps at the same inputs.
    ROWS: tl.constexpr = CUT.rows
    OUTPUTS: tl.constexpr = CUT.outputs
    IS_WHOLE: tl.constexpr = CUT.width == CUT.part * CUT.parts
    row, column = tl.arange(0, ROWS), tl.arange(0, CUT.block)
    is_row = (row < num_rows)[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    other_sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    x_at = x_ptr + row.to(tl.int64)[:, None] * CUT.width + column[None, :]
    weight_at = weight_ptr + output[None, :] * CUT.width + column[:, None]
    other_at = weight_ptr + other_output[None, :] * CUT.width + column[:, None]
    for done in range(0, CUT.part, CUT.block):
        start = first + done
        if IS_WHOLE:
            x = tl.load(x_at + start, mask=is_row, other=0.0)
            weight = tl.load(weight_at + start)
        else:
            is_input = start + column < CUT.width
            x = tl.load(x_at + start, mask=is_row & is_input[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=is_input[:, None], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
        if CUT.is_pair:
            if IS_WHOLE:
                other_weight = tl.load(other_at + start)
            else:
                other_weight = tl.load(other_at + start, mask=(start + column < CUT.width)[:, None], other=0.0)
            other_sums = tl.dot(x, other_weight, other_sums, input_precision="ieee")
    return sums, other_sums


@kernel
def product_of_run(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    output: tl.tensor,
    other_output: tl.tensor,
    held: tl.tensor,
    num_rows: tl.tensor,
    CUT: tl.constexpr,
) -> tl.tensor:
    """Sums of two runs of outputs, in a grid of (runs, parts), after `begin_run`.

    Args:
        x_ptr: [rows, width].
        weight_ptr: [outputs, width].
        parts_ptr: from `new_parts`.
        counter_ptr: from `new_counters`.
        output: int64 [outputs], rows of the weight, all of which exist.
        other_output: as many more, read for a pair.
        held: from `begin_run`.
        num_rows: at most the rows of the tile.
        CUT: `skinny_launch.Cut`.
    Returns:
        Both sums, [rows, outputs], the second of no use without a pair; and whether this is the program that has them.
        Others have a part of the sums, and write nothing.
    """
    ROWS: tl.constexpr = CUT.rows
    OUTPUTS: tl.constexpr = CUT.outputs
    PARTS: tl.constexpr = CUT.parts
    run, part = tl.program_id(0), tl.program_id(1)
    first = part * CUT.part
    if CUT.is_held:
        sums, other_sums = _sums_of_held(x_ptr, held, num_rows, CUT)
    elif CUT.slices > 1:
        sums, other_sums = _sums_of_slices(
            x_ptr + first, weight_ptr + first, output, other_output, num_rows, CUT.width - first, CUT
        )
    else:
        sums, other_sums = _sums_of_part(x_ptr, weight_ptr, output, other_output, num_rows, first, CUT)
    if CUT.begins == 3:
        tl.extra.cuda.gdc_launch_dependents()
    is_last = True
    if PARTS > 1:
        SIZE: tl.constexpr = ROWS * OUTPUTS
        RUNS: tl.constexpr = 2 if CUT.is_pair else 1
        cell = tl.arange(0, ROWS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        at = parts_ptr + (run * PARTS + part).to(tl.int64) * (RUNS * SIZE)
        tl.store(at + cell, sums)
        if CUT.is_pair:
            tl.store(at + SIZE + cell, other_sums)
        tl.debug_barrier()  # the counter is moved by one thread, for all
        is_last = tl.atomic_add(counter_ptr + run, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
            other_sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
            for index in tl.static_range(PARTS):
                at = parts_ptr + (run * PARTS + index).to(tl.int64) * (RUNS * SIZE)
                sums += tl.load(at + cell, cache_modifier=".cg")
                if CUT.is_pair:
                    other_sums += tl.load(at + SIZE + cell, cache_modifier=".cg")
            tl.store(counter_ptr + run, 0)
    return sums, other_sums, is_last
