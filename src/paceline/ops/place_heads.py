"""What follows a q/k/v projection that the library made: q/k norms, rotation, keys and values stored, in one launch.

As in `project_heads.py`, on heads that are rounded already. A program has heads of one kind, of one row or of several,
so that what a head is for is asked once and not for every channel.

T rows, N query heads, M key/value heads, H head size, X = (N + 2M) * H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, dependent_launch, kernel, tl, triton
from paceline.ops.early_launch import wait_for_launch_ahead
from paceline.ops.heads import Cells, HeadForm, check_heads, finish_heads_reference, heads_launch

_TILE = 1024  # pairs of channels per program: of either half of a head, a thread loads 16 bytes
_FILLING = 132 * 8  # programs; before there are so many, none takes several rows


def place_heads_reference(
    qkv_TX: Tensor, qk_gains: tuple[Tensor, Tensor] | None, turns_T2R: Tensor, cells: Cells, form: HeadForm
) -> Tensor:
    """The definition."""
    return finish_heads_reference(qkv_TX, qk_gains, turns_T2R, cells, form, qkv_TX.dtype)


@kernel
def _place_heads_kernel(
    qkv_ptr: tl.tensor,
    q_gain_ptr: tl.tensor,
    k_gain_ptr: tl.tensor,
    turn_ptr: tl.tensor,
    row_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    q_ptr: tl.tensor,
    num_rows: tl.tensor,
    side_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    value_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_SIZE // 2
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    wait_for_launch_ahead(USE_PDL)
    first_head = tl.program_id(1) * HEADS  # HEADS divides both numbers of heads: those behind it are of its kind
    is_query, is_value = first_head < NUM_HEADS, first_head >= NUM_HEADS + NUM_KV_HEADS
    cell = tl.arange(0, ROWS * HEADS)
    row = tl.program_id(0).to(tl.int64) * ROWS + cell // HEADS
    head = first_head + cell % HEADS
    pair = tl.arange(0, PAIRS)
    is_row, is_turned = row < num_rows, pair < TURNED
    is_cell = is_row[:, None] & (pair < HALF)[None, :]
    # Channels past the turned ones are paired as halves, whichever pairing the turned ones have.
    if IS_NEOX and TURNED == HALF:  # the same as below, and plain to the compiler, which then reads 16 bytes at once
        channel = pair
        other_channel = pair + HALF
    elif IS_NEOX:
        channel = tl.where(is_turned, pair, pair + TURNED)
        other_channel = tl.where(is_turned, pair + TURNED, pair + HALF)
    else:
        channel = tl.where(is_turned, 2 * pair, pair + TURNED)
        other_channel = tl.where(is_turned, 2 * pair + 1, pair + HALF)
    dtype = q_ptr.dtype.element_ty
    source = qkv_ptr + row * (ALL_HEADS * HEAD_SIZE) + head * HEAD_SIZE
    first = tl.load(source[:, None] + channel[None, :], mask=is_cell, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + other_channel[None, :], mask=is_cell, other=0.0).to(tl.float32)
    if is_value:
        first = first * value_scale
        second = second * value_scale
    else:
        turn_at = turn_ptr + row[:, None] * (2 * TURNED) + pair[None, :]
        has_turn = is_row[:, None] & is_turned[None, :]
        cosine = tl.load(turn_at, mask=has_turn, other=1.0).to(dtype).to(tl.float32)
        sine = tl.load(turn_at + TURNED, mask=has_turn, other=0.0).to(dtype).to(tl.float32)
        if HAS_QK_NORM:
            gain_ptr = tl.where(is_query, q_gain_ptr, k_gain_ptr)
            factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_SIZE + eps)[:, None]
            is_channel = (pair < HALF)[None, :]
            gain = tl.load(gain_ptr + channel[None, :], mask=is_channel, other=0.0).to(tl.float32)
            first = (first * factor * gain).to(dtype).to(tl.float32)
            gain = tl.load(gain_ptr + other_channel[None, :], mask=is_channel, other=0.0).to(tl.float32)
            second = (second * factor * gain).to(dtype).to(tl.float32)
        turned = (first * cosine).to(dtype).to(tl.float32) - second * sine
        second = (second * cosine).to(dtype).to(tl.float32) + first * sine
        first = turned
    kv_head = tl.maximum(head - NUM_HEADS, 0)
    plane = (kv_head // NUM_KV_HEADS).to(tl.int64) * side_stride + (kv_head % NUM_KV_HEADS).to(tl.int64) * head_stride
    plane += tl.load(row_ptr + row, mask=is_row & (first_head >= NUM_HEADS), other=0) * HEAD_SIZE
    # A choice between addresses, not a branch: behind one, the compiler no longer knows that 16 bytes go at once.
    at = tl.where(is_query, q_ptr + (row * NUM_HEADS + head) * HEAD_SIZE, planes_ptr + plane)
    tl.store(at[:, None] + channel[None, :], first.to(dtype), mask=is_cell)
    tl.store(at[:, None] + other_channel[None, :], second.to(dtype), mask=is_cell)


def place_heads_triton(
    qkv_TX: Tensor, qk_gains: tuple[Tensor, Tensor] | None, turns_T2R: Tensor, cells: Cells, form: HeadForm
) -> Tensor:
    """Launch one program per some rows and some heads of a kind."""
    qkv_TX = qkv_TX.contiguous()
    num_rows = qkv_TX.shape[0]
    num_kv_heads, head_size = cells.planes.shape[1], cells.planes.shape[4]
    pairs = triton.next_power_of_2(head_size // 2)
    shared = math.gcd(form.num_heads, num_kv_heads)
    heads = min(shared & -shared, max(1, _TILE // pairs))
    num_runs = (form.num_heads + 2 * num_kv_heads) // heads
    rows = max(1, _TILE // pairs // heads) if num_rows * num_runs > _FILLING else 1
    is_dependent = dependent_launch(num_rows)
    launch = heads_launch(qkv_TX, qk_gains, turns_T2R, cells, form)
    with torch.cuda.device_of(qkv_TX):
        _place_heads_kernel[triton.cdiv(num_rows, rows), num_runs](
            qkv_TX,
            *launch.operands,
            num_rows,
            *launch.numbers,
            **launch.constants,
            ROWS=rows,
            HEADS=heads,
            PAIRS=pairs,
            USE_PDL=is_dependent,
            num_warps=max(1, min(4, rows * heads * pairs // 256)),
            launch_pdl=is_dependent,
        )
    return launch.q_TNH


def place_heads(
    qkv_TX: Tensor,
    turns_T2R: Tensor,
    cells: Cells,
    form: HeadForm,
    *,
    qk_gains: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Norm and turn projected heads; return the queries, store keys and values.

    Args:
        qkv_TX: queries, then keys, then values.
        turns_T2R: float32, rows of `rotary_table` at the rows' positions.
        cells: where keys and values go.
        form: what is done with the heads.
        qk_gains: of the norms of each query head and each key head, [H] each; None where there are none.
    Returns:
        [T, N, H] in the rows' dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    check_heads(qkv_TX.shape[1], qkv_TX.shape[0], turns_T2R, cells, form)
    run = choose("place_heads", qkv_TX, place_heads_reference, place_heads_triton)
    return run(qkv_TX, qk_gains, turns_T2R, cells, form)
