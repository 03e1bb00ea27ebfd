"""Holding back on the device: whose drafts go, what is remembered of them, and who teaches the estimator."""

from __future__ import annotations

import torch

from paceline.engine.draft_stopper import DevicePlan, DraftPlan, DraftStopper
from paceline.models.drafters.proposal import Proposal

CPU = torch.device("cpu")
SLOTS = torch.tensor([2, 0])
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
SURE, UNSURE = [0.9, 0.9, 0.9], [0.9, 0.2, 0.9]


def plan_of(thresholds: tuple[float, ...] | None = (0.5, 0.5, 0.5), **changes: tuple[bool, ...]) -> DevicePlan:
    plan = DraftPlan((3, 3), thresholds, **({"is_adaptive": (True, True), "teaches": (True, True)} | changes))
    return plan.on(CPU)


def test_drafts_behind_an_unlikely_one_are_held_back() -> None:
    stopper = DraftStopper(3, 3, CPU)
    proposal = Proposal(IDS, confidence_BK=torch.tensor([SURE, UNSURE]))
    assert stopper.hold_back(SLOTS, proposal, plan_of()).ids_BK.tolist() == [[5, 6, 7], [8, -1, -1]]
    assert torch.equal(stopper.hold_back(SLOTS, proposal, plan_of(None)).ids_BK, IDS)
    other = plan_of(is_adaptive=(True, False))
    assert torch.equal(stopper.hold_back(SLOTS, proposal, other).ids_BK, IDS)


def test_drafts_of_which_nothing_is_known_stay() -> None:
    stopper = DraftStopper(3, 3, CPU)
    assert torch.equal(stopper.hold_back(SLOTS, Proposal(IDS), plan_of()).ids_BK, IDS)
    assert stopper.estimator is None
    stopper.observe(SLOTS, IDS, torch.tensor([1, 1]), plan_of())


def test_q_stands_in_for_a_confidence_head() -> None:
    log_q = torch.tensor([[[0.98, 0.02]] * 3, [[0.5, 0.5]] * 3]).log()
    stopper = DraftStopper(3, 3, CPU)
    kept = stopper.hold_back(SLOTS, Proposal(IDS, IDS.unsqueeze(2).expand(2, 3, 2), log_q), plan_of((0.5, 0.5, 0.4)))
    assert kept.ids_BK.tolist() == [[5, 6, 7], [-1, -1, -1]]
    assert stopper.estimator is not None
    assert stopper.estimator.slope.item() == 0.5


def observed(stopper: DraftStopper, slots: torch.Tensor, ids: torch.Tensor, plan: DevicePlan) -> list[float]:
    assert stopper.estimator is not None
    before = stopper.estimator.sums_6K[5].clone()
    stopper.observe(slots, ids, torch.zeros(len(slots), dtype=torch.int64), plan)
    counts: list[float] = (stopper.estimator.sums_6K[5] - before).tolist()
    return counts


def test_blocks_are_observed_with_their_own_features_once_they_are_judged() -> None:
    stopper = DraftStopper(3, 3, CPU)
    stopper.hold_back(SLOTS, Proposal(IDS, confidence_BK=torch.tensor([SURE, UNSURE])), plan_of())
    assert observed(stopper, SLOTS, IDS, plan_of()) == [2, 0, 0]  # both refused at once
    assert observed(stopper, SLOTS, IDS, plan_of(teaches=(True, False))) == [1, 0, 0]
    assert observed(stopper, SLOTS, torch.full_like(IDS, -1), plan_of()) == [0, 0, 0]
    assert observed(stopper, torch.tensor([2, 1]), IDS, plan_of()) == [1, 0, 0]  # of slot 1 nothing is known
    stopper.hold_back(SLOTS[:1], Proposal(IDS[:1]), plan_of())  # one-hot drafts: the old features are not theirs
    assert observed(stopper, SLOTS, IDS, plan_of()) == [1, 0, 0]


def test_what_all_requests_share_is_not_copied_to_the_device() -> None:
    plain = DraftPlan((3, 3), None, is_adaptive=(False, False), teaches=(True, True)).on(CPU)
    assert plain == (3, None, None, None, None)
    mixed = DraftPlan((3, 2), (0.5, 0.5, 0.5), is_adaptive=(True, False), teaches=(True, False)).on(CPU)
    found = [None if part is None else part.tolist() for part in mixed[1:]]
    assert found == [[3, 2], [0.5, 0.5, 0.5], [True, False], [True, False]]


def test_stoppers_of_two_kinds_learn_apart_from_the_same_drafts() -> None:
    """Whichever drew a block, the one whose step judges it learns from it, and only that one."""
    greedy = DraftStopper(3, 3, CPU)
    sampled = greedy.beside()
    proposal = Proposal(IDS, confidence_BK=torch.tensor([SURE, UNSURE]))
    for stopper in (greedy, sampled):
        stopper.hold_back(SLOTS, proposal, plan_of())
    assert greedy.estimator is not None and sampled.estimator is not None
    sampled.observe(SLOTS, IDS, torch.tensor([3, 0]), plan_of())
    assert (greedy.estimator.sums_6K[5].sum().item(), sampled.estimator.sums_6K[5].sum().item()) == (0, 4)
    sampled.hold_back(SLOTS, Proposal(IDS), plan_of())  # one-hot: the features are not theirs
    greedy.observe(SLOTS, IDS, torch.tensor([3, 0]), plan_of())
    assert greedy.estimator.sums_6K[5].sum().item() == 0
