"""Gated delta rule over the rows of a pass (KDA): whole prompts, blocks to be verified, and states to roll back to.

`ops/delta_rows.py` has the formulas. Three uses of one recurrence, and of one kernel:

    delta_attention   a prompt or a training sequence: outputs and the state behind it
    verify_delta      a block of a step: outputs and records; the state waits for the verdict and `commit_delta`
    delta_snapshots   the state behind every row, the reference of rollback

Plain decoding is a block of one row. The chunked form is for prompts on a CPU and for training: it sums in another
order than the recurrent form, so exact comparisons use the latter throughout.

B requests, T rows, N heads, K key and V value channels, S slots.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.delta_commit import DeltaRecords
from paceline.ops.delta_kernel import EVERY_STATE, LAST_STATE, NO_STATE, launch_delta
from paceline.ops.delta_prompts import PromptKernel, run_prompt_kernel
from paceline.ops.delta_rows import (
    DeltaGate,
    DeltaInputs,
    DeltaRows,
    delta_rows,
    step_chunks,
    step_row,
    without_padding,
)
from paceline.ops.dispatch import choose, needs_gradient
from paceline.ops.elementwise import widen

__all__ = [
    "DeltaForm",
    "DeltaGate",
    "DeltaInputs",
    "DeltaRecords",
    "delta_attention",
    "delta_snapshots",
    "verify_delta",
]

DeltaForm = Literal["chunked", "recurrent"]
_SEGMENT = 128  # rows that the chunked form takes at once: it holds CHUNK * K weights for each, per head


def states_of(states_SNKV: Tensor, slots_B: Tensor | None) -> Tensor:
    """Each request's state, widened; zeros for a slot below 0, whatever lies at the end of the store."""
    if slots_B is None:
        return widen(states_SNKV)
    return widen(states_SNKV[slots_B.clamp(min=0)]).masked_fill((slots_B < 0).view(-1, 1, 1, 1), 0.0)


def delta_attention_reference(
    inputs: DeltaInputs,
    gate: DeltaGate,
    state_BNKV: Tensor,
    lengths_B: Tensor | None,
    form: DeltaForm,
    kernel: PromptKernel = "auto",
) -> tuple[Tensor, Tensor]:
    """The definition, recurrent or chunked, whatever the kernel would be."""
    rows, state_BNKV = delta_rows(inputs, gate), widen(state_BNKV)
    if lengths_B is not None:
        rows = without_padding(rows, lengths_B)
    num_rows, outputs = rows.q_BTNK.shape[1], []
    if form == "chunked":
        for start in range(0, num_rows, _SEGMENT):
            segment = DeltaRows(*(values[:, start : start + _SEGMENT] for values in rows))
            o_BTNV, _, state_BNKV = step_chunks(segment, state_BNKV, gate.lower_bound)
            outputs.append(o_BTNV)
        return torch.cat(outputs, dim=1).to(inputs.v_BTNV.dtype), state_BNKV
    for row in range(num_rows):
        o_BNV, _, state_BNKV = step_row(rows, row, state_BNKV)
        outputs.append(o_BNV)
    return torch.stack(outputs, dim=1).to(inputs.v_BTNV.dtype), state_BNKV


def verify_delta_reference(
    inputs: DeltaInputs,
    gate: DeltaGate,
    states_SNKV: Tensor,
    slots_B: Tensor,
    records: DeltaRecords,
    form: DeltaForm,
) -> Tensor:
    """The definition."""
    rows, state_BNKV = delta_rows(inputs, gate), states_of(states_SNKV, slots_B)
    records.key_BTNK.copy_(rows.k_BTNK)
    records.decay_BTNK.copy_(rows.g_BTNK.exp())
    if form == "chunked":
        o_BTNV, correction_BTNV, _ = step_chunks(rows, state_BNKV, gate.lower_bound)
        records.correction_BTNV.copy_(correction_BTNV)
        return o_BTNV.to(inputs.v_BTNV.dtype)
    outputs = []
    for row in range(rows.q_BTNK.shape[1]):
        o_BNV, correction_BNV, state_BNKV = step_row(rows, row, state_BNKV)
        records.correction_BTNV[:, row] = correction_BNV
        outputs.append(o_BNV)
    return torch.stack(outputs, dim=1).to(inputs.v_BTNV.dtype)


def delta_snapshots_reference(
    inputs: DeltaInputs, gate: DeltaGate, states_SNKV: Tensor, slots_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition."""
    rows, state_BNKV = delta_rows(inputs, gate), states_of(states_SNKV, slots_B)
    outputs, states = [], []
    for row in range(rows.q_BTNK.shape[1]):
        o_BNV, _, state_BNKV = step_row(rows, row, state_BNKV)
        outputs.append(o_BNV)
        states.append(state_BNKV)
    return torch.stack(outputs, dim=1).to(inputs.v_BTNV.dtype), torch.stack(states, dim=1)


def delta_attention_triton(
    inputs: DeltaInputs,
    gate: DeltaGate,
    state_BNKV: Tensor,
    lengths_B: Tensor | None,
    form: DeltaForm,
    kernel: PromptKernel = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrent kernel, or in chunks what `ops/delta_prompts.py` chooses."""
    if form == "chunked":
        return run_prompt_kernel(inputs, gate, state_BNKV, lengths_B, kernel)
    return launch_delta(inputs, gate, state_BNKV.contiguous(), None, lengths_B, None, LAST_STATE)


def verify_delta_triton(
    inputs: DeltaInputs,
    gate: DeltaGate,
    states_SNKV: Tensor,
    slots_B: Tensor,
    records: DeltaRecords,
    form: DeltaForm,
) -> Tensor:
    """The recurrent kernel, with records."""
    return launch_delta(inputs, gate, states_SNKV, slots_B, None, records, NO_STATE)[0]


def delta_snapshots_triton(
    inputs: DeltaInputs, gate: DeltaGate, states_SNKV: Tensor, slots_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrent kernel, with a state per row."""
    return launch_delta(inputs, gate, states_SNKV, slots_B, None, None, EVERY_STATE)


def delta_attention(
    inputs: DeltaInputs,
    gate: DeltaGate,
    state_BNKV: Tensor | None,
    *,
    form: DeltaForm,
    lengths_B: Tensor | None = None,
    kernel: PromptKernel = "auto",
) -> tuple[Tensor, Tensor]:
    """Run whole prompts or sequences.

    Args:
        inputs: projections of the rows; padding trails.
        gate: parameters of the decay.
        state_BNKV: float32 or bf16, the state before the first row; None: zeros. It is not changed.
        form: "recurrent" gives the bits of `verify_delta` and `commit_delta` row by row, and the same ones for every
            way to cut a text into passes; "chunked" agrees with it to rounding, on a GPU to that of `kernel`.
        lengths_B: int64; rows past them change nothing and have outputs of 0. None: all rows count.
        kernel: what runs the chunked form on a GPU where nothing is differentiated, see `ops/delta_prompts.py`.
    Returns:
        [B, T, N, V] in v's dtype, and the float32 state [B, N, K, V] behind each request's last row. Differentiable.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    num_requests, num_rows, num_heads, key_size = inputs.q_BTNK.shape
    value_size = inputs.v_BTNV.shape[-1]
    if state_BNKV is None:
        wide = torch.float64 if inputs.v_BTNV.dtype == torch.float64 else torch.float32
        shape = (num_requests, num_heads, key_size, value_size)
        state_BNKV = torch.zeros(shape, dtype=wide, device=inputs.v_BTNV.device)
    _check(inputs, gate, state_BNKV, None)
    if lengths_B is not None and lengths_B.shape != (num_requests,):
        raise ShapeError("lengths", expected=[num_requests], found=lengths_B.shape)
    if num_rows == 0 or num_requests == 0:
        return torch.zeros_like(inputs.v_BTNV), widen(state_BNKV).clone()
    if needs_gradient(*inputs, gate.a_log_N, gate.dt_bias_NK, state_BNKV):
        return delta_attention_reference(inputs, gate, state_BNKV, lengths_B, form)
    run = choose("delta_attention", inputs.v_BTNV, delta_attention_reference, delta_attention_triton)
    return run(inputs, gate, state_BNKV, lengths_B, form, kernel)


def verify_delta(
    inputs: DeltaInputs,
    gate: DeltaGate,
    states_SNKV: Tensor,
    slots_B: Tensor,
    records: DeltaRecords,
    *,
    form: DeltaForm = "recurrent",
) -> Tensor:
    """Run the rows of a step behind each request's state, which stays as it is until `commit_delta`.

    Args:
        inputs: projections of the anchor and the drafts; rows past a request's own are computed and never committed.
        gate: parameters of the decay.
        states_SNKV: float32 or bf16, one layer's; not changed.
        slots_B: int64; below 0 for rows of nobody, which begin with zeros.
        records: one layer's, [B, T, ..]; `correction`, `key` and `decay` are overwritten.
        form: as for `delta_attention`.
    Returns:
        [B, T, N, V] in v's dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    _check(inputs, gate, states_SNKV, slots_B)
    rows, value_size = inputs.q_BTNK.shape, inputs.v_BTNV.shape[-1]
    for name, values, shape in (
        ("correction", records.correction_BTNV, (*rows[:3], value_size)),
        ("key", records.key_BTNK, rows),
        ("decay", records.decay_BTNK, rows),
    ):
        if values.shape != shape:
            raise ShapeError(f"records.{name}", expected=shape, found=values.shape)
    if inputs.v_BTNV.numel() == 0:
        return torch.zeros_like(inputs.v_BTNV)
    run = choose("verify_delta", states_SNKV, verify_delta_reference, verify_delta_triton)
    return run(inputs, gate, states_SNKV, slots_B, records, form)


def delta_snapshots(
    inputs: DeltaInputs, gate: DeltaGate, states_SNKV: Tensor, slots_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of `verify_delta`, and the float32 state behind every row, [B, T, N, K, V]; arguments as there."""
    _check(inputs, gate, states_SNKV, slots_B)
    run = choose("delta_snapshots", states_SNKV, delta_snapshots_reference, delta_snapshots_triton)
    return run(inputs, gate, states_SNKV, slots_B)


def _check(inputs: DeltaInputs, gate: DeltaGate, states_SNKV: Tensor, slots_B: Tensor | None) -> None:
    num_requests, num_rows, num_heads, key_size = inputs.q_BTNK.shape
    num_states = num_requests if slots_B is None else states_SNKV.shape[0]
    value_size = inputs.v_BTNV.shape[-1]
    heads = (num_requests, num_rows, num_heads)
    for name, values, shape in (
        ("k", inputs.k_BTNK, (*heads, key_size)),
        ("v", inputs.v_BTNV, (*heads, value_size)),
        ("f", inputs.f_BTNK, (*heads, key_size)),
        ("b", inputs.b_BTN, heads),
        ("a_log", gate.a_log_N, (num_heads,)),
        ("dt_bias", gate.dt_bias_NK, (num_heads, key_size)),
        ("states", states_SNKV, (num_states, num_heads, key_size, value_size)),
    ):
        if values.shape != shape:
            raise ShapeError(name, expected=shape, found=values.shape)
    if slots_B is not None and slots_B.shape != (num_requests,):
        raise ShapeError("slots", expected=[num_requests], found=slots_B.shape)
