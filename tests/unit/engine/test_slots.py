"""Slot state: admission wipes, proposals round-trip."""

from __future__ import annotations

import pytest
import torch

from paceline.engine import slots as slots_module
from paceline.engine.admission import TokenLimits
from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.models.drafters.proposal import Proposal


def make_state(num_candidates: int = 0) -> SlotState:
    return SlotState(3, num_draft_tokens=2, num_candidates=num_candidates, device=torch.device("cpu"))


def test_admission_forgets_the_slots_last_owner() -> None:
    state = make_state()
    slots = torch.tensor([1])
    state.lengths[slots], state.anchors[slots], state.steps[slots] = 50, 7, 9
    state.store_proposal(slots, Proposal(torch.tensor([[4, 5]])))
    state.admit(1, SamplingParameters(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1), seed=-5)
    assert (state.lengths[1], state.anchors[1], state.steps[1]) == (0, 0, 0)
    assert state.draft_ids[1].tolist() == [-1, -1]
    settings = state.sampling_rows(slots)
    assert [round(float(value), 6) for value in settings] == [0.5, 3, 0.9, 0.1, -5]


def test_tiny_temperatures_act_as_the_verifier_reads_them() -> None:
    state = make_state()
    state.admit(0, SamplingParameters(temperature=1e-6), seed=0)
    state.admit(1, SamplingParameters(temperature=0.001), seed=0)
    assert state.temperatures[:2].tolist() == [0.0, torch.tensor(0.01).item()]


def test_proposals_come_back_with_their_distribution() -> None:
    state, slots = make_state(num_candidates=3), torch.tensor([2, 0])
    ids, candidates = torch.tensor([[1, 2], [3, 4]]), torch.arange(12).view(2, 2, 3)
    log_q = torch.rand(2, 2, 3).log()
    state.store_proposal(slots, Proposal(ids, candidates, log_q))
    found = state.proposal(slots, 1, with_q=True)
    assert torch.equal(found.ids_BK, ids[:, :1])
    assert found.candidate_ids_BKC is not None
    assert found.log_q_BKC is not None
    assert torch.equal(found.candidate_ids_BKC, candidates[:, :1])
    assert torch.equal(found.log_q_BKC, log_q[:, :1])
    assert state.proposal(slots, 2, with_q=False).log_q_BKC is None


def test_a_one_hot_proposal_leaves_no_stale_distribution() -> None:
    state, slots = make_state(num_candidates=3), torch.tensor([1])
    state.store_proposal(slots, Proposal(torch.tensor([[1, 2]]), torch.ones(1, 2, 3).long(), torch.zeros(1, 2, 3)))
    state.store_proposal(slots, Proposal(torch.tensor([[6, 7]])))
    found = state.proposal(slots, 2, with_q=True)
    assert found.candidate_ids_BKC is not None
    assert found.log_q_BKC is not None
    assert found.candidate_ids_BKC.tolist() == [[[6, -1, -1], [7, -1, -1]]]
    assert found.log_q_BKC.exp().tolist() == [[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]]


def test_extreme_settings_stay_in_the_range_of_their_arrays() -> None:
    """P18: an infinite float32 temperature would turn a masked token's -inf into NaN."""
    state = make_state()
    state.admit(0, SamplingParameters(temperature=1e300, top_k=2**63 - 1), seed=0)
    rows = state.sampling_rows(torch.tensor([0]))
    assert rows.temperature_B.isfinite().all()
    assert rows.top_k_B[0] >= 2**31


def test_admission_hands_rules_and_prompt_to_the_token_state() -> None:
    state = SlotState(3, num_draft_tokens=2, num_candidates=0, device=torch.device("cpu"), vocab_size=40)
    limits = TokenLimits(presence_penalty=0.5)
    state.admit(1, SamplingParameters(presence_penalty=0.5), seed=0, limits=limits, prompt_ids=(3, 3, 39))
    flags = SamplingFlags.of([SamplingParameters(presence_penalty=0.5)])
    rules = state.tokens.rules_of(torch.tensor([1]), flags, None)
    assert rules is not None and rules.penalties is not None
    assert rules.penalties.prompt_mask_BV.nonzero()[:, 1].tolist() == [3, 39]
    state.admit(1, SamplingParameters(), seed=0)
    rules = state.tokens.rules_of(torch.tensor([1]), flags, None)
    assert rules is not None and rules.penalties is not None
    assert rules.penalties.prompt_mask_BV.sum() == rules.penalties.presence_B.sum() == 0


def retire(state: SlotState, slot: int, length: int, tokens: list[int], fault: int = 0) -> bool:
    """Whether the slot's request goes on behind a step."""
    slots = torch.tensor([slot])
    state.retire(slots, torch.tensor([length]), torch.tensor([tokens]), torch.tensor([fault]))
    return bool(state.is_alive[slot])


def test_the_device_sees_the_ends_that_it_can_know_of() -> None:
    """G20: budget, stop tokens and faults; behind any of them the slot stays dead until the host says otherwise."""
    for length, tokens, fault, goes_on in (
        (29, [5, -1], 0, True),
        (30, [5, -1], 0, False),  # the last token of the budget sits at 30
        (33, [5, -1], 0, False),
        (20, [9, -1], 0, False),
        (20, [4, 8], 0, False),
        (20, [4, -1], 1, False),
        (20, [-1, -1], 2, False),
    ):
        state = make_state()
        state.admit(1, SamplingParameters(), seed=0, end=30, stop_ids=(9, 8))
        assert retire(state, 1, length, tokens, fault) == goes_on, (length, tokens, fault)
        assert retire(state, 1, 5, [3]) == goes_on, "the end is for good"
        assert state.is_alive.tolist() == [1, int(goes_on), 1, 0]
        state.restore(1, length=5, anchor=3, step=1)
        assert state.is_alive[1] == 1


def test_more_stops_than_fit_are_left_to_the_host() -> None:
    for num_stops, goes_on in ((8, False), (9, True)):
        state = make_state()
        state.admit(0, SamplingParameters(), seed=0, stop_ids=range(10, 10 + num_stops))
        assert retire(state, 0, 3, [12]) == goes_on
    state.admit(0, SamplingParameters(), seed=0)  # nothing of the last owner's ends is left
    assert retire(state, 0, 2**40, [12])


def test_whatever_the_host_says_travels_in_one_piece_when_it_is_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    state, sent = make_state(), []

    def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(tensor.shape[0])
        return tensor.to(device)

    monkeypatch.setattr(slots_module, "to_device", to_device)
    state.admit(2, SamplingParameters(temperature=0.5, min_p=0.25), seed=-3)
    state.admit(0, SamplingParameters(top_p=0.5), seed=2**62)
    state.restore(2, length=40, anchor=7, step=3)
    assert sent == []
    assert (state.lengths[2], state.anchors[2], state.steps[2]) == (40, 7, 3)
    settings = state.sampling_rows(torch.tensor([2, 0]))
    assert [each.tolist() for each in settings] == [[0.5, 0.0], [0, 0], [1.0, 0.5], [0.25, 0.0], [-3, 2**62]]
    state.flush()
    assert sent == [2]
    state.restore(1, length=1, anchor=1, step=1)
    state.flush()
    assert sent == [2, 1]


def test_restoring_one_slot_leaves_what_the_device_knows_of_others() -> None:
    state = make_state()
    state.lengths[0], state.anchors[0] = 77, 6
    state.store_proposal(torch.tensor([0]), Proposal(torch.tensor([[4, 5]])))
    state.restore(1, length=9, anchor=2, step=1)
    assert (state.lengths[0], state.anchors[0], state.draft_ids[0].tolist()) == (77, 6, [4, 5])
