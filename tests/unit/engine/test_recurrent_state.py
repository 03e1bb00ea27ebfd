"""States by slot: replayed row for row as plain decoding runs them, whatever a step accepts and whoever shares it.

Section 6 of the engine's design: random accepted counts over many steps, all and one of a block, reuse of a slot,
padding, and nothing read of what an earlier step recorded.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.kimi_contract import DeltaAttentionSettings
from paceline.engine.hybrid_attends import PromptDelta, StepDelta
from paceline.engine.recurrent_state import RecurrentState, StateCopies, StateRows
from paceline.models.hybrid import DeltaProjections, DeltaWeights
from paceline.ops.delta_attention import DeltaGate

CPU = torch.device("cpu")
HEADS, SIZE, TAPS, NUM_ROWS, NUM_SLOTS, PADDING = 2, 4, 3, 4, 3, 3
CHANNELS = 3 * HEADS * SIZE
SETTINGS = DeltaAttentionSettings((0, 1), HEADS, SIZE, TAPS, True, -5.0)
_GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = [
    DeltaWeights(
        torch.randn(CHANNELS, TAPS, generator=_GENERATOR),
        DeltaGate(torch.randn(HEADS, generator=_GENERATOR), torch.randn(HEADS, SIZE, generator=_GENERATOR), -5.0),
    )
    for _ in SETTINGS.layers
]


def make_state(state_dtype: torch.dtype = torch.float32) -> RecurrentState:
    return RecurrentState(
        SETTINGS, NUM_SLOTS, max_rows=NUM_ROWS, dtype=torch.float32, device=CPU, state_dtype=state_dtype
    )


def text(length: int, seed: int) -> list[DeltaProjections]:
    """What two layers would read of a text, [1, length, ...] each."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((CHANNELS,), (HEADS, SIZE), (HEADS,))
    return [
        DeltaProjections(*(torch.randn(1, length, *shape, generator=generator) for shape in shapes)) for _ in WEIGHTS
    ]


def part(rows: list[DeltaProjections], start: int, end: int) -> list[DeltaProjections]:
    return [DeltaProjections(*(values[:, start:end] for values in layer)) for layer in rows]


def step(state: RecurrentState, slots: list[int], rows: list[list[DeltaProjections]]) -> list[Tensor]:
    """Run a step's rows of several requests without committing any; each layer's answers."""
    num_rows = rows[0][0].rows_BTC.shape[1]
    delta = StepDelta(state, torch.tensor(slots), num_rows)
    answers = []
    for place, weights in enumerate(WEIGHTS):
        joined = DeltaProjections(*(torch.cat(values) for values in zip(*(one[place] for one in rows), strict=True)))
        answers.append(delta(place, joined, weights))
    return answers


def commit(state: RecurrentState, slots: list[int], counts: list[int], copies: StateCopies | None = None) -> None:
    state.commit(torch.tensor(slots), torch.tensor(counts), NUM_ROWS, copies)
    state.poison_records()


def same_place(one: StateRows, place: int, other: StateRows, other_place: int) -> bool:
    return one.checksum(place) == other.checksum(other_place)


def plain(rows: list[DeltaProjections], length: int) -> StateRows:
    """The state behind the first rows of a text, one row at a time, in place 0."""
    state = make_state()
    for at in range(length):
        step(state, [0], [part(rows, at, at + 1)])
        state.commit(torch.tensor([0]), torch.tensor([1]), 1)
    return state.rows


@pytest.mark.parametrize("accepts", ["random", "all", "one"])
def test_any_accepted_counts_end_where_plain_decoding_does(accepts: str) -> None:
    """Two requests of their own pace over 200 steps, refused rows between; bit for bit."""
    chance = random.Random(accepts)
    texts = {0: text(820, 1), 2: text(820, 2)}
    state, ends = make_state(), {0: 0, 2: 0}
    for _ in range(200 if accepts == "random" else 20):
        counts = [{"random": chance.randint(1, NUM_ROWS), "all": NUM_ROWS, "one": 1}[accepts] for _ in ends]
        rows = []
        for (slot, end), count in zip(ends.items(), counts, strict=True):
            right, wrong = part(texts[slot], end, end + count), text(NUM_ROWS - count, chance.randint(0, 999))
            rows.append(
                [
                    DeltaProjections(*(torch.cat(pair, 1) for pair in zip(*both, strict=True)))
                    for both in zip(right, wrong, strict=True)
                ]
            )
        step(state, list(ends), rows)
        commit(state, list(ends), counts)
        ends = {slot: end + count for (slot, end), count in zip(ends.items(), counts, strict=True)}
    assert state.ends_S.tolist() == [ends[0], 0, ends[2], 0]
    for slot, end in ends.items():
        assert same_place(state.rows, slot, plain(texts[slot], end), 0)
    assert not state.rows.states_LSNKK[:, 1].any() and not state.rows.histories_LSHC[:, 1].any()


@pytest.mark.parametrize("size", [1, 5, 23])
def test_a_prompt_in_chunks_ends_where_plain_decoding_does(size: int) -> None:
    rows, state = text(23, 3), make_state()
    for start in range(0, 23, size):
        chunk = part(rows, start, min(start + size, 23))
        delta = PromptDelta(state, torch.tensor([1]), chunk[0].rows_BTC.shape[1], "recurrent")
        for place, weights in enumerate(WEIGHTS):
            delta(place, chunk[place], weights)
    assert int(state.ends_S[1]) == 23
    assert same_place(state.rows, 1, plain(rows, 23), 0)


def test_states_in_bf16_stay_near_those_in_float32() -> None:
    """Rounded once a step over 200 steps: each rounding is forgotten as the state decays, so errors do not add up."""
    chance, rows, end = random.Random(0), text(820, 1), 0
    wide, narrow = make_state(), make_state(torch.bfloat16)
    largest = 0.0
    for _ in range(200):
        count = chance.randint(1, NUM_ROWS)
        both = []
        for state in (wide, narrow):
            both.append(step(state, [1], [part(rows, end, end + NUM_ROWS)]))
            commit(state, [1], [count])
        end += count
        answers = [torch.stack(each) for each in both]
        largest = max(largest, float((answers[0] - answers[1]).abs().max() / answers[0].abs().max()))
    assert 0 < largest < 0.03
    assert narrow.rows.states_LSNKK.dtype == torch.bfloat16
    found, expected = narrow.rows.states_LSNKK[:, 1].float(), wide.rows.states_LSNKK[:, 1]
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert torch.equal(narrow.rows.histories_LSHC, wide.rows.histories_LSHC), "the rows themselves are not rounded"
    assert 2 * narrow.rows.states_LSNKK.nbytes == wide.rows.states_LSNKK.nbytes


def test_a_prompt_leaves_its_state_in_bf16() -> None:
    rows, ends = text(23, 3), []
    for dtype in (torch.float32, torch.bfloat16):
        state = make_state(dtype)
        delta = PromptDelta(state, torch.tensor([1]), 23, "recurrent")
        for place, weights in enumerate(WEIGHTS):
            delta(place, rows[place], weights)
        ends.append(state.rows.states_LSNKK[:, 1])
    assert torch.equal(ends[0].bfloat16(), ends[1]), "one prompt, one rounding"


def test_a_step_leaves_the_state_of_the_boundary_that_it_crosses() -> None:
    """Blocks of 3: one request goes from 4 to 5 and crosses none, the other from 5 to 9."""
    first, second, state = text(9, 4), text(9, 5), make_state()
    for slot, rows, length in ((0, first, 4), (1, second, 5)):
        state.begin(slot, plain(rows, length), 0, position=length)
    kept = StateRows.allocate(SETTINGS, 4, dtype=torch.float32, device=CPU)
    kept.poison(3)
    copies = StateCopies(kept, torch.tensor([2, 0]), 3)
    step(state, [0, 1], [part(first, 4, 8), part(second, 5, 9)])
    commit(state, [0, 1], [1, 4], copies)
    assert same_place(kept, 0, plain(second, 9), 0)
    assert same_place(state.rows, 0, plain(first, 5), 0) and same_place(state.rows, 1, plain(second, 9), 0)
    assert not kept.states_LSNKK[:, 1].any() and kept.is_poisoned(3)
    # where the boundary lies among the kept rows, the rows behind it are not in the copy
    copies = StateCopies(kept, torch.tensor([1]), 3)
    step(state, [0], [part(first, 5, 9)])
    commit(state, [0], [3], copies)
    assert same_place(kept, 1, plain(first, 6), 0) and same_place(state.rows, 0, plain(first, 8), 0)


def test_a_slot_begins_with_nothing_of_its_last_owner() -> None:
    state = make_state()
    state.rows.poison(1)
    state.begin(1)
    assert state.rows.is_finite(1) and not state.rows.states_LSNKK.any() and not state.rows.histories_LSHC.any()
    with pytest.raises(AssertionError, match="begins at 0"):
        state.begin(1, position=8)


def test_rows_of_nobody_leave_every_other_slot_alone() -> None:
    """Padding shares its slot, and 0 rows leave even their own as it is."""
    rows, state = text(4, 6), make_state()
    for slot in range(3):
        state.begin(slot, plain(rows, 2 + slot), 0, position=2 + slot)
    before = [state.rows.checksum(slot) for slot in range(NUM_SLOTS)]
    step(state, [PADDING, PADDING, 1], [text(NUM_ROWS, seed) for seed in (7, 8, 9)])
    commit(state, [PADDING, PADDING, 1], [4, 2, 0])
    assert [state.rows.checksum(slot) for slot in range(NUM_SLOTS)] == before
    assert state.ends_S.tolist()[:3] == [2, 3, 4]


def test_memory_is_counted_and_given_back() -> None:
    state = make_state()
    places = 4 * 2 * 4 * (HEADS * SIZE * SIZE + (TAPS - 1) * CHANNELS)
    assert state.rows.num_bytes == places
    assert state.num_bytes == places + 2 * NUM_SLOTS * NUM_ROWS * 4 * (3 * HEADS * SIZE + CHANNELS)
    state.release()
    assert state.num_bytes == 0
