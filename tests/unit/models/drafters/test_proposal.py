"""A proposal without a distribution is one-hot: candidates and probabilities come together or not at all."""

from __future__ import annotations

import torch

from paceline.models.drafters.proposal import Proposal


def test_a_proposal_is_one_hot_unless_it_says_otherwise() -> None:
    one_hot = Proposal(torch.tensor([[1, 2, -1]]))
    assert one_hot.candidate_ids_BKC is None and one_hot.log_q_BKC is None
    ids, candidates, log_q = torch.tensor([[1]]), torch.tensor([[[1, 4]]]), torch.tensor([[[0.25, 0.75]]]).log()
    proposal = Proposal(ids, candidates, log_q)
    assert proposal.candidate_ids_BKC is candidates and proposal.log_q_BKC is log_q and proposal.confidence_BK is None
