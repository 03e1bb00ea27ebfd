"""The chunked kernel of the delta rule against its definition: odd lengths, padding, edges of chunks, strong decay."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.delta_twin import random_gate, random_inputs

from paceline.ops.delta_attention import delta_attention_reference
from paceline.ops.delta_chunks import TOLERANCE, can_chunk, delta_chunks_triton
from paceline.ops.delta_rows import DeltaGate, DeltaInputs


def moved(inputs: DeltaInputs, device: torch.device) -> DeltaInputs:
    return DeltaInputs(*(values.to(device) for values in inputs))


def on(gate: DeltaGate, device: torch.device) -> DeltaGate:
    return DeltaGate(gate.a_log_N.to(device), gate.dt_bias_NK.to(device), gate.lower_bound)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # above the diagonal, where nothing is read
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("lower_bound", [-5.0, -10.0, -0.1])
@pytest.mark.parametrize(
    ("rows", "keys", "values", "by_products"),
    [(1, 8, 8, True), (17, 5, 7, False), (17, 5, 7, True), (39, 24, 33, True)],
)
def test_the_kernel_agrees_with_the_recurrence(
    kernel_device: torch.device, rows: int, keys: int, values: int, lower_bound: float, by_products: bool
) -> None:
    inputs, gate = random_inputs(2, rows, 2, keys, values), random_gate(2, keys, lower_bound=lower_bound)
    state = torch.randn(2, 2, keys, values)
    expected = delta_attention_reference(inputs, gate, state, None, "recurrent")
    there = (moved(inputs, kernel_device), on(gate, kernel_device), state.to(kernel_device))
    found = delta_chunks_triton(*there, None, by_products=by_products)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


def test_rows_past_a_length_change_nothing_and_are_zero(kernel_device: torch.device) -> None:
    inputs, gate = random_inputs(3, 20, 2, 8, 8), random_gate(2, 8, lower_bound=-5.0)
    state, lengths = torch.randn(3, 2, 8, 8), torch.tensor([20, 0, 5])
    for values in inputs:
        values[1], values[2, 5:] = torch.nan, torch.nan
    expected = delta_attention_reference(inputs, gate, state, lengths, "recurrent")
    there = (moved(inputs, kernel_device), on(gate, kernel_device), state.to(kernel_device))
    o, new_state = (part.cpu() for part in delta_chunks_triton(*there, lengths.to(kernel_device)))
    torch.testing.assert_close(o, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new_state, expected[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(new_state[1], state[1]) and not o[2, 5:].any()


def test_a_text_cut_in_two_goes_on_where_it_was(kernel_device: torch.device) -> None:
    inputs, gate = random_inputs(1, 37, 1, 8, 8), random_gate(1, 8, lower_bound=-5.0)
    there, own_gate = moved(inputs, kernel_device), on(gate, kernel_device)
    state = torch.zeros(1, 1, 8, 8, device=kernel_device)
    whole, end = delta_chunks_triton(there, own_gate, state, None)
    first, between = delta_chunks_triton(DeltaInputs(*(part[:, :21] for part in there)), own_gate, state, None)
    second, last = delta_chunks_triton(DeltaInputs(*(part[:, 21:] for part in there)), own_gate, between, None)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, end, rtol=1e-4, atol=1e-4)


def test_gates_that_forget_at_once_are_left_to_the_recurrence() -> None:
    gate = random_gate(1, 4, lower_bound=-5.0)
    assert can_chunk(gate) and not can_chunk(gate._replace(lower_bound=None))
    assert not can_chunk(gate._replace(lower_bound=-10.5))


@pytest.mark.gpu
@torch.inference_mode()
def test_rows_in_16_bits_are_followed_to_their_own_rounding() -> None:
    device = torch.device("cuda")
    inputs = moved(random_inputs(2, 200, 4, 64, 64, torch.bfloat16), device)
    gate, state = on(random_gate(4, 64, lower_bound=-5.0), device), torch.randn(2, 4, 64, 64, device=device)
    expected = delta_attention_reference(inputs, gate, state, None, "recurrent")
    errors = {}
    for precision in (None, "tf32x3"):
        found = delta_chunks_triton(inputs, gate, state, None, precision=precision)
        pairs = zip(found, expected, strict=True)
        errors[precision] = [
            float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs
        ]
    assert all(error < most for error, most in zip(errors[None], TOLERANCE, strict=True)), errors
    assert errors["tf32x3"][1] < 1e-5 < errors[None][1], "rows in 16 bits take one product"
