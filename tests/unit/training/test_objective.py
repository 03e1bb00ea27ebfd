"""The DFlash objective: nothing leaks into a block, the loss is its definition, and training equals serving."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.fakes import Lending
from tests.unit.models.conftest import CachedContext, tiny_drafter, tiny_target
from torch import Tensor

import paceline.training.objective as objective_module
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.training.anchors import Blocks, all_anchors, block_visibility, make_blocks
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures
from paceline.training.objective import Features, Objective, Scores, draft_blocks, position_weights, score_drafts

CONTRACTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"layer_causal": (True, True)},
    "window": {"layer_windows": (5, None)},
    "mixed": {"layer_windows": (3, 6), "layer_causal": (True, False)},
    "tap-norm": {"has_tap_norm": True, "input_embedding_scale": 2.0},
}
NUM_TOKENS, BLOCK_SIZE = 20, 4


class Case:
    """Random features of two conversations and blocks that overlap."""

    def __init__(self, drafter: DFlashDrafter, anchors: list[list[int]] | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.drafter = drafter
        self.taps = [torch.randn(2, NUM_TOKENS, 24, generator=generator) for _ in range(2)]
        self.hidden = torch.randn(2, NUM_TOKENS, 24, generator=generator)
        self.tokens = torch.randint(0, 60, (2, NUM_TOKENS), generator=generator)
        self.table = torch.randn(61, 24, generator=generator)
        self.head = torch.randn(61, 24, generator=generator)
        self.anchors = torch.tensor(anchors or [[5, 7, 12], [6, 9, 18]])
        self.supervised = torch.ones(2, NUM_TOKENS, dtype=torch.bool)

    @property
    def blocks(self) -> Blocks:
        valid = torch.ones_like(self.anchors, dtype=torch.bool)
        return make_blocks(self.tokens, self.supervised, self.anchors, valid, BLOCK_SIZE)

    def rows(self) -> Tensor:
        ids = self.drafter.block_ids(self.tokens.gather(1, self.anchors), BLOCK_SIZE - 1)
        return self.drafter.embed(ids, Lending(self.table, self.head))

    def draft(self) -> Tensor:
        return draft_blocks(self.drafter, self.taps, self.rows(), self.blocks)


def score_blocks(
    drafter: DFlashDrafter, features: Features, rows: Tensor, blocks: Blocks, head: Tensor, objective: Objective
) -> Scores:
    hidden = drafter.predicted_rows(draft_blocks(drafter, features.taps, rows, blocks))
    return score_drafts(drafter, hidden, features, blocks, head, objective)


@pytest.fixture(params=CONTRACTS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(tiny_drafter(**CONTRACTS[request.param]))


@torch.no_grad()
def leaks(case: Case) -> bool:
    """Whether a block's states change with anything at or after its anchor, or with another block."""
    before = case.draft()
    changed = False
    for row in range(2):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            other = Case(case.drafter)
            for tap in other.taps:
                tap[row, anchor:] = 1e3 * torch.randn(NUM_TOKENS - anchor, 24)
                tap[1 - row] = 7.0
            embeddings = other.rows()
            embeddings[row, torch.arange(3) != block] = 50.0
            after = draft_blocks(case.drafter, other.taps, embeddings, other.blocks)
            changed |= not torch.equal(before[row, block], after[row, block])
    return changed


def test_a_block_sees_nothing_at_or_after_its_anchor_and_no_other_block(case: Case) -> None:
    assert not leaks(case)


@pytest.mark.parametrize("fault", ["anchor", "neighbour"])
def test_a_leaking_mask_would_be_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(anchors: Tensor, block_size: int, context_size: int, **kind: Any) -> Tensor:
        visible = block_visibility(anchors, block_size, context_size, **kind)
        if fault == "anchor":  # `<=` instead of `<`
            visible[..., :context_size] |= block_visibility(anchors + 1, block_size, context_size, **kind)[
                ..., :context_size
            ]
        else:
            visible[..., context_size:] = True
        return visible

    monkeypatch.setattr(objective_module, "block_visibility", leaking)
    assert leaks(Case(tiny_drafter()))


@torch.no_grad()
def test_the_anchors_own_feature_is_invisible_and_the_one_before_it_is_not(case: Case) -> None:
    before = case.draft()
    anchor = int(case.anchors[0, 0])
    case.taps[0][0, anchor] += 10.0
    assert torch.equal(case.draft()[0, 0], before[0, 0])
    case.taps[0][0, anchor - 1] += 10.0
    assert not torch.equal(case.draft()[0, 0], before[0, 0])


def test_the_gradient_of_a_block_stops_before_its_anchor(case: Case) -> None:
    for tap in case.taps:
        tap.requires_grad_()
    hidden = case.draft()
    for row in range(2):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            gradients = torch.autograd.grad(hidden[row, block].square().sum(), case.taps, retain_graph=True)
            for gradient in gradients:
                assert torch.count_nonzero(gradient[row, anchor:]) == 0
                assert torch.count_nonzero(gradient[1 - row]) == 0
            assert torch.count_nonzero(gradients[0][row, anchor - 1]) > 0


@torch.no_grad()
def test_training_on_whole_conversations_equals_serving_step_by_step(case: Case) -> None:
    """Context keys that grow by what each step accepted give the states that training computed at once."""
    anchors = [list(range(1, NUM_TOKENS)), list(range(1, NUM_TOKENS))]
    whole = Case(case.drafter, anchors)
    trained, embeddings = whole.draft(), whole.rows()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for row in range(2):
            context, position = CachedContext(case.drafter), 1
            while position < NUM_TOKENS:
                context.extend([tap[row, context.length : position] for tap in whole.taps])
                served = context.draft(embeddings[row, position - 1])
                expected = trained[row, position - 1]
                assert (served - expected).abs().max() < 1e-4
                assert torch.equal((served @ whole.head.T).argmax(-1), (expected @ whole.head.T).argmax(-1))
                position += 1 + int(torch.randint(0, BLOCK_SIZE, (1,), generator=generator))


@torch.no_grad()
def test_a_blocks_states_do_not_depend_on_the_width_of_its_batch() -> None:
    drafter = tiny_drafter()
    narrow = Case(drafter, [[5, 17, 18], [6, 9, 18]])
    before = narrow.draft()
    valid = torch.ones_like(narrow.anchors, dtype=torch.bool)
    tokens = torch.nn.functional.pad(narrow.tokens, (0, 30))
    supervised = torch.nn.functional.pad(narrow.supervised, (0, 30))
    taps = [torch.nn.functional.pad(tap, (0, 0, 0, 30), value=9.0) for tap in narrow.taps]
    blocks = make_blocks(tokens, supervised, narrow.anchors, valid, BLOCK_SIZE)
    torch.testing.assert_close(draft_blocks(drafter, taps, narrow.rows(), blocks), before, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_positions_past_the_table_are_held_at_its_end() -> None:
    drafter = tiny_drafter(max_position_embeddings=NUM_TOKENS)
    assert torch.isfinite(Case(drafter, [[5, 18, 19], [6, 9, 18]]).draft()).all()


# --- position weights and the loss itself ---


def test_position_weights_decay_from_the_first_prediction() -> None:
    expected = [0, 1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]
    weights = position_weights(8, 4.0)
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=0, atol=5e-5)
    assert float(weights.sum()) == pytest.approx(3.7352, abs=5e-5)
    assert float(position_weights(16, 7.0).sum()) == pytest.approx(6.6306, abs=5e-5)
    assert position_weights(16, 7.0)[-1].item() == pytest.approx(0.1353, abs=5e-5)
    assert position_weights(4, None).tolist() == [0, 1, 1, 1]


def score(case: Case, kl: float, ce: float, gamma: float | None = 4.0) -> Any:
    objective = Objective(kl=kl, ce=ce, gamma=gamma, chunk_rows=7)
    return score_blocks(case.drafter, Features(case.taps, case.hidden), case.rows(), case.blocks, case.head, objective)


@pytest.mark.parametrize(("kl", "ce"), [(0.0, 1.0), (1.0, 0.0), (0.6, 0.3)])
@torch.no_grad()
def test_the_loss_is_the_weighted_sum_over_rows_that_count(kl: float, ce: float) -> None:
    case = Case(tiny_drafter(), [[5, 7, 12], [6, 9, 17]])
    case.supervised[0, 9] = False
    scores = score(case, kl, ce)
    hidden, total, weight_sum = case.draft(), 0.0, 0.0
    correct, counted = [0] * BLOCK_SIZE, [0] * BLOCK_SIZE
    for row in range(2):
        for block, anchor in enumerate(case.anchors[row].tolist()):
            for k in range(1, BLOCK_SIZE):
                position = anchor + k
                if position >= NUM_TOKENS or not case.supervised[row, position]:
                    break
                weight = math.exp(-(k - 1) / 4.0)
                log_q = (case.head @ hidden[row, block, k]).double().log_softmax(-1)
                log_p = (case.head @ case.hidden[row, position - 1]).double().log_softmax(-1)
                label = case.tokens[row, position]
                total += weight * float(kl * (log_p.exp() * (log_p - log_q)).sum() - ce * log_q[label])
                weight_sum += weight
                counted[k] += 1
                correct[k] += int(log_q.argmax() == label)
    assert float(scores.loss_sum) == pytest.approx(total, rel=1e-5)
    assert float(scores.weight_sum) == pytest.approx(weight_sum, rel=1e-6)
    assert scores.counted_Q.tolist() == counted and scores.correct_Q.tolist() == correct


@torch.no_grad()
def test_the_teacher_of_a_row_stands_one_position_before_it() -> None:
    """Anchor 10, block of 4: the target's states at 10, 11, 12 teach, and no others."""
    case = Case(tiny_drafter(), [[10], [10]])
    before = score(case, 1.0, 0.0).loss_sum
    teachers = []
    for position in range(NUM_TOKENS):
        kept = case.hidden.clone()
        case.hidden[0, position] += 1.0
        if not torch.equal(score(case, 1.0, 0.0).loss_sum, before):
            teachers.append(position)
        case.hidden = kept
    assert teachers == [10, 11, 12]


@torch.no_grad()
def test_labels_stand_at_the_rows_own_positions() -> None:
    case = Case(tiny_drafter(), [[10], [10]])
    before, labels = score(case, 0.0, 1.0).loss_sum, []
    embeddings = case.rows()
    for position in range(NUM_TOKENS):
        kept = case.tokens.clone()
        case.tokens[0, position] = (case.tokens[0, position] + 1) % 60
        objective = Objective(kl=0.0, ce=1.0, gamma=4.0, chunk_rows=7)
        scores = score_blocks(
            case.drafter, Features(case.taps, case.hidden), embeddings, case.blocks, case.head, objective
        )
        if not torch.equal(scores.loss_sum, before):
            labels.append(position)
        case.tokens = kept
    assert labels == [11, 12, 13]


@pytest.mark.parametrize("kl", [0.0, 1.0])
def test_a_batch_without_a_valid_anchor_gives_zero_and_zero_gradients(kl: float) -> None:
    case = Case(tiny_drafter())
    case.supervised[:] = False
    anchors, valid = all_anchors(case.supervised)
    assert not valid.any()
    blocks = make_blocks(case.tokens, case.supervised, anchors, valid, BLOCK_SIZE)
    ids = case.drafter.block_ids(case.tokens.gather(1, anchors), BLOCK_SIZE - 1)
    rows = case.drafter.embed(ids, Lending(case.table, case.head))
    objective = Objective(kl=kl, ce=1.0, gamma=4.0, chunk_rows=7)
    scores = score_blocks(case.drafter, Features(case.taps, case.hidden), rows, blocks, case.head, objective)
    scores.loss_sum.backward()
    assert scores.loss_sum.item() == 0.0 and scores.weight_sum.item() == 0.0
    assert scores.counted_Q.tolist() == [0] * BLOCK_SIZE
    for name, parameter in case.drafter.named_parameters():
        assert parameter.grad is not None, name
        assert torch.count_nonzero(parameter.grad) == 0, name


@torch.no_grad()
def test_padding_does_not_matter() -> None:
    """Right padding of the shorter conversation may hold any token: its score stays bit-equal."""
    drafter, target = tiny_drafter(), tiny_target()
    features_of = TargetFeatures(target, drafter.contract.target_layer_ids)
    tokens = torch.randint(0, 60, (2, NUM_TOKENS))
    supervised = torch.zeros(2, NUM_TOKENS, dtype=torch.bool)
    supervised[0, 4:], supervised[1, 4:12] = True, True
    losses = []
    for padding in (0, 33):
        tokens[1, 12:] = padding
        anchors, valid = all_anchors(supervised)
        blocks = make_blocks(tokens, supervised, anchors, valid, BLOCK_SIZE)
        rows = drafter.embed(drafter.block_ids(tokens.gather(1, anchors), BLOCK_SIZE - 1), features_of)
        objective = Objective(kl=1.0, ce=1.0, gamma=4.0, chunk_rows=1000)
        losses.append(
            score_blocks(
                drafter, features_of(Batch.of_rows(tokens)), rows, blocks, features_of.head_VD, objective
            ).loss_sum
        )
    assert torch.equal(losses[0], losses[1])


@torch.no_grad()
def test_whole_path_from_tokens_has_no_leak() -> None:
    """Through the target, too: later tokens change neither taps nor states of an earlier block."""
    drafter, target = tiny_drafter(), tiny_target()
    features_of = TargetFeatures(target, drafter.contract.target_layer_ids)
    tokens = torch.randint(0, 60, (1, NUM_TOKENS))
    anchors, valid = torch.tensor([[9]]), torch.tensor([[True]])

    def states() -> Tensor:
        blocks = make_blocks(tokens, torch.ones(1, NUM_TOKENS, dtype=torch.bool), anchors, valid, BLOCK_SIZE)
        rows = drafter.embed(drafter.block_ids(tokens.gather(1, anchors), BLOCK_SIZE - 1), features_of)
        return draft_blocks(drafter, features_of(Batch.of_rows(tokens)).taps, rows, blocks)

    before = states()
    tokens[0, 10:] = 7
    assert torch.equal(states(), before)
    tokens[0, 9] = (tokens[0, 9] + 1) % 60  # the anchor itself is known
    assert not torch.equal(states(), before)
