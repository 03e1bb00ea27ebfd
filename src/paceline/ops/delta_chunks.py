"""The kernel of the gated delta rule in chunks, for prompts: `step_chunks` of `ops/delta_rows.py`, a chunk per turn.

A program holds the state of one head and a run of value channels. Within a chunk of 16 rows everything is a product of
small matrices: the weights between its rows, the triangular system of its corrections, the outputs, and the state
behind it. So a prompt takes a sixteenth of the turns that it takes row by row. Weights between two rows are products of
a factor of each, taken to the chunk's middle row, which float32 holds only for bounded gates (`can_chunk`).

B requests, T rows, N heads, K key and V value channels; C rows of a chunk.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paceline.ops.delta_kernel import DeltaTile, dense_fields, log_decay
from paceline.ops.delta_rows import MOST_DECAY, NORM_EPS, DeltaGate, DeltaInputs
from paceline.ops.dispatch import kernel, tl, triton

_CHUNK: Final = 16
_FEWEST = 16  # the smallest side of a matrix product on tensor cores
_TILE = DeltaTile(values=32, warps=8)
# Norm of the difference from the recurrence over its norm, for rows in 16 bits: outputs, states. On an H200 2.8e-3 and
# 8e-4 at any length; with three products each 5e-5 and 4e-7, in 1.8 times the time (docs/results/gpu-recurrent.json).
TOLERANCE: Final = (5e-3, 2e-3)


def can_chunk(gate: DeltaGate) -> bool:
    """Whether a chunk's weights are products of factors that float32 holds."""
    return can_chunk_bound(gate.lower_bound)


def can_chunk_bound(lower_bound: float | None) -> bool:
    """The same, of a gate's lower bound."""
    return lower_bound is not None and lower_bound >= -MOST_DECAY


@kernel
def _row_of(values: tl.tensor, row: tl.tensor, index: tl.tensor) -> tl.tensor:
    """One row of a tile."""
    return tl.sum(tl.where(row[:, None] == index, values, 0.0), axis=0)


@kernel
def _inverse(
    lower: tl.tensor, place: tl.tensor, ROWS: tl.constexpr, BY_PRODUCTS: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """(1 - L)^-1 - 1 of a strictly lower L."""
    inverse = lower
    if BY_PRODUCTS:
        # (1 + L)(1 + L^2)(1 + L^4)(1 + L^8): L^16 is 0. A few products in place of a barrier or two per row.
        tl.static_assert(ROWS == 16)
        power = lower
        for _ in tl.static_range(3):
            power = tl.dot(power, power, input_precision=PRECISION)
            inverse += power + tl.dot(inverse, power, input_precision=PRECISION)
    else:
        for index in tl.static_range(1, ROWS):  # each row needs those above it
            one = _row_of(lower, place, index)
            one += tl.sum(one[:, None] * inverse, axis=0)
            inverse = tl.where(place[:, None] == index, one[None, :], inverse)
    return inverse


@kernel
def _delta_chunks_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    f_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    length_ptr: tl.tensor,
    o_ptr: tl.tensor,
    new_state_ptr: tl.tensor,
    q_request_stride: tl.tensor,
    k_request_stride: tl.tensor,
    v_request_stride: tl.tensor,
    f_request_stride: tl.tensor,
    b_request_stride: tl.tensor,
    q_row_stride: tl.tensor,
    k_row_stride: tl.tensor,
    v_row_stride: tl.tensor,
    f_row_stride: tl.tensor,
    b_row_stride: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    query_scale: tl.tensor,
    lower_bound: tl.tensor,
    eps: tl.tensor,
    HAS_LENGTHS: tl.constexpr,
    BY_PRODUCTS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k_at, v_at = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = k_at < key_size, v_at < value_size
    key_cell, value_cell = head * key_size + k_at[None, :], head * value_size + v_at[None, :]
    state_cell = (head * key_size + k_at[:, None]) * value_size + v_at[None, :]
    is_cell = is_key[:, None] & is_value[None, :]
    state_at = request * num_heads * key_size * value_size + state_cell
    state = tl.load(state_ptr + state_at, mask=is_cell, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head * key_size + k_at, mask=is_key, other=0.0)
    length = num_rows
    if HAS_LENGTHS:
        length = tl.load(length_ptr + request).to(tl.int32)
    place = tl.arange(0, ROWS)
    is_earlier = place[:, None] > place[None, :]
    for chunk in range(tl.cdiv(length, ROWS)):
        row = chunk * ROWS + place
        is_row = row < length
        inside = is_row[:, None] & is_key[None, :]
        q = tl.load(q_ptr + request * q_request_stride + row[:, None] * q_row_stride + key_cell, mask=inside, other=0.0)
        k = tl.load(k_ptr + request * k_request_stride + row[:, None] * k_row_stride + key_cell, mask=inside, other=0.0)
        f = tl.load(f_ptr + request * f_request_stride + row[:, None] * f_row_stride + key_cell, mask=inside, other=0.0)
        b = tl.load(b_ptr + request * b_request_stride + row * b_row_stride + head, mask=is_row, other=0.0)
        v_from = v_ptr + request * v_request_stride + row[:, None] * v_row_stride + value_cell
        v = tl.load(v_from, mask=is_row[:, None] & is_value[None, :], other=0.0).to(tl.float32)
        q, k = q.to(tl.float32), k.to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=1) + eps) * query_scale)[:, None]
        k = k * tl.rsqrt(tl.sum(k * k, axis=1) + eps)[:, None]
        # Rows past the end change nothing: no decay, no key, nothing to correct.
        g = tl.where(inside, log_decay(f.to(tl.float32) + dt_bias[None, :], rate, lower_bound, True), 0.0)
        beta = tl.where(is_row, 1.0 / (1.0 + tl.exp(-b.to(tl.float32))), 0.0)
        sums = tl.cumsum(g, axis=0)
        shifted = sums - _row_of(sums, place, ROWS // 2)[None, :]
        later, earlier = tl.exp(shifted), tl.trans(k * tl.exp(-shifted))
        of_keys = tl.dot(later * k, earlier, input_precision=PRECISION)
        of_queries = tl.dot(later * q, earlier, input_precision=PRECISION)
        of_queries = tl.where(place[:, None] >= place[None, :], of_queries, 0.0)
        inverse = _inverse(tl.where(is_earlier, -beta[:, None] * of_keys, 0.0), place, ROWS, BY_PRODUCTS, PRECISION)
        decayed = tl.exp(sums)
        wanted = beta[:, None] * (v - tl.dot(decayed * k, state, input_precision=PRECISION))
        correction = wanted + tl.dot(inverse, wanted, input_precision=PRECISION)
        o = tl.dot(decayed * q, state, input_precision=PRECISION)
        o += tl.dot(of_queries, correction, input_precision=PRECISION)
        o_at = o_ptr + ((request * num_rows + row[:, None]) * num_heads * value_size + value_cell)
        tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=is_row[:, None] & is_value[None, :])
        last = _row_of(sums, place, ROWS - 1)
        left = tl.trans(tl.exp(last[None, :] - sums) * k)
        state = state * tl.exp(last)[:, None] + tl.dot(left, correction, input_precision=PRECISION)
    tl.store(new_state_ptr + state_at, state, mask=is_cell)


def delta_chunks_triton(
    inputs: DeltaInputs,
    gate: DeltaGate,
    state_BNKV: Tensor,
    lengths_B: Tensor | None,
    *,
    tile: DeltaTile = _TILE,
    precision: str | None = None,
    by_products: bool = True,
) -> tuple[Tensor, Tensor]:
    """Launch one program per request, head and run of value channels.

    Args:
        inputs: projections of the rows.
        gate: bounded (`can_chunk`).
        state_BNKV: before the first row; it is not changed.
        lengths_B: int64, rows past them are left out; None: all count.
        tile: how a head is shared among programs.
        precision: of the products of float32: "ieee", three of tensor cores' ("tf32x3"), or one ("tf32"). None is one
            for rows in 16 bits, which are no more exact themselves (`TOLERANCE`), else three.
        by_products: how a chunk's triangular system is solved; else row by row.
    Returns:
        The outputs, and the float32 states behind each request's last row.
    """
    num_requests, num_rows, num_heads, key_size = inputs.q_BTNK.shape
    value_size = inputs.v_BTNV.shape[3]
    fields = dense_fields(inputs)
    state_BNKV = state_BNKV.contiguous()
    new_outputs = torch.empty if lengths_B is None else torch.zeros
    o_BTNV = new_outputs(inputs.v_BTNV.shape, dtype=inputs.v_BTNV.dtype, device=state_BNKV.device)
    new_state_BNKV = torch.empty(state_BNKV.shape, dtype=torch.float32, device=state_BNKV.device)
    if precision is None:
        precision = "tf32" if inputs.q_BTNK.dtype in (torch.bfloat16, torch.float16) else "tf32x3"
    values = max(_FEWEST, min(tile.values, triton.next_power_of_2(value_size)))
    with torch.cuda.device_of(state_BNKV):
        _delta_chunks_kernel[num_requests, num_heads, triton.cdiv(value_size, values)](
            *fields,
            gate.a_log_N.contiguous(),
            gate.dt_bias_NK.contiguous(),
            state_BNKV,
            state_BNKV if lengths_B is None else lengths_B.contiguous(),
            o_BTNV,
            new_state_BNKV,
            *(field.stride(0) for field in fields),
            *(field.stride(1) for field in fields),
            num_rows,
            num_heads,
            key_size,
            value_size,
            key_size**-0.5,
            gate.lower_bound,
            NORM_EPS,
            HAS_LENGTHS=lengths_B is not None,
            BY_PRODUCTS=by_products,
            PRECISION=precision,
            ROWS=_CHUNK,
            KEYS=max(_FEWEST, triton.next_power_of_2(key_size)),
            VALUES=values,
            num_warps=tile.warps,
        )
    return o_BTNV, new_state_BNKV
