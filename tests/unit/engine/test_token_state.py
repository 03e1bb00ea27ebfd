"""Rules per slot: written at admission, extended by emitted tokens alone, gone with their owner."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.admission import TokenLimits
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.token_state import TokenState
from paceline.ops.token_rules import TokenRules, apply_token_rules

VOCAB = 70  # three mask words, the last one partly used
ALL = SamplingFlags(
    True,
    0,
    False,
    False,
    any_allowed_ids=True,
    any_bias=True,
    any_min_tokens=True,
    any_penalties=True,
    any_bad_words=True,
)
PROMPT = (5, 9, 9, 63)
EVERYTHING = TokenLimits(
    allowed_ids=(1, 2, 3, 9, 40, 69),
    bias_pairs=((1, 2.5), (40, -1.0), (69, 0.5)),
    held_ids=(2, 3),
    num_held=2,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    bad_words=((9,), (63, 1), (9, 63, 40)),
)


def make_state(num_slots: int = 3) -> TokenState:
    return TokenState(num_slots, vocab_size=VOCAB, device=torch.device("cpu"))


def rules_at(state: TokenState, *slots: int) -> TokenRules | None:
    return state.rules_of(torch.tensor(slots), ALL, None)


def same(one: TokenRules | None, other: TokenRules | None) -> bool:
    """Whether two rules make the same bits of the same logits, drafts and all."""
    torch.manual_seed(1)
    logits, drafts, positions = torch.randn(1, 3, VOCAB), torch.tensor([[40, 9]]), torch.tensor([len(PROMPT) - 1])
    return torch.equal(*(apply_token_rules(logits, drafts, positions, rules).ruled_BLV for rules in (one, other)))


def test_without_rules_there_is_nothing_to_hold_or_to_read() -> None:
    state = make_state()
    state.admit(0, TokenLimits(), PROMPT)
    state.extend(torch.tensor([0]), torch.tensor([[4, -1]]), ALL)
    assert rules_at(state, 0) is None
    assert state.num_bytes == 0


def test_admission_writes_what_was_asked_for() -> None:
    state = make_state()
    state.admit(1, EVERYTHING, PROMPT)
    rules = rules_at(state, 1)
    assert rules is not None and rules.penalties is not None and rules.bad_words is not None
    assert rules.bias_ids_BM.tolist() == [[1, 40, 69, -1]]
    assert rules.bias_values_BM.tolist() == [[2.5, -1.0, 0.5, 0.0]]
    assert (rules.held_ids_BM.tolist(), rules.held_before_B.tolist()) == ([[2, 3]], [6])
    assert rules.penalties.prompt_mask_BV.nonzero()[:, 1].tolist() == [5, 9, 63]
    assert rules.penalties.output_counts_BV.sum() == 0
    assert rules.bad_words.recent_ids_BH.tolist() == [[9, 9, 63]]
    assert rules.bad_words.words_BXM.tolist() == [[[-1] * 3 + [9], [-1, -1, 63, 1], [-1, 9, 63, 40], [-1] * 4]]
    assert set(rules.allowed_mask_BW.view(torch.int32)[0].tolist()) != {-1}
    assert state.num_bytes > 0


@pytest.mark.parametrize(
    "field",
    [
        "allowed_ids",
        "bias_pairs",
        "held_ids",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "bad_words",
    ],
)
def test_the_next_owner_of_a_slot_finds_nothing(field: str) -> None:
    """P13, one stage at a time; a state whose slots are not cleared is found out."""
    only = TokenLimits(**{field: getattr(EVERYTHING, field), "num_held": EVERYTHING.num_held})
    plain = TokenLimits()
    used = make_state()
    used.admit(0, only, PROMPT)
    used.extend(torch.tensor([0]), torch.tensor([[40, 9, 9, 63]]), ALL)
    assert not same(rules_at(used, 0), None), "the rule does something"
    used.admit(0, plain, PROMPT)
    assert same(rules_at(used, 0), None)
    for limits in (only, EVERYTHING):
        fresh = make_state()
        fresh.admit(0, limits, PROMPT)
        used.admit(0, limits, PROMPT)
        assert same(rules_at(used, 0), rules_at(fresh, 0))

    uncleared = make_state()
    uncleared.admit(0, only, PROMPT)
    uncleared._clear = lambda slot: None
    uncleared.admit(0, plain, PROMPT)
    assert not same(rules_at(uncleared, 0), None)


def test_neighbours_with_rules_change_no_bit_of_one_without() -> None:
    state = make_state()
    state.admit(0, TokenLimits(), PROMPT)
    state.admit(2, EVERYTHING, PROMPT)
    state.extend(torch.tensor([2, 0]), torch.tensor([[40, 9], [9, -1]]), ALL)
    assert same(rules_at(state, 0), None)
    alone = make_state()
    alone.admit(0, EVERYTHING, PROMPT)
    alone.extend(torch.tensor([0]), torch.tensor([[40, 9]]), ALL)
    assert same(rules_at(state, 2), rules_at(alone, 0))


def test_arrays_grow_without_touching_their_rows() -> None:
    state = make_state()
    state.admit(0, EVERYTHING, PROMPT)
    before = rules_at(state, 0)
    longer = TokenLimits(
        bias_pairs=tuple((token, 1.0) for token in range(50)),
        held_ids=tuple(range(20)),
        num_held=1,
        bad_words=tuple((token,) * 9 for token in range(12)),
    )
    state.admit(1, longer, PROMPT)
    state.extend(torch.tensor([0]), torch.tensor([[-1, -1]]), ALL)
    after = rules_at(state, 0)
    assert after is not None and after.bias_ids_BM.shape[1] == 64
    assert same(before, after)
    assert rules_at(state, 1).bad_words.recent_ids_BH.tolist() == [[-1] * 11 + list(PROMPT)]


@settings(max_examples=40)
@given(
    blocks=st.lists(st.lists(st.integers(0, 12), min_size=0, max_size=5), max_size=8),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=6),
)
def test_histories_after_steps_are_those_of_the_tokens_emitted(blocks: list[list[int]], prompt: list[int]) -> None:
    """P32: counts and recent tokens equal those computed again from the output, and what a restoration writes."""
    limits = TokenLimits(frequency_penalty=0.5, bad_words=((1, 2, 3, 4),))
    state = make_state()
    for slot in (2, 0):
        state.admit(slot, limits, prompt)
    output: list[int] = []
    for block in blocks:
        padded = torch.tensor([[*block, *[-1] * (5 - len(block))], [-1] * 5])
        state.extend(torch.tensor([2, 0]), padded, ALL)
        output += block
    penalties, bad_words = state._penalties, state._bad_words
    assert penalties is not None and bad_words is not None
    counts = Counter(output)
    assert penalties.output_counts_BV[2].tolist() == [counts[token] for token in range(VOCAB)]
    assert penalties.output_counts_BV[0].sum() == 0
    recent = ([-1] * 3 + prompt + output)[-3:]
    assert bad_words.recent_ids_BH[2].tolist() == recent
    found = [array.clone() for array in (*penalties, *bad_words)]
    state.extend(torch.tensor([2]), torch.tensor([[7, 7, 7]]), ALL)  # the device ran ahead of the host
    state.restore(2, prompt, output)
    assert all(torch.equal(a, b) for a, b in zip(found, (*penalties, *bad_words), strict=True))


def test_a_count_of_a_refused_draft_is_found_out() -> None:
    """P32 planted: a refused draft among the emitted tokens gives other logits."""
    states = [make_state() for _ in range(2)]
    for state, tokens in zip(states, ([40, 9, -1], [40, 9, 33]), strict=True):
        state.admit(0, TokenLimits(presence_penalty=1.0), PROMPT)
        state.extend(torch.tensor([0]), torch.tensor([tokens]), ALL)
    assert not same(*(rules_at(state, 0) for state in states))


def test_stages_that_no_request_of_the_step_uses_are_left_out() -> None:
    state = make_state()
    state.admit(0, EVERYTHING, PROMPT)
    nothing = SamplingFlags(True, 0, False, False)
    slots = torch.tensor([0])
    assert state.rules_of(slots, nothing, None) is None
    mask = torch.full((1, 1, 3), -1, dtype=torch.int32)
    assert state.rules_of(slots, nothing, mask) == TokenRules(grammar_mask_BLW=mask)
    before = state._penalties.output_counts_BV.clone()
    state.extend(slots, torch.tensor([[4]]), nothing)
    assert torch.equal(before, state._penalties.output_counts_BV)


def test_a_bound_beyond_all_positions_is_kept_in_range() -> None:
    state = make_state()
    state.admit(0, TokenLimits(held_ids=(2,), num_held=2**63 - 1), PROMPT)
    assert rules_at(state, 0).held_before_B.tolist() == [2**62]
