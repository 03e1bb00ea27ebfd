"""Rows drawn apart: which columns stand for which ids, ties, and the width of q."""

from __future__ import annotations

import dataclasses

import torch
from tests.unit.models.conftest import drafter_contract

from paceline.checkpoint.contract import DraftSampleMethod
from paceline.models.drafters.draw import draw_rows
from paceline.models.drafters.proposal import DraftSampling
from paceline.models.drafters.vocabulary import DraftVocabulary
from paceline.ops.sample_tokens import sample_tokens


def make_sampling(method: DraftSampleMethod, temperatures: list[float]) -> DraftSampling:
    count = len(temperatures)
    zeros = torch.zeros(count, dtype=torch.long)
    return DraftSampling(method, torch.tensor(temperatures), torch.arange(count), zeros + 30, zeros)


def test_columns_may_stand_for_some_draft_ids() -> None:
    """Draft ids 3, 8 and 12 are scored; the target calls them 13, 18 and 22."""
    vocabulary = DraftVocabulary(drafter_contract(draft_vocab_size=20))
    vocabulary.target_ids_V = torch.arange(20) + 10
    scores, ids = torch.tensor([[[0.5, 2.0, -torch.inf]]]).expand(4, 1, 3), torch.tensor([3, 8, 12]).expand(4, 1, 3)
    greedy = draw_rows(scores, make_sampling("greedy", [1.0] * 4), vocabulary, draft_ids_BKV=ids)
    assert greedy.ids_BK.tolist() == [[18]] * 4 and greedy.log_q_BKC is None
    drawn = draw_rows(scores, make_sampling("probabilistic", [1.0, 0.0, 0.5, 1.0]), vocabulary, draft_ids_BKV=ids)
    candidates, log_q = drawn.candidate_ids_BKC, drawn.log_q_BKC
    assert candidates is not None and log_q is not None
    assert candidates.tolist() == [[[18, 13, 22]]] * 4
    assert (log_q[..., 2] == -torch.inf).all()
    exact = torch.tensor([[2.0, 0.5]] * 4) / torch.tensor([[1.0], [1.0], [0.5], [1.0]])
    torch.testing.assert_close(log_q[:, 0, :2], exact.log_softmax(-1))
    assert drawn.ids_BK[1].tolist() == [18]
    assert set(drawn.ids_BK.flatten().tolist()) <= {13, 18}


def test_equal_scores_go_to_the_lowest_id() -> None:
    vocabulary = DraftVocabulary(drafter_contract())
    scores = torch.zeros(1, 2, 61)
    scores[:, :, [40, 9, 23]] = 1.0
    for method in ("greedy", "probabilistic"):
        assert draw_rows(scores, make_sampling(method, [0.0]), vocabulary).ids_BK.tolist() == [[9, 9]]


def test_noise_follows_the_place_in_the_block() -> None:
    vocabulary = DraftVocabulary(drafter_contract())
    sampling = make_sampling("probabilistic", [1.0] * 5)
    scores = torch.zeros(5, 4, 61)
    whole = draw_rows(scores, sampling, vocabulary).ids_BK
    for k in range(4):
        assert torch.equal(draw_rows(scores[:, k : k + 1], sampling, vocabulary, first=k).ids_BK[:, 0], whole[:, k])


def test_coupled_draws_are_the_targets_own_where_both_agree() -> None:
    """Same scores, same noise, same positions: what plain decoding would emit, whatever the step."""
    vocabulary = DraftVocabulary(drafter_contract())
    scores = torch.randn(40, 3, 20, generator=torch.Generator().manual_seed(5)) * 2
    apart = make_sampling("probabilistic", [0.8] * 40)
    coupled = dataclasses.replace(apart, is_coupled=True, step_B=torch.arange(40))
    target = torch.stack(
        [
            sample_tokens(
                scores[:, k] / apart.temperature_B[:, None],
                temperature_R=apart.temperature_B,
                seed_R=apart.seed_B,
                position_R=apart.position_B + k,
            )
            for k in range(3)
        ],
        dim=1,
    )
    drawn = draw_rows(scores, coupled, vocabulary)
    assert torch.equal(drawn.ids_BK, target)
    later = draw_rows(scores[:, 1:], coupled, vocabulary, first=1)
    assert torch.equal(later.ids_BK, target[:, 1:])
    assert not torch.equal(draw_rows(scores, apart, vocabulary).ids_BK, target)
