"""Counters of held-out text: they agree with the loss and the walk, and a selector is judged by what it is given."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target

from paceline.checkpoint.contract import ConfidenceSettings, MarkovSettings, SelectorSettings
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.table import Drafter
from paceline.training.anchors import all_anchors, make_blocks
from paceline.training.data import Conversations
from paceline.training.drafting import states_after_labels
from paceline.training.evaluation_counters import EvaluationCounters, evaluation_counters
from paceline.training.features import TargetFeatures
from paceline.training.objective import Objective, Scores, only_drafted, score_drafts
from paceline.training.simulate import simulate

FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"family": "dflash"},
    "dflash2": {"family": "dflash2"},
    "dspark": {"family": "dspark", "confidence": ConfidenceSettings(with_markov=True)},
    "dspark-rnn": {"family": "dspark", "markov": MarkovSettings(rank=8, kind="rnn"), "layout": "fill_in"},
    "eagle3": {"family": "eagle3"},
    "eagle3-few-ids": {"family": "eagle3", "draft_vocab_size": 20, "has_own_head": True},
}
CONFIDENT = {"family": "dspark", "confidence": ConfidenceSettings(with_markov=False)}
OPTIONS: dict[str, Any] = {"batch_size": 2, "max_length": 64, "mixed_precision": False}


@pytest.fixture(scope="module")
def target() -> TargetFeatures:
    return TargetFeatures(tiny_target(vocab_size=32), (0, 1, 2))


def make_drafter(vocab_size: int = 32, **changes: Any) -> Drafter:
    return tiny_drafter(tiny_target(vocab_size=vocab_size).contract, block_size=4, **changes)


@pytest.fixture(scope="module")
def texts() -> Conversations:
    """Three conversations: of two answers, of one, and of one whose answer is a single token."""
    marks = ("...####..#####", "....########", "...#.")
    generator = np.random.default_rng(0)
    joined = "".join(marks)
    return Conversations(
        generator.integers(4, 32, len(joined)).astype(np.int32),
        np.array([mark == "#" for mark in joined]),
        np.cumsum([0, *map(len, marks)]).astype(np.int64),
    )


def loss_of(drafter: Drafter, target: TargetFeatures, texts: Conversations, **weights: float) -> Scores:
    """What the objective adds up over every anchor."""
    batch = texts.batch(range(3), 64)
    anchors, valid = all_anchors(batch.supervised_BS)
    num_rows = drafter.contract.num_draft_tokens + 1
    blocks = only_drafted(make_blocks(batch.token_ids_BS, batch.supervised_BS, anchors, valid, num_rows), drafter)
    features = target(batch)
    hidden_BAKD = states_after_labels(drafter, target, features, batch, blocks)
    off = {"kl": 0.0, "ce": 0.0, "selector": 0.0, "confidence": 0.0}
    objective = Objective(gamma=None, chunk_rows=7, **(off | weights))
    return score_drafts(drafter, hidden_BAKD, features, blocks, target.head_VD, objective)


def sums(counters: EvaluationCounters, name: str) -> list[float]:
    found: list[float] = counters.sums[name].tolist()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_are_those_of_the_loss(target: TargetFeatures, texts: Conversations, family: str) -> None:
    drafter = make_drafter(**FAMILIES[family])
    found = evaluation_counters(drafter, target, texts, **OPTIONS)
    ce, kl = (loss_of(drafter, target, texts, **{name: 1.0}) for name in ("ce", "kl"))
    assert sums(found, "counted") == ce.counted_Q[1:].tolist()
    assert sum(sums(found, "ce")) == pytest.approx(float(ce.loss_sum), rel=1e-4)
    assert sum(sums(found, "kl")) == pytest.approx(float(kl.loss_sum), rel=1e-4)
    if family != "eagle3-few-ids":  # whose loss compares with the target's opinion of these ids alone
        l1 = loss_of(drafter, target, texts, l1=1.0)  # sum |p - q| = 2 - 2 sum min(p, q)
        counted = sum(sums(found, "counted"))
        assert sum(sums(found, "acceptance")) == pytest.approx(counted - float(l1.loss_sum) / 2, rel=1e-4)
    if family != "dflash2":
        assert sums(found, "correct") == ce.correct_Q[1:].tolist()
    json.dumps(found.row(), allow_nan=False)


def test_a_drafter_of_few_ids_is_accepted_as_the_whole_vocabulary_says(
    target: TargetFeatures, texts: Conversations
) -> None:
    """What the target would rather say is refused, whether it can be drafted or not; draft by draft, in float64."""
    drafter = make_drafter(**FAMILIES["eagle3-few-ids"])
    ids_V = drafter.vocabulary.target_ids_V
    assert ids_V is not None
    batch = texts.batch(range(3), 64)
    anchors, valid = all_anchors(batch.supervised_BS)
    blocks = make_blocks(batch.token_ids_BS, batch.supervised_BS, anchors, valid, drafter.contract.num_draft_tokens + 1)
    features = target(batch)
    hidden_BAKD = states_after_labels(drafter, target, features, batch, blocks)
    expected = [0.0] * drafter.contract.num_draft_tokens
    for row, block, draft in only_drafted(blocks, drafter).counts_BAQ[..., 1:].nonzero().tolist():
        p_W = target.logits(features.hidden_BSD[row, anchors[row, block] + draft]).double().softmax(-1)
        q_V = drafter.logits(hidden_BAKD[row, block, draft], target).double().softmax(-1)
        expected[draft] += sum(min(float(p_W[token]), float(q)) for token, q in zip(ids_V.tolist(), q_V, strict=True))
    found = evaluation_counters(drafter, target, texts, **OPTIONS)
    assert sums(found, "acceptance") == pytest.approx(expected, rel=1e-5)


def test_the_selectors_walk_is_the_one_of_the_simulation(target: TargetFeatures, texts: Conversations) -> None:
    drafter = make_drafter(**FAMILIES["dflash2"])
    row = evaluation_counters(drafter, target, texts, **OPTIONS).row()
    simulated = simulate(drafter, target, texts, **OPTIONS)
    assert row["selector_length"] == pytest.approx(simulated.acceptance_length)
    assert isinstance(row["oracle_length"], float) and isinstance(row["unary_length"], float)
    assert row["oracle_length"] >= max(row["unary_length"], row["selector_length"])


def test_a_selectors_acceptance_is_what_sampling_would_accept(target: TargetFeatures, texts: Conversations) -> None:
    """From its candidates alone: with all of them offered and no say of its own, the drafter's acceptance."""
    drafter = make_drafter(**FAMILIES["dflash2"])
    assert isinstance(drafter, DFlash2Drafter)
    found = evaluation_counters(drafter, target, texts, **OPTIONS)
    row = found.row()
    assert row["selector_acceptance_by_draft"] == sums(found, "selector_acceptance")
    counted, accepted = sums(found, "counted"), sums(found, "selector_acceptance")
    assert all(0.0 < value < count for value, count in zip(accepted, counted, strict=True))
    offered = sums(found, "target_mass_in_candidates")  # p counts as it is, or more than it could be accepted
    assert all(value <= mass for value, mass in zip(accepted, offered, strict=True))
    assert accepted != pytest.approx(sums(found, "acceptance"))
    with torch.no_grad():
        drafter.candidate_selector.predecessor_codebook.zero_()
    drafter.candidate_selector.top_k = drafter.contract.vocab_size
    found = evaluation_counters(drafter, target, texts, **OPTIONS)
    assert sums(found, "selector_acceptance") == pytest.approx(sums(found, "acceptance"), rel=1e-4)


def test_l1_is_what_sampling_refuses_of_the_selectors_draws_too(target: TargetFeatures, texts: Conversations) -> None:
    """Every id is offered, so no label is put in, and the selector has a say."""
    drafter = make_drafter(**FAMILIES["dflash2"])
    assert isinstance(drafter, DFlash2Drafter)
    drafter.candidate_selector.top_k = drafter.contract.vocab_size
    found = evaluation_counters(drafter, target, texts, **OPTIONS)
    refused = {
        name: sum(sums(found, "counted")) - sum(sums(found, name)) for name in ("acceptance", "selector_acceptance")
    }
    assert refused["acceptance"] != pytest.approx(refused["selector_acceptance"], rel=1e-3)
    both = loss_of(drafter, target, texts, l1=1.0, selector=1.0)
    assert float(both.loss_sum) == pytest.approx(2 * sum(refused.values()), rel=1e-4)


def test_a_selector_without_a_say_walks_as_the_rows_alone(target: TargetFeatures, texts: Conversations) -> None:
    drafter = make_drafter(**FAMILIES["dflash2"])
    assert isinstance(drafter, DFlash2Drafter)
    with torch.no_grad():
        drafter.candidate_selector.predecessor_codebook.zero_()
    found = evaluation_counters(drafter, target, texts, **OPTIONS)
    assert found.row()["selector_length"] == found.row()["unary_length"]
    assert sums(found, "selector_correct") == sums(found, "correct")


def test_a_missing_label_is_not_put_among_the_candidates(target: TargetFeatures, texts: Conversations) -> None:
    """In the loss it is; counting that would show a recall of one from the first step on."""
    few = make_drafter(**FAMILIES["dflash2"])
    whole = make_drafter(**(FAMILIES["dflash2"] | {"selector": SelectorSettings(rank=8, top_k=32)}))
    found = evaluation_counters(few, target, texts, **OPTIONS)
    assert sum(sums(found, "label_in_candidates")) < 0.6 * sum(sums(found, "counted"))
    assert sum(sums(found, "target_mass_in_candidates")) < sum(sums(found, "counted"))
    found = evaluation_counters(whole, target, texts, **OPTIONS)
    assert sums(found, "label_in_candidates") == sums(found, "counted")
    assert sums(found, "target_mass_in_candidates") == pytest.approx(sums(found, "counted"))


def test_a_constant_confidence_is_off_by_its_distance_from_the_mean(
    target: TargetFeatures, texts: Conversations
) -> None:
    drafter = make_drafter(**CONFIDENT)
    assert isinstance(drafter, DSparkDrafter) and drafter.confidence_head is not None
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        assert drafter.confidence_head.proj.bias is not None
        drafter.confidence_head.proj.bias.fill_(float(torch.logit(torch.tensor(0.7))))
    found = evaluation_counters(drafter, target, texts, **OPTIONS)
    row = found.row()
    counted = sums(found, "counted")
    means = [a / n for a, n in zip(sums(found, "acceptance"), counted, strict=True)]
    assert sums(found, "confidence") == pytest.approx([0.7 * n for n in counted])
    assert row["calibration_error_by_draft"] == pytest.approx([abs(0.7 - mean) for mean in means], abs=1e-6)
    blocks = sums(found, "counted_blocks")
    expected = [0.7 ** (k + 1) - sums(found, "acceptance_product")[k] / blocks[k] for k in range(len(blocks))]
    assert row["confidence_bias_by_draft"] == pytest.approx(expected, abs=1e-6)


def test_a_batch_without_anything_to_score_counts_nothing(target: TargetFeatures) -> None:
    nothing = Conversations(np.full(8, 5, np.int32), np.zeros(8, bool), np.array([0, 8]))
    assert evaluation_counters(make_drafter(), target, nothing, **OPTIONS).row() == {}


def test_batches_add_up(target: TargetFeatures, texts: Conversations) -> None:
    drafter = make_drafter(**FAMILIES["dflash2"])
    one, all_together = (
        evaluation_counters(drafter, target, texts, **(OPTIONS | {"batch_size": size})).row() for size in (1, 3)
    )
    assert one.keys() == all_together.keys()
    for name, value in one.items():
        assert value == pytest.approx(all_together[name], rel=1e-4), name


@pytest.mark.parametrize("family", ["dflash2", "dspark"])
def test_ranks_that_share_the_conversations_count_what_one_counts(
    target: TargetFeatures, texts: Conversations, family: str
) -> None:
    drafter = make_drafter(**FAMILIES[family])
    parts = [evaluation_counters(drafter, target, texts.select(rows), **OPTIONS) for rows in ([0], [], [1, 2])]
    whole = evaluation_counters(drafter, target, texts, **OPTIONS).row()
    shared = EvaluationCounters.pooled(parts).row()
    assert shared.keys() == whole.keys()
    for name, value in whole.items():
        assert value == pytest.approx(shared[name], rel=1e-4), name
