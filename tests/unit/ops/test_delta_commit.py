"""Commit and rollback: equal to plain decoding bit for bit, for any counts, with stale records and reused slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.ops.delta_twin import random_gate, random_inputs
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import delta_commit
from paceline.ops.causal_convolution import causal_convolution, next_history
from paceline.ops.delta_attention import (
    delta_attention,
    delta_snapshots,
    delta_snapshots_triton,
    verify_delta,
    verify_delta_triton,
)
from paceline.ops.delta_commit import (
    CommitInto,
    DeltaRecords,
    clear_slots,
    commit_delta,
    commit_delta_reference,
    commit_delta_triton,
    commit_snapshots,
)
from paceline.ops.delta_rows import DeltaGate, DeltaInputs

NUM_LAYERS, HEADS, KEYS, VALUES, TAPS = 2, 2, 3, 5, 4
CHANNELS = HEADS * (2 * KEYS + VALUES)


class Network:
    """Two KDA layers reduced to convolution and recurrence; a row's projections are looked up by its token."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        self.channels = torch.randn(NUM_LAYERS, 50, CHANNELS, generator=generator).to(dtype)
        self.f = torch.randn(NUM_LAYERS, 50, HEADS, KEYS, generator=generator).to(dtype)
        self.b = torch.randn(NUM_LAYERS, 50, HEADS, generator=generator).to(dtype)
        self.weight = torch.randn(CHANNELS, TAPS, generator=generator)
        self.gate = DeltaGate(
            torch.rand(HEADS, generator=generator), torch.randn(HEADS, KEYS, generator=generator), -5.0
        )

    def inputs(self, layer: int, tokens_BT: Tensor, histories: Tensor, slots_B: Tensor) -> tuple[Tensor, DeltaInputs]:
        rows = self.channels[layer, tokens_BT]
        q, k, v = causal_convolution(rows, self.weight, histories, slots_B).split(
            (HEADS * KEYS, HEADS * KEYS, HEADS * VALUES), dim=-1
        )
        fields = (part.unflatten(-1, (HEADS, -1)) for part in (q, k, v))
        return rows, DeltaInputs(*fields, self.f[layer, tokens_BT], self.b[layer, tokens_BT])


class Store:
    """States and histories of some slots; the last is trash."""

    def __init__(self, num_slots: int, dtype: torch.dtype, fill: float = 0.0) -> None:
        self.states = torch.full((NUM_LAYERS, num_slots + 1, HEADS, KEYS, VALUES), fill)
        self.histories = torch.full((NUM_LAYERS, num_slots + 1, TAPS - 1, CHANNELS), fill, dtype=dtype)

    def slot(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.states[:, slot], self.histories[:, slot]


def new_records(num_requests: int, num_rows: int, dtype: torch.dtype) -> DeltaRecords:
    return DeltaRecords.allocate(
        NUM_LAYERS,
        num_requests,
        num_rows,
        HEADS,
        KEYS,
        VALUES,
        num_channels=CHANNELS,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def poison(records: DeltaRecords) -> None:
    for values in records:
        values.fill_(torch.nan)


def run_block(network: Network, store: Store, slots: list[int], tokens: Tensor, records: DeltaRecords) -> Tensor:
    """One pass over blocks [B, T] of tokens; returns the outputs of all layers."""
    outputs, slots_B = [], torch.tensor(slots)
    for layer in range(NUM_LAYERS):
        rows, inputs = network.inputs(layer, tokens, store.histories[layer], slots_B)
        of_layer = records.layer(layer)
        of_layer.inputs_BTC.copy_(rows)
        outputs.append(verify_delta(inputs, network.gate, store.states[layer], slots_B, of_layer))
    return torch.stack(outputs)


def plain(network: Network, text: list[int], dtype: torch.dtype) -> tuple[Store, list[Tensor]]:
    """Token by token through whole-prompt functions: nothing of records or commits."""
    store, outputs = Store(1, dtype), []
    for token in text:
        for layer in range(NUM_LAYERS):
            rows, inputs = network.inputs(layer, torch.tensor([[token]]), store.histories[layer, :1], torch.tensor([0]))
            o, state = delta_attention(inputs, network.gate, store.states[layer, :1], form="recurrent")
            store.states[layer, :1] = state
            store.histories[layer, :1] = next_history(rows, store.histories[layer, :1])
            outputs.append(o[0, 0])
    return store, outputs


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0]), "states"
    assert torch.equal(found[1], expected[1]), "histories"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=5)
def test_any_counts_over_many_steps_end_in_the_state_of_plain_decoding(dtype: torch.dtype, seed: int) -> None:
    check_walk(dtype, seed, num_steps=12)


def test_two_hundred_steps_end_in_the_state_of_plain_decoding() -> None:
    check_walk(torch.float32, 0, num_steps=200)


def check_walk(dtype: torch.dtype, seed: int, *, num_steps: int) -> None:
    """Three requests, blocks of any length, counts from 0 to all rows, poisoned records, a slot that changes hands."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    network, store = Network(dtype), Store(4, dtype, fill=torch.nan)
    slots, texts = [3, 0, 2], [[], [], []]
    for slot in slots:
        clear_slots(store.states, store.histories, slot)
    for step in range(num_steps):
        num_rows = draw(1, 5)
        tokens = torch.randint(50, (3, num_rows), generator=generator)
        records = new_records(3, num_rows, dtype)
        poison(records)
        run_block(network, store, slots, tokens, records)
        counts = [draw(0, num_rows) for _ in slots]
        for request, count in enumerate(counts):
            for values in records:  # rows that were refused, and those of padding, may hold anything
                values[:, request, count:] = torch.nan
            texts[request] += tokens[request, :count].tolist()
        commit_delta(store.states, store.histories, torch.tensor(slots), records, torch.tensor(counts))
        if step == num_steps // 2:  # a request ends here; the next one gets its slot, another moves in elsewhere
            texts[1] = []
            clear_slots(store.states, store.histories, slots[1])
    for request, slot in enumerate(slots):
        expected, _ = plain(network, texts[request], dtype)
        assert_same(store.slot(slot), expected.slot(0))
    assert store.states[:, 1].isnan().all() and store.states[:, 4].isnan().all(), "slots of nobody were left alone"


@pytest.mark.parametrize("count", range(6))
def test_each_count_equals_the_snapshot_and_continues_as_plain_decoding(count: int) -> None:
    network, store, records = Network(torch.float32), Store(2, torch.float32), new_records(1, 5, torch.float32)
    prompt, block = [7, 8, 9], torch.tensor([[1, 2, 3, 4, 5]])
    first = new_records(1, 3, torch.float32)
    run_block(network, store, [1], torch.tensor([prompt]), first)
    commit_delta(store.states, store.histories, torch.tensor([1]), first, torch.tensor([3]))
    snapshots = []
    for layer in range(NUM_LAYERS):
        _, inputs = network.inputs(layer, block, store.histories[layer], torch.tensor([1]))
        snapshots.append(delta_snapshots(inputs, network.gate, store.states[layer], torch.tensor([1]))[1])
    by_snapshot = store.states.clone()
    run_block(network, store, [1], block, records)
    commit_delta(store.states, store.histories, torch.tensor([1]), records, torch.tensor([count]))
    for layer in range(NUM_LAYERS):
        commit_snapshots(by_snapshot[layer], torch.tensor([1]), snapshots[layer], torch.tensor([count]))
    assert torch.equal(store.states, by_snapshot)
    text = [*prompt, *block[0, :count].tolist()]
    expected, _ = plain(network, text, torch.float32)
    assert_same(store.slot(1), expected.slot(0))
    outputs = run_block(network, store, [1], torch.tensor([[11, 12]]), new_records(1, 2, torch.float32))
    _, longer = plain(network, [*text, 11, 12], torch.float32)
    for layer in range(NUM_LAYERS):
        assert torch.equal(outputs[layer, 0, 0], longer[-2 * NUM_LAYERS + layer])
        assert torch.equal(outputs[layer, 0, 1], longer[-NUM_LAYERS + layer])


def test_nothing_accepted_changes_nothing_and_reads_no_neighbour() -> None:
    """A count of 0 that is read as row -1 takes another request's record, or the end of the store."""
    store = Store(3, torch.float32)
    store.states.normal_(), store.histories.normal_()
    before = store.states.clone(), store.histories.clone()
    records = new_records(3, 2, torch.float32)
    poison(records)
    for values in records:
        values[:, 1] = 0.5
    slots, counts = torch.tensor([0, 1, -1]), torch.tensor([0, 2, 2])
    commit_delta(store.states, store.histories, slots, records, counts)
    for slot in (0, 2, 3):
        assert torch.equal(store.states[:, slot], before[0][:, slot])
        assert torch.equal(store.histories[:, slot], before[1][:, slot])
    assert (store.states[:, 1] != before[0][:, 1]).all()
    snapshots = torch.full((2, 2, HEADS, KEYS, VALUES), torch.nan)
    commit_snapshots(store.states[0], torch.tensor([0, -1]), snapshots, torch.tensor([0, 2]))
    assert torch.isfinite(store.states).all()


@pytest.mark.parametrize("counts", [[-1], [3]])
def test_counts_outside_the_block_are_our_own_fault(counts: list[int]) -> None:
    store = Store(1, torch.float32)
    with pytest.raises(AssertionError, match="of 2 rows"):
        commit_delta(
            store.states, store.histories, torch.tensor([0]), new_records(1, 2, torch.float32), torch.tensor(counts)
        )


def test_a_slot_that_is_not_cleared_leaks_into_the_next_text() -> None:
    network = Network(torch.float32)
    fresh, _ = plain(network, [1, 2], torch.float32)
    for clears in (True, False):
        store = Store(1, torch.float32, fill=0.3)
        if clears:
            clear_slots(store.states, store.histories, torch.tensor([0]))
        records = new_records(1, 2, torch.float32)
        run_block(network, store, [0], torch.tensor([[1, 2]]), records)
        commit_delta(store.states, store.histories, torch.tensor([0]), records, torch.tensor([2]))
        assert torch.equal(store.states[:, 0], fresh.states[:, 0]) == clears


def test_clearing_replaces_and_does_not_multiply() -> None:
    store = Store(2, torch.float32, fill=torch.nan)
    clear_slots(store.states, store.histories, 1)
    assert not store.states[:, 1].any() and not store.histories[:, 1].any()
    assert store.states[:, 0].isnan().all() and store.histories[:, 2].isnan().all()


def test_a_fold_in_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form with summed decays, planted: right to rounding, and not the state of plain decoding."""

    def fold(
        states: Tensor, histories: Tensor, slots: Tensor, records: DeltaRecords, counts: Tensor, _into: object
    ) -> None:
        for request, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            decay = torch.ones(NUM_LAYERS, HEADS, KEYS)
            total = torch.zeros_like(states[:, slot])
            for row in reversed(range(count)):
                key = records.key_BTNK[:, request, row] * decay
                total += key.unsqueeze(-1) * records.correction_BTNV[:, request, row].unsqueeze(-2)
                decay = decay * records.decay_BTNK[:, request, row]
            states[:, slot] = states[:, slot] * decay.unsqueeze(-1) + total

    network, found = Network(torch.float32), []
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(delta_commit, "commit_delta_reference", fold)
        store = Store(1, torch.float32)
        for start in (0, 5):
            records = new_records(1, 5, torch.float32)
            run_block(network, store, [0], torch.arange(start, start + 5)[None], records)
            commit_delta(store.states, store.histories, torch.tensor([0]), records, torch.tensor([5]))
        found.append(store.states[:, 0])
    expected, _ = plain(network, list(range(10)), torch.float32)
    assert torch.equal(found[0], expected.states[:, 0])
    assert not torch.equal(found[1], expected.states[:, 0])


def test_tensors_that_do_not_fit_are_refused() -> None:
    store, slots = Store(1, torch.float32), torch.tensor([0])
    records = new_records(1, 2, torch.float32)
    for index, name in enumerate(DeltaRecords._fields):
        wrong = DeltaRecords(*(values[..., :1] if index == i else values for i, values in enumerate(records)))
        with pytest.raises(ShapeError, match=f"records.{name} has shape"):
            commit_delta(store.states, store.histories, slots, wrong, torch.tensor([1]))
    with pytest.raises(ShapeError, match="counts has shape"):
        commit_delta(store.states, store.histories, slots, records, torch.tensor([1, 1]))
    empty = new_records(0, 2, torch.float32)
    commit_delta(store.states, store.histories, torch.zeros(0).long(), empty, torch.zeros(0).long())


def test_stacked_records_are_seen_through_views() -> None:
    records = new_records(3, 4, torch.bfloat16)
    part = records.rows(2, 3)
    assert part.key_BTNK.shape == (NUM_LAYERS, 2, 3, HEADS, KEYS)
    part.layer(1).inputs_BTC.fill_(1.0)
    assert records.inputs_BTC[1, :2, :3].all() and records.inputs_BTC.float().sum() == 2 * 3 * CHANNELS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "keys", "values", "kept"), [(1, 1, 1, 0), (2, 3, 5, 3), (1, 8, 40, 1)])
def test_the_kernels_agree_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, heads: int, keys: int, values: int, kept: int
) -> None:
    channels = heads * (2 * keys + values)
    wider = DeltaRecords.allocate(
        2, 5, 4, heads, keys, values, num_channels=channels, dtype=dtype, device=torch.device("cpu")
    )
    for field in wider:
        field.normal_()
    records = wider.rows(4, 3)
    slots, counts = torch.tensor([2, 0, -1, 4]), torch.tensor([3, 0, 2, 1])
    for request, count in enumerate(counts.tolist()):
        for field in records:
            field[:, request, count:] = torch.nan
    states, histories = torch.randn(2, 6, heads, keys, values), torch.randn(2, 6, kept, channels).to(dtype)
    found = states.to(kernel_device, copy=True), histories.to(kernel_device, copy=True)
    there = DeltaRecords(*(field.to(kernel_device) for field in wider)).rows(4, 3)
    before = states.clone()
    commit_delta_reference(states, histories, slots, records, counts)
    commit_delta_triton(*found, slots.to(kernel_device), there, counts.to(kernel_device))
    torch.testing.assert_close(found[0].cpu(), states, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1].cpu(), histories), "copies have no rounding"
    assert torch.equal(found[0].cpu()[:, [0, 1, 3, 5]], before[:, [0, 1, 3, 5]])


def replay_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, DeltaRecords, Tensor]:
    records = DeltaRecords.allocate(2, 5, 3, 2, 3, 5, num_channels=9, dtype=dtype, device=torch.device("cpu"))
    for field in records:
        field.normal_()
    states, histories = torch.randn(2, 6, 2, 3, 5), torch.randn(2, 6, 3, 9).to(dtype)
    return states, histories, torch.tensor([2, 0, -1, 4, 5]), records, torch.tensor([3, 0, 2, 1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_into_a_store_leaves_the_slots_alone(kernel_device: torch.device, dtype: torch.dtype) -> None:
    """A count of 0 is a copy; a request without a place, or without a slot, leaves nothing."""
    states, histories, slots, records, counts = replay_case(dtype)
    places = torch.tensor([3, 1, 0, -1, 2])
    here = [part.to(kernel_device) for part in (states, histories, slots)]
    there = DeltaRecords(*(field.to(kernel_device) for field in records))
    store = [torch.full_like(part[:, :5], torch.nan) for part in here[:2]]
    into = CommitInto(*store, places.to(kernel_device))
    commit_delta_triton(*here, there, counts.to(kernel_device), into)
    assert torch.equal(here[0].cpu(), states) and torch.equal(here[1].cpu(), histories)
    wanted = CommitInto(*(torch.full_like(part[:, :5], torch.nan) for part in (states, histories)), places)
    commit_delta(states, histories, slots, records, counts, into=wanted)
    commit_delta_reference(states, histories, slots, records, counts)
    for found, expected, committed in zip(store, wanted, (states, histories), strict=False):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.equal(expected[:, [3, 1, 2]], committed[:, [2, 0, 5]])
        assert bool(expected[:, [0, 4]].isnan().all()), "no place, no slot"


def test_narrow_states_are_widened_and_rounded_once(kernel_device: torch.device) -> None:
    """In bf16 with float32 between: a slot's rows round it once, however many they are; nothing else changes."""
    wide, histories, slots, records, counts = replay_case(torch.bfloat16)
    narrow = wide.bfloat16()
    wide = narrow.float()
    there = [part.to(kernel_device, copy=True) for part in (narrow, histories, slots)]
    records_there = DeltaRecords(*(field.to(kernel_device) for field in records))
    stores = [(torch.full_like(narrow[:, :5], 7.0), torch.full_like(histories[:, :5], 7.0)) for _ in range(2)]
    places, counts_there = torch.tensor([3, 1, 0, -1, 2]), counts.to(kernel_device)
    commit_delta(narrow, histories.clone(), slots, records, counts, into=CommitInto(*stores[0], places))
    commit_delta_reference(narrow, histories.clone(), slots, records, counts)
    commit_delta_reference(wide, histories, slots, records, counts)
    assert torch.equal(narrow, wide.bfloat16())
    assert torch.equal(stores[0][0][:, [3, 1, 2]], narrow[:, [2, 0, 5]])
    in_store = CommitInto(*(part.to(kernel_device) for part in stores[1]), places.to(kernel_device))
    commit_delta_triton(*there, records_there, counts_there, in_store)
    commit_delta_triton(*there, records_there, counts_there)
    # the interpreter cuts down to bf16
    torch.testing.assert_close(there[0].cpu().float(), narrow.float(), rtol=2**-7, atol=2**-7)
    assert torch.equal(in_store.states_LPNKV.cpu()[:, [3, 1, 2]], there[0].cpu()[:, [2, 0, 5]])
    untouched = [0, 1, 3]
    assert torch.equal(there[0].cpu()[:, untouched], narrow[:, untouched])


def test_a_store_that_does_not_fit_is_refused() -> None:
    states, histories, slots, records, counts = replay_case(torch.float32)
    for into, name in (
        (CommitInto(states[:, :, :1], histories, slots), "into.states"),
        (CommitInto(states, histories[:1], slots), "into.histories"),
        (CommitInto(states, histories, slots[:1]), "into.places"),
    ):
        with pytest.raises(ShapeError, match=name):
            commit_delta(states, histories, slots, records, counts, into=into)


def test_the_kernels_replay_what_their_pass_did(kernel_device: torch.device) -> None:
    inputs, gate = random_inputs(1, 4, 2, 8, 8), random_gate(2, 8, lower_bound=-5.0)
    inputs = DeltaInputs(*(values.to(kernel_device) for values in inputs))
    gate = DeltaGate(gate.a_log_N.to(kernel_device), gate.dt_bias_NK.to(kernel_device), -5.0)
    states = torch.randn(1, 2, 2, 8, 8).to(kernel_device)
    slots = torch.tensor([1]).to(kernel_device)
    _, snapshots = delta_snapshots_triton(inputs, gate, states[0], slots)
    records = DeltaRecords.allocate(1, 1, 4, 2, 8, 8, num_channels=2, dtype=torch.float32, device=kernel_device)
    verify_delta_triton(inputs, gate, states[0], slots, records.layer(0), "recurrent")
    for count in range(1, 5):
        found, histories = states.clone(), torch.zeros(1, 2, 0, 2).to(kernel_device)
        commit_delta_triton(found, histories, slots, records, torch.tensor([count]).to(kernel_device))
        assert torch.equal(found[0, 1], snapshots[0, count - 1]), "bit for bit"
        assert torch.equal(found[0, 0], states[0, 0])
