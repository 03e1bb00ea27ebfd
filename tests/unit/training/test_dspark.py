"""DSpark's objective: both layouts, every Markov head, the loss by its definition, a confidence that only listens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.models.conftest import drafter_contract, randomise, tiny_target
from torch import Tensor, nn

from paceline.checkpoint.contract import ConfidenceSettings, MarkovSettings
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.heads import MarkovHead
from paceline.models.drafters.proposal import DraftSampling
from paceline.training import objective as objective_module
from paceline.training.anchors import Blocks, make_blocks
from paceline.training.data import Batch
from paceline.training.drafting import greedy_drafts, states_after_labels
from paceline.training.dspark import confidence_loss, markov_codes
from paceline.training.features import TargetFeatures
from paceline.training.objective import Features, Objective, Scores, score_drafts

NUM_TOKENS, NUM_DRAFTS = 20, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "anchor": {"layout": "anchor_sampling", "block_size": 4, "markov": MarkovSettings(5, "vanilla")},
    "fill-in": {"block_size": 5, "markov": MarkovSettings(5, "vanilla")},
    "gated": {"layout": "anchor_sampling", "block_size": 4, "markov": MarkovSettings(5, "gated")},
    "rnn": {"block_size": 5, "markov": MarkovSettings(5, "rnn")},
    "none": {"block_size": 5, "confidence": ConfidenceSettings(with_markov=False)},
}


def make_drafter(name: str) -> DSparkDrafter:
    parts = {"family": "dspark", "confidence": ConfidenceSettings(with_markov=True)} | VARIANTS[name]
    drafter = DSparkDrafter(drafter_contract(**parts))
    randomise(drafter, 1)
    return drafter


class Case:
    """Two conversations through a target, and blocks that overlap."""

    def __init__(self, name: str, anchors: list[list[int]] | None = None) -> None:
        self.drafter, self.target = make_drafter(name), tiny_target()
        self.features_of = TargetFeatures(self.target, self.drafter.contract.target_layer_ids)
        self.tokens = torch.randint(0, 60, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(5))
        self.features = self.features_of(Batch.of_rows(self.tokens))
        self.anchors = torch.tensor(anchors or [[5, 7, 12], [6, 9, 17]])
        self.supervised = torch.ones(2, NUM_TOKENS, dtype=torch.bool)

    @property
    def blocks(self) -> Blocks:
        valid = torch.ones_like(self.anchors, dtype=torch.bool)
        return make_blocks(self.tokens, self.supervised, self.anchors, valid, NUM_DRAFTS + 1)

    def states(self) -> Tensor:
        return states_after_labels(
            self.drafter, self.features_of, self.features, Batch.of_rows(self.tokens), self.blocks
        )

    def score(self, features: Features | None = None, **terms: Any) -> Scores:
        objective = Objective(**({"kl": 0.0, "ce": 0.0, "gamma": 4.0, "chunk_rows": 7} | terms))
        head = self.features_of.head_VD
        return score_drafts(self.drafter, self.states(), features or self.features, self.blocks, head, objective)


def walked_logits(case: Case, hidden_KD: Tensor, row: int, anchor: int) -> list[Tensor]:
    """Scores of the block's drafts as the serving walk makes them, with the text instead of drafts before each."""
    head, state, logits = case.drafter.markov_head, None, []
    for k in range(NUM_DRAFTS):
        scores = hidden_KD[k] @ case.features_of.head_VD.T
        if head is not None and anchor + k < NUM_TOKENS:
            bias, state = head.bias(case.tokens[row, anchor + k][None], hidden_KD[k][None], state)
            scores = scores + bias[0]
        logits.append(scores)
    return logits


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_codes_of_all_rows_at_once_are_those_of_the_walk(kind: Any) -> None:
    head = MarkovHead(MarkovSettings(5, kind), hidden_size=6, target_vocab_size=11, draft_vocab_size=9)
    randomise(head, 2)
    previous, hidden = torch.randint(11, (2, 3, NUM_DRAFTS)), torch.randn(2, 3, NUM_DRAFTS, 6)
    codes, state = markov_codes(head, previous, hidden), None
    for k in range(NUM_DRAFTS):
        bias, state = head.bias(previous[:, :, k], hidden[:, :, k], state)
        torch.testing.assert_close(head.markov_w2(codes[:, :, k]), bias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("terms", [{"kl": 1.0}, {"ce": 0.1, "l1": 0.9, "confidence": 1.0}])
@torch.no_grad()
def test_the_loss_is_its_definition(name: str, terms: dict[str, float]) -> None:
    """In float64, draft by draft: base plus bias, position weights, and the foreseen acceptance beside them."""
    case = Case(name)
    case.supervised[0, 9] = False
    weight_of = {"kl": 0.0, "ce": 0.0, "l1": 0.0, "confidence": 1.0} | terms
    hidden, expected, weight_sum = case.states(), 0.0, 0.0
    confidence = case.drafter.confidence_head
    assert confidence is not None
    for row in range(2):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            logits = walked_logits(case, hidden[row, block], row, anchor)
            for k in range(NUM_DRAFTS):
                position = anchor + k + 1
                if position >= NUM_TOKENS or not case.supervised[row, position]:
                    break
                weight = math.exp(-k / 4.0)
                log_q = logits[k].double().log_softmax(-1)
                log_p = (
                    (case.features_of.head_VD @ case.features.hidden_BSD[row, position - 1]).double().log_softmax(-1)
                )
                overlap = float(torch.minimum(log_p.exp(), log_q.exp()).sum())
                read = [hidden[row, block, k]]
                if case.drafter.markov_head is not None:
                    read.append(case.drafter.markov_head.markov_w1.weight[case.tokens[row, position - 1]])
                estimate = float(torch.sigmoid(confidence.proj(torch.cat(read)).double()))
                expected += weight * (
                    weight_of["kl"] * float((log_p.exp() * (log_p - log_q)).sum())
                    - weight_of["ce"] * float(log_q[case.tokens[row, position]])
                    + weight_of["l1"] * 2 * (1 - overlap)
                    - weight_of["confidence"] * overlap * math.log(estimate)
                    - weight_of["confidence"] * (1 - overlap) * math.log(1 - estimate)
                )
                weight_sum += weight
    scores = case.score(**terms)
    assert float(scores.loss_sum) == pytest.approx(expected, rel=1e-4)
    assert float(scores.weight_sum) == pytest.approx(weight_sum, rel=1e-6)


@pytest.mark.parametrize("name", ["anchor", "fill-in"])
@torch.no_grad()
def test_both_layouts_learn_the_same_positions(name: str) -> None:
    """Anchor 10, 4 drafts: labels at 11..14, taught by the states at 10..13, after the tokens at 10..13."""
    case = Case(name, [[10], [10]])
    before = float(case.score(kl=1.0, confidence=0.0).loss_sum)
    teachers = []
    for position in range(NUM_TOKENS):
        hidden = case.features.hidden_BSD.clone()
        hidden[0, position] += 1.0
        if float(case.score(case.features._replace(hidden_BSD=hidden), kl=1.0, confidence=0.0).loss_sum) != before:
            teachers.append(position)
    assert teachers == [10, 11, 12, 13]
    head = case.drafter.markov_head
    assert head is not None
    blocks = case.blocks
    assert blocks.labels_BAQ[0, 0].tolist() == case.tokens[0, 10:15].tolist()
    codes = markov_codes(head, blocks.labels_BAQ[..., :-1], case.states())
    assert torch.equal(codes[0, 0], head.markov_w1(case.tokens[0, 10:14]))


@pytest.mark.parametrize("name", ["anchor", "rnn"])
@torch.no_grad()
def test_a_block_sees_nothing_at_or_after_its_anchor_and_no_other_block(name: str) -> None:
    case = Case(name)
    before = case.states()
    for row in range(2):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            taps = [tap.clone() for tap in case.features.taps]
            for tap in taps:
                tap[row, anchor:] += 1e3
                tap[1 - row] = 7.0
            tokens = case.tokens.clone()
            tokens[row, torch.arange(NUM_TOKENS) != anchor] = 3
            features = case.features._replace(taps=taps)
            blocks = make_blocks(
                tokens, case.supervised, case.anchors, torch.ones_like(case.anchors, dtype=torch.bool), NUM_DRAFTS + 1
            )
            after = states_after_labels(case.drafter, case.features_of, features, Batch.of_rows(tokens), blocks)
            assert torch.equal(after[row, block], before[row, block])


def gradients(case: Case, **terms: Any) -> dict[str, Tensor]:
    case.drafter.zero_grad()
    case.score(**terms).loss_sum.backward()
    return {name: p.grad.clone() for name, p in case.drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_confidence_trains_its_own_head_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B108: the same gradient of everything else whatever the confidence weighs."""

    def disturbed(case: Case) -> set[str]:
        off, on = gradients(case, kl=1.0, confidence=0.0), gradients(case, kl=1.0, confidence=10.0)
        return {parameter for parameter in off if not torch.equal(off[parameter], on[parameter])}

    assert disturbed(Case(name)) == {"confidence_head.proj.weight", "confidence_head.proj.bias"}

    def attached(head: Any, hidden: Tensor, *arguments: Any) -> Tensor:
        """The planted fault: the gradient flows on into the states."""
        linear = nn.functional.linear(hidden, head.proj.weight[:, : hidden.shape[1]])
        return confidence_loss(head, hidden, *arguments) + linear.square().sum()

    monkeypatch.setattr(objective_module, "confidence_loss", attached)
    assert "backbone.fc.weight" in disturbed(Case(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """Along its own direction, over all parameters but the confidence head's at once."""
    case = Case(name)
    terms = {"kl": 0.5, "ce": 0.3, "l1": 0.4, "confidence": 0.0}
    slope = {key: value for key, value in gradients(case, **terms).items() if "confidence" not in key}
    length = math.sqrt(sum(float(value.square().sum()) for value in slope.values()))
    parameters, step = dict(case.drafter.named_parameters()), 2e-3
    losses = []
    with torch.no_grad():
        for sign in (1, -2):
            for key, value in slope.items():
                parameters[key] += sign * step * value / length
            losses.append(float(case.score(**terms).loss_sum))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(length, rel=2e-2)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_simulated_drafts_are_those_of_the_walk(name: str) -> None:
    case = Case(name)
    ids = greedy_drafts(case.drafter, case.features_of, case.features, Batch.of_rows(case.tokens), case.blocks)
    hidden, nothing = case.states(), torch.zeros(1, dtype=torch.long)
    greedy = DraftSampling("greedy", nothing.float(), nothing, nothing, nothing)
    for row in range(2):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            states = hidden[row, block][None]
            logits = case.drafter.logits(states, case.features_of)
            proposal = case.drafter.propose(states, logits, case.tokens[row, anchor][None], greedy)
            assert torch.equal(proposal.ids_BK[0], ids[row, block])
