"""What follows a q/k/v projection that the library made: q/k norms, rotation, keys and values stored, in one launch.

As in `project_heads.py`, on heads that are rounded already. T rows, N query heads, M key/value heads, H head size,
X = (N + 2M) * H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.project_heads import Cells, HeadForm, check_heads, finish_heads_reference

_LARGEST_TILE = 2048  # pairs of channels per program


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
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_SIZE // 2
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    is_cell = (head < ALL_HEADS)[:, None] & (pair < HALF)[None, :]
    is_query, is_key = head < NUM_HEADS, (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_turned = pair < TURNED
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
    source = qkv_ptr + row * (ALL_HEADS * HEAD_SIZE) + head[:, None] * HEAD_SIZE
    first = tl.load(source + channel[None, :], mask=is_cell, other=0.0).to(tl.float32)
    second = tl.load(source + other_channel[None, :], mask=is_cell, other=0.0).to(tl.float32)
    turns = is_cell & (is_query | is_key)[:, None]
    if HAS_QK_NORM:
        factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_SIZE + eps)[:, None]
        reads_q, reads_k = is_cell & is_query[:, None], is_cell & is_key[:, None]
        every = tl.zeros([HEADS, 1], dtype=tl.int32)
        gain = tl.load(q_gain_ptr + channel[None, :] + every, mask=reads_q, other=0.0).to(tl.float32)
        gain += tl.load(k_gain_ptr + channel[None, :] + every, mask=reads_k, other=0.0).to(tl.float32)
        first = tl.where(turns, (first * factor * gain).to(dtype).to(tl.float32), first)
        gain = tl.load(q_gain_ptr + other_channel[None, :] + every, mask=reads_q, other=0.0).to(tl.float32)
        gain += tl.load(k_gain_ptr + other_channel[None, :] + every, mask=reads_k, other=0.0).to(tl.float32)
        second = tl.where(turns, (second * factor * gain).to(dtype).to(tl.float32), second)
    turn_at = turn_ptr + row * (2 * TURNED) + pair
    cosine = tl.load(turn_at, mask=is_turned, other=1.0).to(dtype).to(tl.float32)[None, :]
    sine = tl.load(turn_at + TURNED, mask=is_turned, other=0.0).to(dtype).to(tl.float32)[None, :]
    turned = (first * cosine).to(dtype).to(tl.float32) - second * sine
    other_turned = (second * cosine).to(dtype).to(tl.float32) + first * sine
    first = tl.where(turns, turned, first * value_scale).to(dtype)
    second = tl.where(turns, other_turned, second * value_scale).to(dtype)
    at = q_ptr + row * (NUM_HEADS * HEAD_SIZE) + head[:, None] * HEAD_SIZE
    stores = is_cell & is_query[:, None]
    tl.store(at + channel[None, :], first, mask=stores)
    tl.store(at + other_channel[None, :], second, mask=stores)
    side = tl.maximum(head - NUM_HEADS, 0) // NUM_KV_HEADS
    kv_head = tl.maximum(head - NUM_HEADS, 0) % NUM_KV_HEADS
    plane = side.to(tl.int64) * side_stride + kv_head.to(tl.int64) * head_stride
    at = planes_ptr + plane[:, None] + tl.load(row_ptr + row) * HEAD_SIZE
    stores = is_cell & (head >= NUM_HEADS)[:, None]
    tl.store(at + channel[None, :], first, mask=stores)
    tl.store(at + other_channel[None, :], second, mask=stores)


def place_heads_triton(
    qkv_TX: Tensor, qk_gains: tuple[Tensor, Tensor] | None, turns_T2R: Tensor, cells: Cells, form: HeadForm
) -> Tensor:
    """Launch one program per row and run of heads."""
    qkv_TX = qkv_TX.contiguous()
    num_rows = qkv_TX.shape[0]
    num_kv_heads, head_size = cells.planes.shape[1], cells.planes.shape[4]
    num_heads = form.num_heads + 2 * num_kv_heads
    pairs = triton.next_power_of_2(head_size // 2)
    heads = max(1, min(triton.next_power_of_2(num_heads), _LARGEST_TILE // pairs // (1 if num_rows > 256 else 4)))
    q_TNH = torch.empty((num_rows, form.num_heads, head_size), dtype=qkv_TX.dtype, device=qkv_TX.device)
    q_gain, k_gain = (qkv_TX, qkv_TX) if qk_gains is None else qk_gains
    with torch.cuda.device_of(qkv_TX):
        _place_heads_kernel[num_rows, triton.cdiv(num_heads, heads)](
            qkv_TX,
            q_gain,
            k_gain,
            turns_T2R.contiguous(),
            cells.rows_T.contiguous(),
            cells.planes,
            q_TNH,
            cells.planes.stride(0),
            cells.planes.stride(1),
            form.eps,
            form.value_scale,
            NUM_HEADS=form.num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_SIZE=head_size,
            TURNED=turns_T2R.shape[2],
            IS_NEOX=form.is_neox_style,
            HAS_QK_NORM=qk_gains is not None,
            HEADS=heads,
            PAIRS=pairs,
        )
    return q_TNH


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
