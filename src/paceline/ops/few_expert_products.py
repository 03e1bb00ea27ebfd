"""The experts of a few rows as two launches, whose shapes follow from the rows alone.

    inside[p]  = act(gate_e x[t], up_e x[t])        for every pair p = t * A + a with expert e
    y[p]       = down_e inside[p]

Each expert is a program (per run of outputs) that looks for itself among all ids, leaves at once where nobody chose it,
and else multiplies its weight with all rows in one tile: with at most 64 rows the weight's bytes decide, not the rows.
So nothing is sorted, counted or cut into tiles beforehand. What nobody here computes, pairs of experts elsewhere, stays
unwritten. `expert_tile` has what a tile computes; `mixture_of_experts.expert_products_grouped` is the definition,
`expert_products` the form for many rows.

T rows, A chosen per row, P = T * A pairs, E experts, X width of an expert's input, I of its inside.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paceline.ops.dispatch import kernel, tl, triton
from paceline.ops.expert_tile import TILE_INPUTS, TILE_OUTPUTS, down_tile, gate_up_tile
from paceline.ops.gated_activation import Activation, activation_arguments

MOST_ROWS: Final = 64  # in one tile
_FEWEST = 16  # the smallest side of a matrix product on tensor cores


@kernel
def _pairs_of_expert(
    ids_ptr: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
) -> tl.tensor:
    """For every row of a tile the pair that has this expert, -1 where there is none: no row chooses one twice."""
    slot = tl.arange(0, SLOTS)
    is_pair = (row < num_rows)[:, None] & (slot < CHOSEN)[None, :]
    ids = tl.load(ids_ptr + row[:, None] * CHOSEN + slot[None, :], mask=is_pair, other=-1)
    place = tl.max(tl.where(ids == expert, slot[None, :], -1), axis=1)
    return tl.where(place >= 0, row * CHOSEN + place, -1)


@kernel
def _few_gate_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    inside_ptr: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    inside_size: tl.tensor,
    beta: tl.tensor,
    linear_beta: tl.tensor,
    IS_SITU: tl.constexpr,
    BOUNDS_UP: tl.constexpr,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    expert, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    pair = _pairs_of_expert(ids_ptr, expert, row, num_rows, CHOSEN, SLOTS)
    if tl.max(pair, axis=0) >= 0:
        is_pair = pair >= 0
        gate_up_tile(
            x_ptr,
            weight_ptr,
            inside_ptr,
            expert,
            row,
            row_stride,
            pair,
            is_pair,
            width,
            inside_size,
            beta,
            linear_beta,
            IS_SITU,
            BOUNDS_UP,
            ROWS,
            OUTPUTS,
            INPUTS,
        )


@kernel
def _few_down_kernel(
    inside_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    inside_size: tl.tensor,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    expert, row = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    pair = _pairs_of_expert(ids_ptr, expert, row, num_rows, CHOSEN, SLOTS)
    if tl.max(pair, axis=0) >= 0:
        is_pair = pair >= 0
        down_tile(inside_ptr, weight_ptr, y_ptr, expert, pair, pair, is_pair, width, inside_size, ROWS, OUTPUTS, INPUTS)


def few_expert_products_triton(
    x_TX: Tensor, expert_ids_TA: Tensor, gate_up_EZX: Tensor, down_EXI: Tensor, activation: Activation
) -> Tensor:
    """Launch two programs per expert and run of outputs.

    Args:
        x_TX: at most `MOST_ROWS` rows; may be a part of wider ones.
        expert_ids_TA: int64, none twice in a row; ids outside the experts are left out.
        gate_up_EZX: in the rows' dtype, contiguous.
        down_EXI: the same.
        activation: between the products.
    Returns:
        [P, X] in the rows' dtype; what belongs to ids outside the experts is not written.
    """
    num_rows, num_chosen = expert_ids_TA.shape
    num_experts, width, inside_size = down_EXI.shape
    num_pairs = num_rows * num_chosen
    inside_PI = torch.empty(num_pairs, inside_size, dtype=x_TX.dtype, device=x_TX.device)
    y_PX = torch.empty(num_pairs, width, dtype=x_TX.dtype, device=x_TX.device)
    ids_TA = expert_ids_TA.contiguous()
    sizes = {
        "CHOSEN": num_chosen,
        "SLOTS": triton.next_power_of_2(num_chosen),
        "ROWS": max(_FEWEST, triton.next_power_of_2(num_rows)),
        "OUTPUTS": TILE_OUTPUTS,
        "INPUTS": TILE_INPUTS,
    }
    if x_TX.stride(1) != 1:
        x_TX = x_TX.contiguous()
    betas, constants = activation_arguments(activation)
    with torch.cuda.device_of(x_TX):
        _few_gate_up_kernel[num_experts, triton.cdiv(inside_size, TILE_OUTPUTS)](
            x_TX,
            gate_up_EZX,
            ids_TA,
            inside_PI,
            num_rows,
            x_TX.stride(0),
            width,
            inside_size,
            *betas,
            **constants,
            **sizes,
        )
        _few_down_kernel[num_experts, triton.cdiv(width, TILE_OUTPUTS)](
            inside_PI, down_EXI, ids_TA, y_PX, num_rows, width, inside_size, **sizes
        )
    return y_PX
