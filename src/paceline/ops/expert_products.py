"""The experts of a mixture as two grouped matrix products on a GPU, without the host knowing who chose whom.

    inside[p]  = act(gate_e x[row(p)], up_e x[row(p)])          for pairs p of row and expert, sorted by expert e
    y[pair(p)] = down_e inside[p]

Pairs of one expert form tiles; which expert a tile belongs to is found on the device, and the number of tiles is the
most that any routing can need. What a tile computes is in `expert_tile`.
`mixture_of_experts.expert_products_grouped` is the definition, `few_expert_products` the form for a step's few rows.
Either is followed by the sum over a row's experts:

    out[t]  = sum over a of weight[t, a] * y[t * A + a]         for experts that are here, in float32, rounded once

T rows, A chosen per row, P = T * A pairs, E experts, X width of an expert's input, I of its inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import kernel, tl, triton
from paceline.ops.expert_tile import TILE_INPUTS, TILE_OUTPUTS, down_tile, gate_up_tile
from paceline.ops.gated_activation import Activation, activation_arguments

_FEW_PAIRS, _MANY_PAIRS = 16, 64  # per tile: for a step's rows, and for a prompt's
_FEW_PER_EXPERT = 32
_LARGEST_BLOCK = 1024  # channels per program of the sum


@kernel
def _gate_up_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_start_ptr: tl.tensor,
    tile_end_ptr: tl.tensor,
    inside_ptr: tl.tensor,
    num_chosen: tl.tensor,
    width: tl.tensor,
    inside_size: tl.tensor,
    num_experts: tl.tensor,
    beta: tl.tensor,
    linear_beta: tl.tensor,
    IS_SITU: tl.constexpr,
    BOUNDS_UP: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < num_experts:
        pair = tl.load(tile_start_ptr + tile) + tl.arange(0, PAIRS)
        is_pair = pair < tl.load(tile_end_ptr + tile)
        row = tl.load(order_ptr + pair, mask=is_pair, other=0) // num_chosen
        gate_up_tile(
            x_ptr,
            weight_ptr,
            inside_ptr,
            expert,
            row,
            width,
            pair,
            is_pair,
            width,
            inside_size,
            beta,
            linear_beta,
            IS_SITU,
            BOUNDS_UP,
            PAIRS,
            OUTPUTS,
            INPUTS,
        )


@kernel
def _down_kernel(
    inside_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_start_ptr: tl.tensor,
    tile_end_ptr: tl.tensor,
    y_ptr: tl.tensor,
    width: tl.tensor,
    inside_size: tl.tensor,
    num_experts: tl.tensor,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert < num_experts:
        pair = tl.load(tile_start_ptr + tile) + tl.arange(0, PAIRS)
        is_pair = pair < tl.load(tile_end_ptr + tile)
        target = tl.load(order_ptr + pair, mask=is_pair, other=0)
        down_tile(
            inside_ptr, weight_ptr, y_ptr, expert, pair, target, is_pair, width, inside_size, PAIRS, OUTPUTS, INPUTS
        )


def tiles_of(ids_P: Tensor, num_experts: int, tile_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort pairs by expert and cut each expert's into tiles, without waiting for the device.

    Args:
        ids_P: int64; ids outside the experts belong to nobody here.
        num_experts: E.
        tile_size: most pairs of a tile.
    Returns:
        order_P: pairs in the order of their experts, those of nobody last.
        expert, start, end of every tile; expert E marks a tile that is not needed.
    """
    own_P = torch.where((ids_P >= 0) & (ids_P < num_experts), ids_P, num_experts)
    order_P = own_P.argsort(stable=True)
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_P.device)
    counts_E.scatter_add_(0, own_P, torch.ones_like(own_P))
    ends_E = counts_E[:num_experts].cumsum(0)
    tile_ends_E = ((counts_E[:num_experts] + tile_size - 1) // tile_size).cumsum(0)
    num_pairs = ids_P.shape[0]
    tile = torch.arange(num_pairs // tile_size + min(num_experts, num_pairs), device=ids_P.device)
    expert = torch.searchsorted(tile_ends_E, tile, right=True)
    known = expert.clamp(max=num_experts - 1)
    tiles_E = (counts_E[:num_experts] + tile_size - 1) // tile_size
    start = (ends_E - counts_E[:num_experts])[known] + (tile - (tile_ends_E - tiles_E)[known]) * tile_size
    return order_P, expert, start, ends_E[known]


def expert_products_triton(
    x_TX: Tensor, expert_ids_TA: Tensor, gate_up_EZX: Tensor, down_EXI: Tensor, activation: Activation
) -> Tensor:
    """Launch two programs per tile of pairs and run of outputs.

    Args:
        x_TX: rows.
        expert_ids_TA: int64; pairs with ids outside the experts are left out.
        gate_up_EZX: in the rows' dtype, contiguous.
        down_EXI: the same.
        activation: between the products.
    Returns:
        [P, X] in the rows' dtype; what belongs to ids outside the experts is not written.
    """
    num_experts, width, inside_size = down_EXI.shape
    num_pairs = expert_ids_TA.numel()
    tile_size = _FEW_PAIRS if num_pairs <= _FEW_PER_EXPERT * num_experts else _MANY_PAIRS
    order_P, *tiles = tiles_of(expert_ids_TA.flatten(), num_experts, tile_size)
    inside_PI = torch.empty(num_pairs, inside_size, dtype=x_TX.dtype, device=x_TX.device)
    y_PX = torch.empty(num_pairs, width, dtype=x_TX.dtype, device=x_TX.device)
    sizes = {"PAIRS": tile_size, "OUTPUTS": TILE_OUTPUTS, "INPUTS": TILE_INPUTS}
    betas, constants = activation_arguments(activation)
    with torch.cuda.device_of(x_TX):
        _gate_up_kernel[tiles[0].shape[0], triton.cdiv(inside_size, TILE_OUTPUTS)](
            x_TX.contiguous(),
            gate_up_EZX,
            order_P,
            *tiles,
            inside_PI,
            expert_ids_TA.shape[1],
            width,
            inside_size,
            num_experts,
            *betas,
            **constants,
            **sizes,
        )
        _down_kernel[tiles[0].shape[0], triton.cdiv(width, TILE_OUTPUTS)](
            inside_PI, down_EXI, order_P, *tiles, y_PX, width, inside_size, num_experts, **sizes
        )
    return y_PX


@kernel
def _weigh_experts_kernel(
    y_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    num_experts: tl.tensor,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in tl.static_range(CHOSEN):
        pair = row * CHOSEN + slot
        expert = tl.load(ids_ptr + pair)
        is_here = inside & (expert >= 0) & (expert < num_experts)
        weight = tl.load(weights_ptr + pair)
        y = tl.load(y_ptr + pair * width + column, mask=is_here, other=0.0).to(tl.float32)
        total += tl.where(is_here, y * weight, 0.0)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def weigh_experts_triton(y_PX: Tensor, expert_ids_TA: Tensor, weights_TA: Tensor, num_experts: int) -> Tensor:
    """Launch one program per row and run of channels.

    Args:
        y_PX: what every chosen expert says; pairs with ids outside the experts may hold anything.
        expert_ids_TA: int64.
        weights_TA: float32.
        num_experts: E.
    Returns:
        [T, X] in y's dtype.
    """
    num_rows, num_chosen = expert_ids_TA.shape
    width = y_PX.shape[1]
    out_TX = torch.empty(num_rows, width, dtype=y_PX.dtype, device=y_PX.device)
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device_of(y_PX):
        _weigh_experts_kernel[num_rows, triton.cdiv(width, block)](
            y_PX,
            expert_ids_TA.contiguous(),
            weights_TA.contiguous(),
            out_TX,
            width,
            num_experts,
            CHOSEN=num_chosen,
            BLOCK=block,
        )
    return out_TX
