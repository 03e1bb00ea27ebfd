"""The kernel of the gated delta rule, in all its uses, against the references."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.delta_twin import random_gate, random_inputs, requests_of, rows_of

from paceline.ops.delta_attention import (
    delta_attention_reference,
    delta_attention_triton,
    delta_snapshots_reference,
    delta_snapshots_triton,
    verify_delta_reference,
    verify_delta_triton,
)
from paceline.ops.delta_commit import DeltaRecords
from paceline.ops.delta_kernel import choose_tile
from paceline.ops.delta_rows import DeltaGate, DeltaInputs

SHAPES = [(1, 1, 1, 1, 1), (2, 3, 2, 5, 7), (2, 4, 1, 8, 40)]  # requests, rows, heads, key and value channels


def there(values: DeltaInputs, device: torch.device) -> DeltaInputs:
    return DeltaInputs(*(v.to(device) for v in values))


def gate_there(gate: DeltaGate, device: torch.device) -> DeltaGate:
    return DeltaGate(gate.a_log_N.to(device), gate.dt_bias_NK.to(device), gate.lower_bound)


def poisoned_records(inputs: DeltaInputs, device: torch.device, *, num_spare_rows: int = 0) -> DeltaRecords:
    num_requests, num_rows, num_heads, key_size = inputs.q_BTNK.shape
    stacked = DeltaRecords.allocate(
        1,
        num_requests,
        num_rows + num_spare_rows,
        num_heads,
        key_size,
        inputs.v_BTNV.shape[3],
        num_channels=1,
        dtype=torch.float32,
        device=device,
    )
    for values in stacked:
        values.fill_(torch.nan)
    return stacked.rows(num_requests, num_rows).layer(0)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if found.dtype == torch.float32 else 2**-6  # the interpreter cuts down to bf16
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_verification_and_its_records(
    kernel_device: torch.device, dtype: torch.dtype, lower_bound: float | None, shape: tuple[int, ...]
) -> None:
    inputs, gate = random_inputs(*shape, dtype), random_gate(shape[2], shape[3], lower_bound=lower_bound)
    states = torch.randn(4, *shape[2:])
    states[-1], states[1] = torch.nan, torch.nan
    slots = torch.tensor([2, -1])[: shape[0]]
    records = poisoned_records(inputs, torch.device("cpu"))
    found_records = poisoned_records(inputs, kernel_device, num_spare_rows=2)
    expected = verify_delta_reference(inputs, gate, states, slots, records, "recurrent")
    found_states = states.to(kernel_device)
    found = verify_delta_triton(
        there(inputs, kernel_device),
        gate_there(gate, kernel_device),
        found_states,
        slots.to(kernel_device),
        found_records,
        "recurrent",
    )
    assert found.dtype == dtype
    close(found, expected)
    for ours, theirs in zip(found_records[:3], records[:3], strict=True):
        close(ours, theirs)
    assert torch.equal(found_states.cpu().nan_to_num(9.0), states.nan_to_num(9.0))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_lengths", [True, False])
def test_prompts_and_snapshots(
    kernel_device: torch.device, lower_bound: float | None, shape: tuple[int, ...], has_lengths: bool
) -> None:
    inputs, gate = random_inputs(*shape), random_gate(shape[2], shape[3], lower_bound=lower_bound)
    state = torch.randn(shape[0], *shape[2:])
    lengths = torch.tensor([shape[1] - 1, shape[1]])[: shape[0]] if has_lengths else None
    if has_lengths:
        for values in inputs:
            values[0, shape[1] - 1 :] = torch.nan
    inputs_there, on_device = there(inputs, kernel_device), gate_there(gate, kernel_device)
    expected = delta_attention_reference(inputs, gate, state, lengths, "recurrent")
    lengths_there = None if lengths is None else lengths.to(kernel_device)
    found = delta_attention_triton(inputs_there, on_device, state.to(kernel_device), lengths_there, "recurrent")
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    if not has_lengths:
        slots = torch.arange(shape[0])
        expected = delta_snapshots_reference(inputs, gate, state, slots)
        found = delta_snapshots_triton(inputs_there, on_device, state.to(kernel_device), slots.to(kernel_device))
        for ours, theirs in zip(found, expected, strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_narrow_states_are_read_as_wide_ones(kernel_device: torch.device, lower_bound: float | None) -> None:
    """States kept in bf16 give what their float32 copies give, and what comes out of a prompt is float32."""
    inputs, gate = random_inputs(2, 3, 2, 5, 7), random_gate(2, 5, lower_bound=lower_bound)
    inputs_there, gate_on_device = there(inputs, kernel_device), gate_there(gate, kernel_device)
    narrow = torch.randn(2, 2, 5, 7).bfloat16()
    slots, on_device = torch.arange(2), (narrow.to(kernel_device), narrow.float().to(kernel_device))
    kept = []
    for states in on_device:
        records = poisoned_records(inputs, kernel_device)
        o = verify_delta_triton(inputs_there, gate_on_device, states, slots.to(kernel_device), records, "recurrent")
        answer, behind = delta_attention_triton(inputs_there, gate_on_device, states, None, "recurrent")
        every = delta_snapshots_triton(inputs_there, gate_on_device, states, slots.to(kernel_device))[1]
        assert behind.dtype == every.dtype == torch.float32
        kept.append((o, *records[:3], answer, behind, every))
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))
    for form in ("recurrent", "chunked"):
        results = []
        for states in (narrow, narrow.float()):
            records = poisoned_records(inputs, torch.device("cpu"))
            o = verify_delta_reference(inputs, gate, states, slots, records, form)
            results.append((o, *records[:3], *delta_attention_reference(inputs, gate, states, None, form)))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_row_is_the_same_in_a_block_and_alone(kernel_device: torch.device) -> None:
    inputs, gate = there(random_inputs(2, 4, 1, 8, 8), kernel_device), random_gate(1, 8, lower_bound=-5.0)
    gate = gate_there(gate, kernel_device)
    state = torch.randn(2, 1, 8, 8).to(kernel_device)
    whole, end = delta_attention_triton(inputs, gate, state, None, "recurrent")
    _, snapshots = delta_snapshots_triton(inputs, gate, state, torch.arange(2).to(kernel_device))
    one = state[1:]
    for row in range(4):
        alone = rows_of(requests_of(inputs, slice(1, 2)), slice(row, row + 1))
        o, one = delta_attention_triton(alone, gate, one, None, "recurrent")
        assert torch.equal(o[0, 0], whole[1, row]) and torch.equal(one[0], snapshots[1, row])
    assert torch.equal(one[0], end[1])


def test_gates_far_out(kernel_device: torch.device) -> None:
    """Logits where exp overflows or 1 + exp loses its digits."""
    f = torch.tensor([-100.0, -20.0, -9.0, 19.9, 20.1, 100.0]).view(1, 1, 1, 6)
    inputs = random_inputs(1, 1, 1, 6, 1)._replace(f_BTNK=f)
    for lower_bound in (-5.0, None):
        gate = DeltaGate(torch.tensor([-1.0]), torch.zeros(1, 6), lower_bound)
        records, found = poisoned_records(inputs, torch.device("cpu")), poisoned_records(inputs, kernel_device)
        states, slots = torch.zeros(1, 1, 6, 1), torch.tensor([0])
        verify_delta_reference(inputs, gate, states, slots, records, "recurrent")
        verify_delta_triton(
            there(inputs, kernel_device),
            gate_there(gate, kernel_device),
            states.to(kernel_device),
            slots.to(kernel_device),
            found,
            "recurrent",
        )
        torch.testing.assert_close(found.decay_BTNK.cpu(), records.decay_BTNK, rtol=1e-5, atol=1e-30)


def test_few_heads_are_cut_finer_and_rows_have_no_part_in_it() -> None:
    assert [choose_tile(heads, 128).values for heads in (32, 64, 128, 1024)] == [8, 16, 32, 32]
    assert all(choose_tile(heads, 128).warps == 1 for heads in (1, 4096))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_bf16_are_read_as_the_numbers_that_they_are(kernel_device: torch.device, dtype: torch.dtype) -> None:
    """By a block and by a prompt; sums over keys may have another order, and nothing else."""
    inputs, gate = random_inputs(2, 5, 2, 64, 16, dtype), random_gate(2, 64, lower_bound=-5.0)
    inputs_there, on_device = there(inputs, kernel_device), gate_there(gate, kernel_device)
    narrow = torch.randn(4, 2, 64, 16).bfloat16().to(kernel_device)
    slots = torch.tensor([2, 0], device=kernel_device)
    found = []
    for states in (narrow, narrow.float()):
        records = poisoned_records(inputs, kernel_device)
        o_BTNV = verify_delta_triton(inputs_there, on_device, states, slots, records, "recurrent")
        prompt = delta_attention_triton(inputs_there, on_device, states[:2], None, "recurrent")
        found.append((o_BTNV, *records[:3], *prompt))
    for of_narrow, of_wide in zip(*found, strict=True):
        assert of_narrow.dtype == of_wide.dtype
        tolerance = 2**-7 if of_wide.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(of_narrow, of_wide, rtol=tolerance, atol=tolerance)
