"""The kernel of the gated delta rule: `step_row` of `ops/delta_rows.py`, row after row, with gates and norms inside.

A program holds the state of one head and a run of value channels in registers, and reads each row's projections where
they lie. The number of rows is no part of the compiled code: a row must come out the same in a block of eight as alone.

B requests, T rows, N heads, K key and V value channels, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.delta_commit import DeltaRecords, replay_row
from paceline.ops.delta_rows import NORM_EPS, DeltaGate, DeltaInputs
from paceline.ops.dispatch import kernel, tl, triton

NO_STATE, LAST_STATE, EVERY_STATE = 0, 1, 2
_MOST_VALUES, _FEWEST_VALUES = 32, 8  # value channels per program
_WANTED_PROGRAMS = 512  # four warps on each of an H200's multiprocessors


class DeltaTile(NamedTuple):
    """How a head is shared: value channels per program, and its warps."""

    values: int
    warps: int


def choose_tile(num_heads: int, value_size: int) -> DeltaTile:
    """A cut of heads; rows have no part in it.

    One warp holds all key channels of its value channels, so sums over keys need no barrier. Many channels per program
    read each row less often; few of them let few heads fill a GPU.

    Args:
        num_heads: of all requests together.
        value_size: V.
    """
    values = _MOST_VALUES
    while values > _FEWEST_VALUES and num_heads * triton.cdiv(value_size, values) < _WANTED_PROGRAMS:
        values //= 2
    return DeltaTile(values, 1)


@kernel
def log_decay(f: tl.tensor, rate: tl.tensor, lower_bound: tl.tensor, IS_BOUNDED: tl.constexpr) -> tl.tensor:
    """g of logits with their bias added."""
    if IS_BOUNDED:
        g = lower_bound / (1.0 + tl.exp(-rate * f))
    else:
        # ln(1 + e) where 1 + e has lost digits of e: the rounded sum's logarithm, times what the rounding changed.
        e = tl.exp(tl.minimum(f, 20.0))
        sum_ = 1.0 + e
        logarithm = tl.where(sum_ == 1.0, e, tl.log(sum_) * e / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0))
        g = -rate * tl.where(f > 20.0, f, logarithm)
    return g


@kernel
def _delta_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    f_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    length_ptr: tl.tensor,
    o_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    key_ptr: tl.tensor,
    decay_ptr: tl.tensor,
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
    slot_stride: tl.tensor,
    correction_stride: tl.tensor,
    key_stride: tl.tensor,
    num_rows: tl.tensor,
    num_rows_and_one: tl.tensor,
    num_heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    query_scale: tl.tensor,
    lower_bound: tl.tensor,
    eps: tl.tensor,
    IS_BOUNDED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    RECORDS: tl.constexpr,
    KEEPS: tl.constexpr,
    LAST: tl.constexpr,
    EVERY: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k_at, v_at = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = k_at < key_size, v_at < value_size
    is_cell = is_key[:, None] & is_value[None, :]
    key_cell, value_cell = head * key_size + k_at, head * value_size + v_at
    state_cell = (head * key_size + k_at[:, None]) * value_size + v_at[None, :]
    state_size = num_heads * key_size * value_size  # of one request: far below 2^31; its offsets are int64
    slot = request
    if HAS_SLOTS:
        slot = tl.load(slot_ptr + request).to(tl.int64)
    state = tl.load(state_ptr + slot * slot_stride + state_cell, mask=is_cell & (slot >= 0), other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + key_cell, mask=is_key, other=0.0)
    length = num_rows_and_one - 1
    if HAS_LENGTHS:
        length = tl.load(length_ptr + request).to(tl.int32)
    for row in range(length):
        q_at = q_ptr + request * q_request_stride + row * q_row_stride + key_cell
        q = tl.load(q_at, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + request * k_request_stride + row * k_row_stride + key_cell, mask=is_key, other=0.0)
        v = tl.load(v_ptr + request * v_request_stride + row * v_row_stride + value_cell, mask=is_value, other=0.0)
        f = tl.load(f_ptr + request * f_request_stride + row * f_row_stride + key_cell, mask=is_key, other=0.0)
        b = tl.load(b_ptr + request * b_request_stride + row * b_row_stride + head).to(tl.float32)
        k = k.to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q) + eps) * query_scale
        k = k * tl.rsqrt(tl.sum(k * k) + eps)
        decay = tl.exp(log_decay(f.to(tl.float32) + dt_bias, rate, lower_bound, IS_BOUNDED))
        kept = tl.sum(state * decay[:, None] * k[:, None], axis=0)
        correction = (v.to(tl.float32) - kept) / (1.0 + tl.exp(-b))
        state = replay_row(state, k, correction, decay)
        o = tl.sum(state * q[:, None], axis=0)
        out_at = (request * num_rows + row) * num_heads * value_size + value_cell
        tl.store(o_ptr + out_at, o.to(o_ptr.dtype.element_ty), mask=is_value)
        if RECORDS:
            correction_at = correction_ptr + request * correction_stride + row * num_heads * value_size + value_cell
            tl.store(correction_at, correction, mask=is_value)
            key_offset = request * key_stride + row * num_heads * key_size + key_cell
            is_first = is_key & (tl.program_id(2) == 0)
            tl.store(key_ptr + key_offset, k, mask=is_first)
            tl.store(decay_ptr + key_offset, decay, mask=is_first)
        if KEEPS == EVERY:
            tl.store(new_state_ptr + (request * num_rows + row) * state_size + state_cell, state, mask=is_cell)
    if KEEPS == LAST:
        tl.store(new_state_ptr + request * state_size + state_cell, state, mask=is_cell)


def dense_fields(inputs: DeltaInputs) -> list[Tensor]:
    """The projections as kernels read them: any distance between requests and rows, heads and channels side by side.

    Args:
        inputs: q, k, v, f, and b, which gets channels of one.
    """
    return [_dense(values) for values in (*inputs[:4], inputs.b_BTN.unsqueeze(-1))]


def _dense(values: Tensor) -> Tensor:
    is_dense = values.stride(3) == 1 and values.stride(2) == values.shape[3]
    return values if is_dense else values.contiguous()


def launch_delta(
    inputs: DeltaInputs,
    gate: DeltaGate,
    states_SNKV: Tensor,
    slots_B: Tensor | None,
    lengths_B: Tensor | None,
    records: DeltaRecords | None,
    keeps: int,
    tile: DeltaTile | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch one program per request, head and run of value channels.

    Args:
        inputs: projections of the rows.
        gate: parameters of the decay.
        states_SNKV: float32 or bf16, contiguous within a slot.
        slots_B: each request's state; None: one per request. Below 0: zeros.
        lengths_B: rows past them are left out; None: all count.
        records: one layer's, written in place; None: none are kept.
        keeps: NO_STATE, LAST_STATE ([B, N, K, V]) or EVERY_STATE ([B, T, N, K, V]).
        tile: how a head is shared among programs; by default from `choose_tile`.
    Returns:
        The outputs, and new states, float32, as `keeps` says, empty for NO_STATE.
    """
    num_requests, num_rows, num_heads, key_size = inputs.q_BTNK.shape
    value_size = inputs.v_BTNV.shape[3]
    fields = dense_fields(inputs)
    # Rows past a length are left out by the kernel; without lengths every output is written.
    new_outputs = torch.empty if lengths_B is None else torch.zeros
    o_BTNV = new_outputs(inputs.v_BTNV.shape, dtype=inputs.v_BTNV.dtype, device=states_SNKV.device)
    shape = {NO_STATE: (0,), LAST_STATE: (num_requests,), EVERY_STATE: (num_requests, num_rows)}[keeps]
    new_states = states_SNKV.new_empty(*shape, num_heads, key_size, value_size, dtype=torch.float32)
    # Where there are no records, nothing is stored through these.
    correction, key, decay = (o_BTNV, o_BTNV, o_BTNV) if records is None else records[:3]
    tile = tile or choose_tile(num_requests * num_heads, value_size)
    values = min(tile.values, triton.next_power_of_2(value_size))
    with torch.cuda.device_of(states_SNKV):
        _delta_kernel[num_requests, num_heads, triton.cdiv(value_size, values)](
            *fields,
            gate.a_log_N.contiguous(),
            gate.dt_bias_NK.contiguous(),
            states_SNKV,
            states_SNKV if slots_B is None else slots_B.contiguous(),
            states_SNKV if lengths_B is None else lengths_B.contiguous(),
            o_BTNV,
            correction,
            key,
            decay,
            new_states,
            *(values_.stride(0) for values_ in fields),
            *(values_.stride(1) for values_ in fields),
            states_SNKV.stride(0),
            correction.stride(0),
            key.stride(0),
            num_rows,
            num_rows + 1,  # as the length of the loop: an integer argument of 1 is compiled in
            num_heads,
            key_size,
            value_size,
            key_size**-0.5,
            0.0 if gate.lower_bound is None else gate.lower_bound,
            NORM_EPS,
            IS_BOUNDED=gate.lower_bound is not None,
            HAS_SLOTS=slots_B is not None,
            HAS_LENGTHS=lengths_B is not None,
            RECORDS=records is not None,
            KEEPS=keeps,
            LAST=LAST_STATE,
            EVERY=EVERY_STATE,
            KEYS=triton.next_power_of_2(key_size),
            VALUES=values,
            num_warps=tile.warps,
        )
    return o_BTNV, new_states
