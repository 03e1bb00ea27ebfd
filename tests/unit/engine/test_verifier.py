"""The one judging path: settings reach their own rows, prompts and steps draw the same noise."""

from __future__ import annotations

import torch

from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.verifier import judge
from paceline.models.drafters.proposal import Proposal

SETTINGS = [
    SamplingParameters(),
    SamplingParameters(temperature=1.0, top_k=1),
    SamplingParameters(temperature=0.8, top_p=0.7, min_p=0.05),
]


def make_state() -> SlotState:
    state = SlotState(3, num_draft_tokens=3, num_candidates=0, device=torch.device("cpu"))
    for slot, sampling in enumerate(SETTINGS):
        state.admit(slot, sampling, seed=40 + slot)
    return state


def test_a_mixed_batch_judges_each_request_as_if_it_were_alone() -> None:
    state, logits = make_state(), torch.randn(3, 4, 30) * 3
    drafts, positions = torch.randint(30, (3, 3)), torch.tensor([5, 9, 100])
    drafts[0] = logits[0, :3].argmax(-1)
    order = torch.tensor([2, 0, 1])
    together = judge(logits[order], Proposal(drafts[order]), state, order, positions[order], SamplingFlags.of(SETTINGS))
    for row, slot in enumerate(order.tolist()):
        alone = judge(
            logits[slot : slot + 1],
            Proposal(drafts[slot : slot + 1]),
            state,
            torch.tensor([slot]),
            positions[slot : slot + 1],
            SamplingFlags.of([SETTINGS[slot]]),
        )
        assert together.verified.accepted_B[row] == alone.verified.accepted_B[0]
        assert together.verified.bonus_ids_B[row] == alone.verified.bonus_ids_B[0]
    assert together.verified.accepted_B[1] == 3, "slot 0 is greedy and was offered its own choices"


def test_no_drafts_at_all_is_plain_sampling_at_the_anchors_position() -> None:
    state, logits, slots = make_state(), torch.randn(3, 2, 30), torch.arange(3)
    flags, positions = SamplingFlags.of(SETTINGS), torch.tensor([4, 8, 15])
    no_drafts = Proposal(torch.empty(3, 0, dtype=torch.int64))
    plain = judge(logits[:, :1], no_drafts, state, slots, positions, flags)
    missing = Proposal(torch.full((3, 1), -1))
    padded = judge(logits, missing, state, slots, positions, flags)
    assert torch.equal(plain.verified.bonus_ids_B, padded.verified.bonus_ids_B), "a placeholder draft changes nothing"
    assert padded.verified.accepted_B.tolist() == [0, 0, 0]
