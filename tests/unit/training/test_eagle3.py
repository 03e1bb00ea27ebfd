"""EAGLE-3 unrolled: all blocks at once give what drafting them one by one gives, and no block sees past its anchor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.models.conftest import drafter_contract, randomise, tiny_target
from torch import Tensor

from paceline.checkpoint.contract import Eagle3Settings
from paceline.models.attends import WholeSequence
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.training import eagle3 as eagle3_module
from paceline.training.anchors import Blocks, make_blocks
from paceline.training.data import Batch
from paceline.training.drafting import greedy_drafts, states_after_labels
from paceline.training.features import TargetFeatures
from paceline.training.objective import Features, Objective, Scores, only_drafted, score_drafts

NUM_TOKENS, NUM_DRAFTS = 18, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"has_tap_norm": True, "eagle3": Eagle3Settings(False, False, True, False)},
    "two-layers": {"num_layers": 2, "layer_windows": (None,) * 2, "layer_causal": (True,) * 2, "has_own_head": True},
    "few-ids": {"draft_vocab_size": 30, "has_own_head": True},
}


class Case:
    """Two conversations through a target, and chains that overlap."""

    def __init__(self, name: str, anchors: list[list[int]] | None = None) -> None:
        parts = {
            "family": "eagle3",
            "layout": "autoregressive",
            "block_size": NUM_DRAFTS + 1,
            "has_qk_norm": False,
            "num_layers": 1,
            "layer_windows": (None,),
            "layer_causal": (True,),
            "eagle3": Eagle3Settings(True, False, False, False),
        }
        self.drafter, self.target = Eagle3Drafter(drafter_contract(**(parts | VARIANTS[name]))), tiny_target()
        randomise(self.drafter, 1)
        if name == "few-ids":
            self.drafter.vocabulary.set_tables(torch.arange(1, 61, 2), None)
        self.features_of = TargetFeatures(self.target, self.drafter.contract.target_layer_ids)
        self.tokens = torch.randint(0, 60, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(5))
        self.features = self.features_of(Batch.of_rows(self.tokens))
        self.anchors = torch.tensor(anchors or [[1, 7, 9], [6, 8, 15]])
        self.supervised = torch.ones(2, NUM_TOKENS, dtype=torch.bool)

    @property
    def blocks(self) -> Blocks:
        valid = torch.ones_like(self.anchors, dtype=torch.bool)
        blocks = make_blocks(self.tokens, self.supervised, self.anchors, valid, NUM_DRAFTS + 1)
        return only_drafted(blocks, self.drafter)

    def states(self) -> Tensor:
        return states_after_labels(
            self.drafter, self.features_of, self.features, Batch.of_rows(self.tokens), self.blocks
        )

    def score(self, features: Features | None = None, **terms: Any) -> Scores:
        objective = Objective(**({"kl": 0.0, "ce": 0.0, "gamma": 4.0, "chunk_rows": 7} | terms))
        head = self.features_of.head_VD
        return score_drafts(self.drafter, self.states(), features or self.features, self.blocks, head, objective)

    def one_by_one(self, row: int, anchor: int, given: list[int] | None) -> tuple[list[Tensor], list[int]]:
        """One chain by its definition, every pass over all rows again. With `given`, it reads those ids."""
        drafter, target = self.drafter, self.features_of
        ids = self.tokens[row, 1 : anchor + 1].tolist()
        hidden = [*drafter.features([tap[row, :anchor] for tap in self.features.taps])]
        states, drafts = [], []
        for k in range(NUM_DRAFTS):
            embeddings = drafter.embed(torch.tensor([ids]), target)
            positions = torch.arange(len(ids))[None]
            out, recycled = drafter(embeddings, torch.stack(hidden)[None], positions, WholeSequence())
            states.append(out[0, -1])
            best = int(drafter.logits(out[0, -1], target).argmax())
            drafts.append(int(drafter.vocabulary.to_target_ids(torch.tensor(best))))
            ids.append(drafts[-1] if given is None else given[k])
            hidden.append(recycled[0, -1])
        return states, drafts


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_all_chains_at_once_are_those_drafted_one_by_one(name: str) -> None:
    case = Case(name)
    states = case.states()
    drafts = greedy_drafts(case.drafter, case.features_of, case.features, Batch.of_rows(case.tokens), case.blocks)
    for row in range(2):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            labels = case.blocks.labels_BAQ[row, block, 1:].tolist()
            expected, _ = case.one_by_one(row, anchor, labels)
            torch.testing.assert_close(states[row, block], torch.stack(expected), rtol=1e-4, atol=1e-5)
            _, drafted = case.one_by_one(row, anchor, None)
            assert drafts[row, block].tolist() == drafted


def changed_by_what_it_must_not_see(case: Case) -> bool:
    before, changed = case.states(), False
    for row in range(2):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            taps = [tap.clone() for tap in case.features.taps]
            for tap in taps:
                tap[row, anchor:] += 1e3
                tap[1 - row] = 7.0
            blocks = case.blocks
            blocks.labels_BAQ[row, torch.arange(3) != block] = 3
            tokens = case.tokens.clone()
            tokens[row, anchor + 1 :] = 4
            features = case.features._replace(taps=taps)
            after = states_after_labels(case.drafter, case.features_of, features, Batch.of_rows(tokens), blocks)
            changed |= not torch.equal(after[row, block], before[row, block])
    return changed


@torch.no_grad()
def test_a_chain_sees_nothing_at_or_after_its_anchor_and_no_other_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not changed_by_what_it_must_not_see(Case("plain"))
    chains = eagle3_module._Chains
    for fault in ("anchor", "neighbour"):

        def leaking(settled_BAS: Tensor, own_AA: Tensor, whole: WholeSequence, fault: str = fault) -> Any:
            if fault == "anchor":
                return chains(settled_BAS | settled_BAS.roll(1, dims=-1), own_AA)
            return chains(settled_BAS, torch.ones_like(own_AA))

        monkeypatch.setattr(eagle3_module, "_Chains", leaking)
        assert changed_by_what_it_must_not_see(Case("plain")), f"the planted leak ({fault}) would be missed"


@torch.no_grad()
def test_teachers_and_labels_stand_where_every_family_has_them() -> None:
    """Anchor 10, 4 drafts: labels at 11..14, taught by the target's states at 10..13."""
    case = Case("plain", [[10], [10]])
    before = float(case.score(kl=1.0).loss_sum)
    teachers = []
    for position in range(NUM_TOKENS):
        hidden = case.features.hidden_BSD.clone()
        hidden[0, position] += 1.0
        if float(case.score(case.features._replace(hidden_BSD=hidden), kl=1.0).loss_sum) != before:
            teachers.append(position)
    assert teachers == [10, 11, 12, 13]
    assert case.blocks.labels_BAQ[0, 0, 1:].tolist() == case.tokens[0, 11:15].tolist()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("kl", "ce"), [(1.0, 0.0), (0.0, 1.0)])
@torch.no_grad()
def test_the_loss_is_its_definition(name: str, kl: float, ce: float) -> None:
    """In float64, draft by draft; few ids: both distributions over those alone, other labels carry no loss."""
    case = Case(name)
    expected, weight_sum, own = 0.0, 0.0, case.drafter.vocabulary.lm_head
    drafted = case.drafter.vocabulary.target_ids_V
    for row in range(2):
        for anchor in case.anchors[row].tolist():
            states, _ = case.one_by_one(row, anchor, [*case.tokens[row, anchor + 1 :].tolist(), 0, 0, 0, 0])
            for k in range(NUM_DRAFTS):
                position = anchor + k + 1
                if position >= NUM_TOKENS:
                    break
                teacher = case.features_of.head_VD @ case.features.hidden_BSD[row, position - 1]
                label = int(case.tokens[row, position])
                if drafted is not None:
                    if label not in drafted.tolist():
                        continue
                    teacher, label = teacher[drafted], drafted.tolist().index(label)
                log_p = teacher.double().log_softmax(-1)
                head = case.features_of.head_VD if own is None else own.weight
                log_q = (head @ states[k]).double().log_softmax(-1)
                weight = math.exp(-k / 4.0)
                expected += weight * float(kl * (log_p.exp() * (log_p - log_q)).sum() - ce * log_q[label])
                weight_sum += weight
    scores = case.score(kl=kl, ce=ce)
    assert float(scores.loss_sum) == pytest.approx(expected, rel=1e-4)
    assert float(scores.weight_sum) == pytest.approx(weight_sum, rel=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """Along its own direction, over all parameters at once: through every pass back to the features."""
    case = Case(name)
    case.score(kl=0.6, ce=0.3).loss_sum.backward()
    parameters = list(case.drafter.parameters())
    assert all(parameter.grad is not None for parameter in parameters)
    slope = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    length, step, losses = math.sqrt(sum(float(value.square().sum()) for value in slope)), 2e-3, []
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, value in zip(parameters, slope, strict=True):
                parameter += sign * step * value / length
            losses.append(float(case.score(kl=0.6, ce=0.3).loss_sum))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(length, rel=2e-2)


def test_a_later_draft_trains_the_state_that_it_starts_from() -> None:
    """The recycled state is no constant: the loss of draft 4 alone reaches the features' projection."""
    case = Case("plain", [[10], [10]])
    states = case.states()
    (gradient,) = torch.autograd.grad(states[:, :, 3].square().sum(), [case.drafter.fc.weight], retain_graph=True)
    (cut,) = torch.autograd.grad(states[:, :, 0].square().sum(), [case.drafter.fc.weight])
    assert gradient.abs().max() > 0 and not torch.equal(gradient, cut)
