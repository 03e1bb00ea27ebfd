"""Gated delta rule over passes: forms, cuts, padding, records, snapshots, and what the public functions refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ops.delta_twin import random_gate, random_inputs, requests_of, rows_of, slow_delta
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.delta_attention import DeltaForm, delta_attention, delta_snapshots, verify_delta
from paceline.ops.delta_commit import DeltaRecords
from paceline.ops.delta_rows import DeltaGate, DeltaInputs

FORMS: list[DeltaForm] = ["recurrent", "chunked"]


def records_for(inputs: DeltaInputs) -> DeltaRecords:
    num_requests, num_rows, num_heads, key_size = inputs.q_BTNK.shape
    stacked = DeltaRecords.allocate(
        1,
        num_requests,
        num_rows,
        num_heads,
        key_size,
        inputs.v_BTNV.shape[3],
        num_channels=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for values in stacked:
        values.fill_(torch.nan)
    return stacked.layer(0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_prompts_agree_with_the_slow_twin(form: DeltaForm, lower_bound: float | None) -> None:
    inputs, gate = random_inputs(2, 5, 2, 3, 5), random_gate(2, 3, lower_bound=lower_bound)
    start = torch.randn(2, 2, 3, 5)
    for state in (start, None):
        o, end = delta_attention(inputs, gate, state, form=form)
        for request in range(2):
            first = torch.zeros(2, 3, 5) if state is None else state[request]
            slow = slow_delta(inputs, gate, first, request=request)
            torch.testing.assert_close(o[request].double(), slow.outputs, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(end[request].double(), slow.states[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 70])
def test_chunks_agree_with_single_rows(lower_bound: float | None, num_rows: int) -> None:
    inputs, gate = random_inputs(2, num_rows, 2, 8, 4), random_gate(2, 8, lower_bound=lower_bound)
    start, lengths = torch.randn(2, 2, 8, 4), torch.tensor([num_rows, num_rows // 2])
    chunked = delta_attention(inputs, gate, start, form="chunked", lengths_B=lengths)
    recurrent = delta_attention(inputs, gate, start, form="recurrent", lengths_B=lengths)
    for ours, theirs in zip(chunked, recurrent, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@given(cuts=st.lists(st.integers(0, 12), max_size=3), width=st.sampled_from([2, 5, 16]), seed=st.integers(0, 100))
def test_a_text_may_be_cut_anywhere(cuts: list[int], width: int, seed: int) -> None:
    """Bit for bit in the recurrent form, to rounding in the chunked one, whatever other requests there are."""
    generator = torch.Generator().manual_seed(seed)
    inputs = random_inputs(2, 12, 3, width, width, torch.bfloat16, generator=generator)
    gate = random_gate(3, width, lower_bound=-5.0)
    for form in FORMS:
        whole, end = delta_attention(inputs, gate, None, form=form)
        state, parts = torch.zeros(1, 3, width, width), []
        bounds = [0, *sorted(cuts), 12]
        for first, last in itertools.pairwise(bounds):
            alone = rows_of(requests_of(inputs, slice(1, 2)), slice(first, last))
            o, state = delta_attention(alone, gate, state, form=form)
            parts.append(o)
        if form == "recurrent":
            assert torch.equal(torch.cat(parts, dim=1), whole[1:]) and torch.equal(state, end[1:])
        else:
            torch.testing.assert_close(torch.cat(parts, dim=1), whole[1:], rtol=2**-6, atol=1e-3)
            torch.testing.assert_close(state, end[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_lengths_end_requests_early(form: DeltaForm) -> None:
    inputs, gate = random_inputs(3, 6, 2, 4, 4), random_gate(2, 4, lower_bound=-5.0)
    start, lengths = torch.randn(3, 2, 4, 4), torch.tensor([0, 4, 6])
    for values in inputs:
        values[0], values[1, 4:] = torch.nan, torch.nan
    o, end = delta_attention(inputs, gate, start, form=form, lengths_B=lengths)
    assert torch.isfinite(o).all() and not o[0].any() and not o[1, 4:].any()
    assert torch.equal(end[0], start[0])
    alone = rows_of(requests_of(inputs, [1]), slice(0, 4))
    expected = delta_attention(alone, gate, start[1:2], form=form)
    torch.testing.assert_close(o[1:2, :4], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(end[1:2], expected[1], rtol=1e-5, atol=1e-6)


def test_a_block_is_verified_with_the_bits_of_plain_decoding_and_leaves_the_states() -> None:
    inputs, gate = random_inputs(2, 6, 2, 8, 8, torch.bfloat16), random_gate(2, 8, lower_bound=-5.0)
    states, slots = torch.randn(5, 2, 8, 8), torch.tensor([3, 1])
    states[[0, 2, 4]] = torch.nan
    before = states.clone()
    records = records_for(inputs)
    o = verify_delta(inputs, gate, states, slots, records)
    snapshot_o, snapshots = delta_snapshots(inputs, gate, states, slots)
    assert torch.equal(o, snapshot_o)
    state = states[slots]
    for row in range(6):
        one, one_state = delta_attention(rows_of(inputs, slice(row, row + 1)), gate, state, form="recurrent")
        alone = records_for(rows_of(inputs, slice(row, row + 1)))
        assert torch.equal(
            verify_delta(
                requests_of(rows_of(inputs, slice(row, row + 1)), [1]),
                gate,
                state,
                torch.tensor([1]),
                DeltaRecords(*(values[1:] for values in alone)),
            ),
            o[1:, row : row + 1],
        )
        state = one_state
        assert torch.equal(one, o[:, row : row + 1]) and torch.equal(state, snapshots[:, row])
    assert torch.equal(states.nan_to_num(9.0), before.nan_to_num(9.0)), "a refused block left no trace"
    assert all(torch.isfinite(values).all() for values in records[:3])
    assert records.inputs_BTC.isnan().all(), "the model stores those"


def test_records_of_both_forms_agree() -> None:
    inputs, gate = random_inputs(2, 5, 2, 8, 4), random_gate(2, 8, lower_bound=None)
    states, slots = torch.randn(2, 2, 8, 4), torch.tensor([1, 0])
    found = []
    for form in FORMS:
        records = records_for(inputs)
        found.append((verify_delta(inputs, gate, states, slots, records, form=form), *records[:3]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[0][2], found[1][2]) and torch.equal(found[0][3], found[1][3])


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_nobody_begin_with_zeros_and_not_with_the_last_slot(form: DeltaForm) -> None:
    inputs, gate = random_inputs(2, 3, 1, 4, 4), random_gate(1, 4, lower_bound=-5.0)
    states = torch.randn(3, 1, 4, 4)
    states[-1] = torch.nan
    o = verify_delta(inputs, gate, states, torch.tensor([-1, 0]), records_for(inputs), form=form)
    expected, _ = delta_attention(requests_of(inputs, [0]), gate, None, form=form)
    torch.testing.assert_close(o[:1], expected)
    assert torch.isfinite(o).all()


def test_rows_behind_bad_ones_are_bad_and_neighbours_are_not() -> None:
    inputs, gate = random_inputs(2, 4, 2, 4, 4), random_gate(2, 4, lower_bound=-5.0)
    inputs.v_BTNV[0, 2] = torch.nan
    o = verify_delta(inputs, gate, torch.randn(2, 2, 4, 4), torch.tensor([0, 1]), records_for(inputs))
    assert torch.isfinite(o[0, :2]).all() and o[0, 2:].isnan().all() and torch.isfinite(o[1]).all()


def test_no_rows_and_no_requests() -> None:
    gate = random_gate(2, 4, lower_bound=-5.0)
    o, state = delta_attention(random_inputs(2, 0, 2, 4, 3), gate, None, form="chunked")
    assert o.shape == (2, 0, 2, 3) and not state.any() and state.shape == (2, 2, 4, 3)
    empty = random_inputs(0, 3, 2, 4, 3)
    assert verify_delta(empty, gate, torch.zeros(1, 2, 4, 3), torch.zeros(0).long(), records_for(empty)).numel() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_BTNK": torch.zeros(1, 2, 2, 3)}, "k has shape"),
        ({"v_BTNV": torch.zeros(1, 2, 1, 4)}, "v has shape"),
        ({"f_BTNK": torch.zeros(1, 3, 2, 4)}, "f has shape"),
        ({"b_BTN": torch.zeros(1, 2, 1)}, "b has shape"),
        ({"a_log": torch.zeros(1, 1, 2, 1)}, "a_log has shape"),
        ({"dt_bias": torch.zeros(8)}, "dt_bias has shape"),
        ({"states": torch.zeros(3, 2, 4, 4)}, "states has shape"),
        ({"slots": torch.zeros(2).long()}, "slots has shape"),
        ({"records": 1}, "records.correction has shape"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Tensor], message: str) -> None:
    inputs = random_inputs(1, 2, 2, 4, 5)
    inputs = inputs._replace(**{name: value for name, value in changes.items() if name in DeltaInputs._fields})
    gate = DeltaGate(changes.get("a_log", torch.zeros(2)), changes.get("dt_bias", torch.zeros(2, 4)), None)
    states, slots = changes.get("states", torch.zeros(3, 2, 4, 5)), changes.get("slots", torch.zeros(1).long())
    records = records_for(random_inputs(1, 1 if "records" in changes else 2, 2, 4, 5))
    with pytest.raises(ShapeError, match=message):
        verify_delta(inputs, gate, states, slots, records)


def test_lengths_of_other_requests_are_refused() -> None:
    with pytest.raises(ShapeError, match="lengths has shape"):
        delta_attention(
            random_inputs(1, 2, 2, 4, 5),
            random_gate(2, 4, lower_bound=None),
            None,
            form="chunked",
            lengths_B=torch.ones(2).long(),
        )
