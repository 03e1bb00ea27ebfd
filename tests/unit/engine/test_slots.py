"""Slot state: admission wipes, proposals round-trip."""

from __future__ import annotations

import torch

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
