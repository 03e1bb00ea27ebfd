"""A drafter of fewer ids: the full one's scores of these ids, its parts shared, its proposals in target ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import VOCAB_SIZE, loaded
from torch import Tensor

from paceline.checkpoint.contract import ConfidenceSettings, MarkovSettings
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.proposal import DraftSampling, Proposal
from paceline.models.drafters.short_list import ShortList, shortened
from paceline.models.drafters.vocabulary import DraftVocabulary
from paceline.models.targets.dense import DenseTarget

FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"drafter_family": "dflash", "final_logit_softcapping": 5.0, "output_multiplier": 2.0},
    "own head and embedding": {"has_own_head": True, "has_own_embedding": True},
    "mask embedding": {"has_mask_embedding": True},
    "dflash2": {"drafter_family": "dflash2"},
    "dspark": {"drafter_family": "dspark"},
    "dspark, rnn and confidence": {
        "drafter_family": "dspark",
        "markov": MarkovSettings(8, "rnn"),
        "confidence": ConfidenceSettings(True),
    },
    "dspark, top k": {"drafter_family": "dspark", "draft_top_k": 6},
}
SOME = torch.tensor([2, *range(7, VOCAB_SIZE, 3)])  # odd gaps: no id is its own index
ANCHORS = torch.tensor([5, 301, 77])


def parts(name: str, mode: Any = "row_invariant", **options: Any) -> tuple[DenseTarget, BlockDrafter]:
    target, drafter = loaded(linear_mode=mode, **FAMILIES[name], **options)
    assert isinstance(drafter.model, BlockDrafter)
    return target.model, drafter.model


def proposed(target: DenseTarget, drafter: BlockDrafter, method: Any, hidden_BKD: Tensor) -> Proposal:
    sampling = DraftSampling(
        method,
        torch.tensor([0.0, 0.8, 1.3]) if method == "probabilistic" else torch.zeros(3),
        torch.tensor([1, 2, 3]),
        torch.tensor([9, 8, 7]),
        torch.zeros(3, dtype=torch.int64),
    )
    return drafter.propose(hidden_BKD, drafter.logits(hidden_BKD, target), ANCHORS, sampling)


def hidden(seed: int = 4) -> Tensor:
    return torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["plain", "row_invariant"])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_list_of_all_ids_changes_no_bit(name: str, mode: str, method: str) -> None:
    target, drafter = parts(name, mode)
    short = shortened(drafter, ShortList(torch.arange(VOCAB_SIZE), 1.0), target)
    expected = proposed(target, drafter, method, hidden())
    assert isinstance(short, BlockDrafter)
    for ours, theirs in zip(proposed(target, short, method, hidden()), expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["plain", "row_invariant"])
def test_scores_are_the_full_heads_columns(name: str, mode: str) -> None:
    target, drafter = parts(name, mode)
    short = shortened(drafter, ShortList(SOME, 0.9), target)
    everything = drafter.logits(hidden(), target)
    torch.testing.assert_close(short.logits(hidden(), target), everything[..., SOME])


def check_greedy(target: DenseTarget, drafter: BlockDrafter, short: BlockDrafter, rows_BKD: Tensor) -> int:
    """Rows before which nothing differs: a winner in the list wins there, too; any other draft is in the list."""
    full_BK, ids_BK = (proposed(target, model, "greedy", rows_BKD).ids_BK for model in (drafter, short))
    listed_BK = torch.isin(full_BK, SOME)
    assert bool(torch.isin(ids_BK, SOME).all()), "drafts are target ids of the list"
    is_walk = drafter.contract.family != "dflash"
    comparable_BK = listed_BK.cumprod(dim=1).bool() if is_walk else listed_BK
    assert torch.equal(ids_BK[comparable_BK], full_BK[comparable_BK])
    return int(comparable_BK.sum())


@pytest.mark.parametrize("name", ["dflash", "own head and embedding", "dspark", "dspark, rnn and confidence"])
def test_a_winner_in_the_list_wins_there_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = parts(name)
    short = shortened(drafter, ShortList(SOME, 0.9), target)
    assert isinstance(short, BlockDrafter)
    assert sum(check_greedy(target, drafter, short, hidden(seed)) for seed in range(8)) >= 3
    # The planted fault: columns of the short head taken for target ids.
    monkeypatch.setattr(DraftVocabulary, "to_target_ids", lambda _self, draft_ids: draft_ids)
    with pytest.raises(AssertionError):
        check_greedy(target, drafter, short, hidden())


def test_a_selector_looks_its_candidates_up_by_target_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a list that holds all of a row's best candidates, the walk is the full drafter's."""
    target, drafter = parts("dflash2")
    full = proposed(target, drafter, "probabilistic", hidden())
    assert full.candidate_ids_BKC is not None
    ids_V = torch.unique(torch.cat((full.candidate_ids_BKC.flatten(), torch.arange(0, VOCAB_SIZE, 5))))
    assert len(ids_V) < VOCAB_SIZE
    short = shortened(drafter, ShortList(ids_V, 0.9), target)
    assert isinstance(short, BlockDrafter) and short.num_candidates == 6
    found = proposed(target, short, "probabilistic", hidden())
    assert torch.equal(found.ids_BK, full.ids_BK) and torch.equal(found.candidate_ids_BKC, full.candidate_ids_BKC)
    torch.testing.assert_close(found.log_q_BKC, full.log_q_BKC)
    monkeypatch.setattr(DraftVocabulary, "to_target_ids", lambda _self, draft_ids: draft_ids)
    assert not torch.equal(proposed(target, short, "probabilistic", hidden()).ids_BK, full.ids_BK)


def test_a_markov_bias_is_that_of_the_listed_ids() -> None:
    target, drafter = parts("dspark")
    short = shortened(drafter, ShortList(SOME, 0.9), target)
    bias_BV, _ = drafter.markov_head.bias(ANCHORS, hidden()[:, 0])
    listed_BV, _ = short.markov_head.bias(ANCHORS, hidden()[:, 0])
    torch.testing.assert_close(listed_BV, bias_BV[:, SOME])


def test_a_list_shorter_than_the_candidates() -> None:
    few = torch.tensor([3, 9, 200])
    for name, expected in (("dflash", 3), ("dflash2", 3), ("dspark, top k", 3)):
        target, drafter = parts(name)
        short = shortened(drafter, ShortList(few, 0.1), target)
        assert short.num_candidates == expected < drafter.num_candidates
        proposal = proposed(target, short, "probabilistic", hidden())
        assert proposal.candidate_ids_BKC is not None and proposal.candidate_ids_BKC.shape[2] == 3
        assert bool(torch.isin(proposal.candidate_ids_BKC, few).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_but_the_head_is_shared_and_the_full_drafter_is_left_alone(name: str) -> None:
    target, drafter = parts(name)
    before = {key: tensor.data_ptr() for key, tensor in drafter.named_parameters()}
    short = shortened(drafter, ShortList(SOME, 0.9), target)
    assert {key: tensor.data_ptr() for key, tensor in drafter.named_parameters()} == before
    assert drafter.contract.draft_vocab_size == VOCAB_SIZE and short.contract.draft_vocab_size == len(SOME)
    own = {key for key, tensor in short.named_parameters() if tensor.data_ptr() not in before.values()}
    expected = {"vocabulary.lm_head.weight"} | ({"markov_head.markov_w2.weight"} if "dspark" in name else set())
    assert own == expected
    assert torch.equal(short.embed(ANCHORS, target), drafter.embed(ANCHORS, target))
    assert torch.equal(short.block_ids(ANCHORS, 4), drafter.block_ids(ANCHORS, 4))


@pytest.mark.parametrize("mode", ["packed", "row_invariant"])
def test_a_listed_head_computes_as_the_targets_head_does(mode: Any) -> None:
    from paceline.ops.linear import can_pack

    if not can_pack(torch.empty(1, 1, dtype=torch.bfloat16)):
        pytest.skip("this processor has no packed products")
    target, drafter = parts("dflash", mode, dtype=torch.bfloat16)
    short = shortened(drafter, ShortList(SOME, 0.9), target)
    head = short.vocabulary.lm_head
    assert head is not None and head.mode == mode and head.is_packed
    rows = hidden().bfloat16()
    everything = drafter.logits(rows, target)[..., SOME]
    torch.testing.assert_close(short.logits(rows, target), everything, rtol=1e-2, atol=1e-2)
    alone = short.logits(rows[:1, :1], target)
    assert alone.shape == (1, 1, len(SOME))
    torch.testing.assert_close(alone, everything[:1, :1], rtol=1e-2, atol=1e-2)
    if mode == "row_invariant":
        assert torch.equal(alone, short.logits(rows, target)[:1, :1])


def test_a_reduced_vocabulary_cannot_be_shortened() -> None:
    target, drafter = loaded(drafter_family="eagle3", draft_vocab_size=100, has_own_head=True)
    with pytest.raises(AssertionError, match="would mean others"):
        shortened(drafter.model, ShortList(SOME, 0.9), target.model)
