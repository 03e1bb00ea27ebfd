"""Gates, norms and steps of the gated delta rule: the worked table of the spec, and the chunk against single rows."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.delta_twin import random_gate, random_inputs, requests_of, rows_of, slow_delta
from torch import Tensor

from paceline.ops.delta_attention import delta_attention, delta_snapshots
from paceline.ops.delta_rows import DeltaGate, DeltaInputs, delta_rows, step_chunks, step_row, without_padding

# Spec 3.3: one head, two channels, two steps from the identity.
WORKED = DeltaInputs(
    torch.tensor([[[[1.0, 0.0]], [[3.0, 4.0]]]]),
    torch.tensor([[[[0.0, 2.0]], [[1.0, 1.0]]]]),
    torch.tensor([[[[1.0, -1.0]], [[2.0, 0.5]]]]),
    torch.tensor([[[[0.5, -0.3]], [[0.0, 1.0]]]]),
    torch.tensor([[[0.0], [1.0]]]),
)
A_LOG, DT_BIAS = torch.tensor([2.0]).log(), torch.tensor([[0.1, -0.2]])
EXPECTED = {
    -5.0: (
        [[-3.842624, -1.344707], [-2.749170, -4.160092]],
        [[0.015158, 0.0], [1.025158, 0.254694]],
        [[1.031891, 0.260577], [1.038322, 0.254808]],
    ),
    None: (
        [[-2.074976, -0.948154], [-1.488793, -2.342201]],
        [[0.088784, 0.0], [1.035046, 0.249870]],
        [[1.034282, 0.269228], [1.054008, 0.239791]],
    ),
}


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_the_worked_example(lower_bound: float | None) -> None:
    gate = DeltaGate(A_LOG, DT_BIAS, lower_bound)
    gates, outputs, state = (torch.tensor(values) for values in EXPECTED[lower_bound])
    found = delta_rows(WORKED, gate).g_BTNK
    torch.testing.assert_close(found[0, :, 0], gates, rtol=0, atol=2e-6)
    for form in ("recurrent", "chunked"):
        o, end = delta_attention(WORKED, gate, torch.eye(2)[None, None], form=form)
        torch.testing.assert_close(o[0, :, 0], outputs, rtol=0, atol=2e-6)
        torch.testing.assert_close(end[0, 0], state, rtol=0, atol=2e-6)
    o, states = delta_snapshots(WORKED, gate, torch.eye(2)[None, None], torch.tensor([0]))
    torch.testing.assert_close(o[0, :, 0], outputs, rtol=0, atol=2e-6)
    torch.testing.assert_close(states[0, 1, 0], state, rtol=0, atol=2e-6)


def test_a_bounded_gate_is_another_function_and_no_clamp() -> None:
    f = torch.tensor([[[[-30.0, 30.0]], [[0.0, 0.0]]]])
    inputs = WORKED._replace(f_BTNK=f)
    bounded = delta_rows(inputs, DeltaGate(A_LOG, DT_BIAS, -5.0)).g_BTNK[0, :, 0]
    unbounded = delta_rows(inputs, DeltaGate(A_LOG, DT_BIAS, None)).g_BTNK[0, :, 0]
    assert bounded[0].tolist() == pytest.approx([0.0, -5.0], abs=1e-6)
    assert unbounded[0].tolist() == pytest.approx([0.0, -2 * 29.8], abs=1e-4)  # softplus is linear there
    assert (bounded[1] - unbounded[1].clamp(min=-5)).abs().min() > 0.5


@pytest.mark.parametrize("lower_bound", [-5.0, -0.5, None])
@pytest.mark.parametrize(("num_heads", "key_size", "value_size"), [(1, 1, 1), (2, 3, 5), (1, 5, 2)])
def test_one_row_after_the_other_agrees_with_the_slow_twin(
    lower_bound: float | None, num_heads: int, key_size: int, value_size: int
) -> None:
    inputs, gate = (
        random_inputs(2, 4, num_heads, key_size, value_size),
        random_gate(num_heads, key_size, lower_bound=lower_bound),
    )
    start = torch.randn(2, num_heads, key_size, value_size)
    rows, state = delta_rows(inputs, gate), start
    slow = [slow_delta(inputs, gate, start[request], request=request) for request in range(2)]
    for t in range(4):
        o, _, state = step_row(rows, t, state)
        for request in range(2):
            torch.testing.assert_close(o[request].double(), slow[request].outputs[t], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(state[request].double(), slow[request].states[t], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(rows.g_BTNK[request].double(), slow[request].gates, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, -7.0, None])
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 40])
def test_chunks_are_their_rows(lower_bound: float | None, num_rows: int) -> None:
    inputs, gate = random_inputs(2, num_rows, 2, 4, 3), random_gate(2, 4, lower_bound=lower_bound)
    wide = DeltaInputs(*(values.double() for values in inputs))
    wide_gate = DeltaGate(gate.a_log_N.double(), gate.dt_bias_NK.double(), lower_bound)
    rows, state = delta_rows(wide, wide_gate), torch.randn(2, 2, 4, 3, dtype=torch.float64)
    o, corrections, end = step_chunks(rows, state, lower_bound)
    for t in range(num_rows):
        expected_o, expected_correction, state = step_row(rows, t, state)
        torch.testing.assert_close(o[:, t], expected_o, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(corrections[:, t], expected_correction, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(end, state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("lower_bound", "a_log"), [(-5.0, 0.0), (-10.0, 0.0), (-40.0, 0.0), (None, 0.0), (None, 3.0)])
def test_strong_decay_does_not_overflow(lower_bound: float | None, a_log: float) -> None:
    """32 rows at g = -5 sum to -160, and without a bound to -64000: exp of the opposite is infinite in float32."""
    inputs = random_inputs(1, 32, 1, 4, 4)
    inputs = inputs._replace(f_BTNK=torch.full((1, 32, 1, 4), 100.0))
    gate = DeltaGate(torch.full((1,), a_log), torch.zeros(1, 4), lower_bound)
    rows = delta_rows(inputs, gate)
    assert float(rows.g_BTNK.sum(1).max()) < -159
    start = torch.randn(1, 1, 4, 4)
    o, _, end = step_chunks(rows, start, lower_bound)
    state = start
    for t in range(32):
        expected, _, state = step_row(rows, t, state)
        torch.testing.assert_close(o[:, t], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end, state, rtol=1e-4, atol=1e-5)


def test_strong_decay_has_finite_gradients() -> None:
    """Above the diagonal exp is infinite, and what is masked behind it has the gradient 0 * inf."""
    inputs = random_inputs(1, 16, 1, 4, 4)
    f = torch.full((1, 16, 1, 4), 30.0, requires_grad=True)
    gate = DeltaGate(torch.zeros(1), torch.zeros(1, 4), None)
    o, end = delta_attention(inputs._replace(f_BTNK=f), gate, None, form="chunked")
    assert torch.isfinite(torch.autograd.grad(o.sum() + end.sum(), f)[0]).all()


@pytest.mark.parametrize("lower_bound", [-5.0, -10.0])
def test_gates_from_none_to_the_bound_within_a_chunk(lower_bound: float) -> None:
    """Half of the rows forget nothing and half all: the largest and the smallest factors of the bounded form."""
    inputs = random_inputs(1, 16, 1, 4, 4)
    for first in (-100.0, 100.0):
        f = torch.full((1, 16, 1, 4), first)
        f[:, 8:] = -first
        gate = DeltaGate(torch.zeros(1), torch.zeros(1, 4), lower_bound)
        rows, state = delta_rows(inputs._replace(f_BTNK=f), gate), torch.randn(1, 1, 4, 4)
        o, _, end = step_chunks(rows, state, lower_bound)
        for t in range(16):
            expected, _, state = step_row(rows, t, state)
            torch.testing.assert_close(o[:, t], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(end, state, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing_whatever_it_holds() -> None:
    inputs, gate = random_inputs(3, 5, 2, 3, 4), random_gate(2, 3, lower_bound=None)
    lengths = torch.tensor([0, 2, 5])
    for values in inputs:
        values[0] = torch.nan
        values[1, 2:] = torch.nan
    rows = without_padding(delta_rows(inputs, gate), lengths)
    start = torch.randn(3, 2, 3, 4)
    state = start
    for t in range(5):
        o, _, state = step_row(rows, t, state)
        if t >= 2:
            assert not o[:2].any(), "nothing is read there"
    chunk_o, _, chunk_end = step_chunks(rows, start, gate.lower_bound)
    assert torch.equal(state[0], start[0])
    assert torch.isfinite(chunk_o).all() and torch.isfinite(chunk_end).all()
    torch.testing.assert_close(chunk_end, state, rtol=1e-5, atol=1e-6)
    short = rows_of(requests_of(inputs, [1]), slice(0, 2))
    assert torch.equal(delta_attention(short, gate, start[1:2], form="recurrent")[1][0], state[1])


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradients(form: str, lower_bound: float | None) -> None:
    inputs = [values.double() for values in random_inputs(1, 3, 1, 2, 2)]
    gate = random_gate(1, 2, lower_bound=lower_bound)
    state = torch.randn(1, 1, 2, 2, dtype=torch.float64)
    leaves = [t.double().requires_grad_() for t in (*inputs, gate.a_log_N, gate.dt_bias_NK, state)]

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        gate = DeltaGate(values[5], values[6], lower_bound)
        return delta_attention(DeltaInputs(*values[:5]), gate, values[7], form=form)

    assert torch.autograd.gradcheck(run, leaves)
