"""Faults of the loss that keep it finite and falling: a factor, a normaliser, a predecessor, a gradient too many.

Each check stands beside the fault that it has to find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.models.conftest import drafter_contract, randomise, tiny_drafter, tiny_target
from torch import Tensor

from paceline.checkpoint.contract import (
    ConfidenceSettings,
    ConvolutionSettings,
    DrafterContract,
    MarkovSettings,
    SelectorSettings,
)
from paceline.models.drafters.dflash2 import CandidateSelector, DFlash2Drafter
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.table import Drafter
from paceline.ops import linear_cross_entropy as loss_module
from paceline.ops.attention import attention_reference
from paceline.ops.linear_cross_entropy import linear_cross_entropy
from paceline.training import objective as objective_module
from paceline.training import strategies as strategies_module
from paceline.training.anchors import make_blocks
from paceline.training.data import Batch
from paceline.training.drafting import states_after_labels
from paceline.training.dspark import confidence_loss, markov_codes
from paceline.training.features import TargetFeatures
from paceline.training.objective import Objective, Scores, position_weights, score_drafts
from paceline.training.selector import SelectorRows, selector_loss, with_labels
from paceline.training.step import StepResult, StepSettings, train_step

NUM_TOKENS = 20


def dflash2_contract() -> DrafterContract:
    return drafter_contract(
        family="dflash2",
        convolution=ConvolutionSettings(num_taps=2, group_size=6),
        selector=SelectorSettings(rank=5, top_k=4),
    )


def dspark_contract(layout: str) -> DrafterContract:
    return drafter_contract(
        family="dspark",
        layout=layout,
        block_size=3 if layout == "anchor_sampling" else 4,
        markov=MarkovSettings(5, "vanilla"),
        confidence=ConfidenceSettings(with_markov=True),
    )


def score(drafter: Drafter, tokens: Tensor, anchor: int, **terms: Any) -> Scores:
    """One conversation, all of it supervised, and one block of three drafts."""
    features_of = TargetFeatures(tiny_target(), drafter.contract.target_layer_ids)
    batch = Batch.of_rows(tokens[None], torch.ones(1, NUM_TOKENS, dtype=torch.bool))
    features, one = features_of(batch), torch.tensor([[True]])
    blocks = make_blocks(batch.token_ids_BS, batch.supervised_BS, torch.tensor([[anchor]]), one, 4)
    objective = Objective(kl=0.0, ce=1.0, gamma=4.0, chunk_rows=7, **terms)
    hidden = states_after_labels(drafter, features_of, features, batch, blocks)
    return score_drafts(drafter, hidden, features, blocks, features_of.head_VD, objective)


# --- 28: total variation and L1 differ by a factor of 2 ---

P, Q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.5, 0.2, 0.3]])


def distance_and_acceptance() -> tuple[float, float]:
    arguments = (Q.log(), P.log(), torch.tensor([0]), torch.ones(1), torch.eye(3))
    found = linear_cross_entropy(*arguments, kl=0.0, ce=0.0, l1=1.0, wants_acceptance=True)
    return float(found.loss), float(found.acceptance_R[0])


def test_l1_is_the_whole_distance_twice_what_sampling_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = pytest.approx((0.4, 0.8), abs=1e-6)
    assert distance_and_acceptance() == golden
    chunk = loss_module._chunk_loss_and_gradient

    def halved(*arguments: Any) -> tuple[Tensor, ...]:
        """Total variation under the name of L1."""
        loss, gradient, *rest = chunk(*arguments)
        return 0.5 * loss, 0.5 * gradient, *rest

    monkeypatch.setattr(loss_module, "_chunk_loss_and_gradient", halved)
    assert distance_and_acceptance() != golden


# --- 24, golden numbers 4: pooled sums, not a mean of means ---


def pooled_loss(monkeypatch: pytest.MonkeyPatch) -> float:
    """Two parts of 10 and 2 labels whose losses sum to 30 and 2."""
    rows = [torch.arange(16), torch.arange(8)]
    batches = []
    for tokens, supervised in zip(rows, (range(5, 16), range(5, 8)), strict=True):
        marks = torch.zeros(1, len(tokens), dtype=torch.bool)
        marks[0, list(supervised)] = True
        batches.append(Batch.of_rows(tokens[None], marks))
    sums = iter([30.0, 2.0])

    def scored(drafter: Any, hidden_BAKD: Tensor, *rest: Any) -> Scores:
        found = score_drafts(drafter, hidden_BAKD, *rest)
        return found._replace(loss_sum=0.0 * found.loss_sum + next(sums))

    drafter = tiny_drafter(block_size=2)  # one draft per anchor
    features = TargetFeatures(tiny_target(), drafter.contract.target_layer_ids)
    settings = StepSettings(Objective(0.0, 1.0, None, 16), num_anchors=99, clip_norm=1.0, mixed_precision=False)
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(strategies_module, "score_drafts", scored)
        result = train_step(drafter, features, optimizer, batches, lambda part: torch.Generator(), 0.0, settings)
    assert result.counted_Q.tolist() == [0, 12]
    return float(result.loss)


def test_losses_of_unequal_parts_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pooled_loss(monkeypatch) == pytest.approx(32 / 12, abs=1e-6)
    assert pooled_loss(monkeypatch) != pytest.approx((30 / 10 + 2 / 2) / 2, abs=0.1)


def test_the_normaliser_is_the_sum_of_the_weights_that_count() -> None:
    """Losses 1 and 3 at the two drafts that count, weights 1 and exp(-1/4)."""
    losses = torch.tensor([1.0, 3.0])
    logits = torch.stack((-losses, torch.log1p(-torch.exp(-losses))), dim=1)  # -log of the label's share is the loss
    weights = torch.exp(-torch.arange(2) / 4.0)
    found = linear_cross_entropy(logits, None, torch.zeros(2, dtype=torch.long), weights, torch.eye(2), kl=0.0, ce=1.0)
    assert float(found.loss / weights.sum()) == pytest.approx(1.8756, abs=5e-5)
    assert float(found.loss / len(weights)) == pytest.approx(1.6682, abs=5e-5)  # what other trainers report


# --- 36: nothing is overwritten by the backward pass ---


def forward_and_two_backwards() -> bool:
    """Whether inputs and results are the same after a backward, and a second one gives the same gradient."""
    torch.manual_seed(1)
    hidden, teacher, head = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6), torch.randn(11, 6)
    labels, weights = torch.randint(0, 11, (5,)), torch.rand(5)
    found = linear_cross_entropy(
        hidden, teacher, labels, weights, head, kl=0.5, ce=0.5, num_candidates=3, wants_acceptance=True
    )
    kept = [hidden.detach(), teacher, head, labels, weights, *(tensor.detach() for tensor in found)]
    before = [tensor.clone() for tensor in kept]
    gradients = [torch.autograd.grad(3.0 * found.loss, hidden, retain_graph=True)[0].clone() for _ in range(2)]
    unchanged = all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))
    return unchanged and torch.equal(*gradients)


def test_metrics_read_after_a_backward_are_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forward_and_two_backwards()
    backward = loss_module._LinearCrossEntropy.backward

    def in_place(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = backward(ctx, *gradients)
        ctx.saved_tensors[0].data.mul_(gradients[0])  # autograd would notice it otherwise
        return found

    monkeypatch.setattr(loss_module._LinearCrossEntropy, "backward", staticmethod(in_place))
    assert not forward_and_two_backwards()


# --- 40: a selector is judged on candidates that it really had ---


def test_an_injected_label_is_learnt_from_and_never_counted_as_right() -> None:
    """A selector that prefers whatever was injected would look perfect."""
    always_right = CandidateSelector(30, 8, 30, 5)  # scores 100 where candidate and predecessor are the same id
    head, hidden = torch.randn(30, 8), torch.randn(6, 8)
    hidden[:, 0] = 1.0
    with torch.no_grad():
        always_right.predecessor_codebook.copy_(100 * torch.eye(30))
        always_right.successor_codebook.copy_(torch.eye(30))
        always_right.hidden_projection.weight.zero_()
        always_right.hidden_projection.weight[:, 0] = 1.0
    order = (hidden @ head.T).argsort(-1, descending=True)
    labels = torch.cat((order[:3, 1], order[3:, 20]))  # the last three are not among the five candidates
    rows = SelectorRows(hidden, None, labels, labels, order[:, :5], torch.ones(6))
    loss, right = selector_loss(always_right, rows, head, kl=0.0, ce=1.0)
    assert float(loss.detach()) < 1e-3, "it ranks every label first, injected or not"
    assert right.tolist() == [True] * 3 + [False] * 3, "three of these can never be proposed"
    # The planted fault: candidates that already hold the labels, as if nothing were missing.
    injected = dataclasses.replace(rows, candidates_RC=with_labels(rows.candidates_RC, labels))
    assert selector_loss(always_right, injected, head, kl=0.0, ce=1.0)[1].all()


# --- 47, golden numbers 7: the token before each label ---


def predecessors(drafter: Drafter, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which positions' tokens condition the drafts of the block at anchor 10."""
    seen: list[int] = []
    tokens = torch.arange(30, 30 + NUM_TOKENS)
    original: Callable[..., Any] = getattr(objective_module, name)

    def noted(part: Any, given: Any, *rest: Any, **options: Any) -> Any:
        ids = given.predecessors_R if isinstance(given, SelectorRows) else given
        seen.extend((ids - 30).flatten().tolist())
        return original(part, given, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(objective_module, name, noted)
        score(drafter, tokens, 10, confidence=0.0)
    return seen


def test_the_first_drafts_predecessor_is_the_anchor_in_every_family_and_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = DFlash2Drafter(dflash2_contract())
    randomise(drafter, 1)
    assert predecessors(drafter, "selector_loss", monkeypatch) == [10, 11, 12]
    for layout in ("fill_in", "anchor_sampling"):
        markov = DSparkDrafter(dspark_contract(layout))
        randomise(markov, 1)
        assert predecessors(markov, "markov_codes", monkeypatch) == [10, 11, 12]
    rows_of = objective_module._rows

    def one_late(*arguments: Any) -> Any:
        rows = rows_of(*arguments)
        return rows._replace(previous_R=rows.labels_R)

    monkeypatch.setattr(objective_module, "_rows", one_late)
    assert predecessors(drafter, "selector_loss", monkeypatch) != [10, 11, 12]


# --- 48: the confidence's target is the acceptance of what is really drafted from, and only a number ---


def foreseen(drafter: DSparkDrafter, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The targets that the confidence head of one block learns."""
    seen: list[float] = []

    def noted(head: Any, hidden: Tensor, embedding: Any, acceptance_N: Tensor, weights: Tensor) -> Tensor:
        seen.extend(acceptance_N.tolist())
        return confidence_loss(head, hidden, embedding, acceptance_N, weights)

    with monkeypatch.context() as patch:
        patch.setattr(objective_module, "confidence_loss", noted)
        score(drafter, torch.arange(30, 30 + NUM_TOKENS), 10)
    return seen


def corrected(drafter: DSparkDrafter) -> list[float]:
    """sum min(p, q) draft by draft, the Markov bias being part of q."""
    target, tokens = tiny_target(), torch.arange(30, 30 + NUM_TOKENS)
    features_of = TargetFeatures(target, drafter.contract.target_layer_ids)
    batch = Batch.of_rows(tokens[None], torch.ones(1, NUM_TOKENS, dtype=torch.bool))
    features = features_of(batch)
    blocks = make_blocks(batch.token_ids_BS, batch.supervised_BS, torch.tensor([[10]]), torch.tensor([[True]]), 4)
    hidden = states_after_labels(drafter, features_of, features, batch, blocks)
    head = drafter.markov_head
    assert head is not None
    bias = head.markov_w2(markov_codes(head, blocks.labels_BAQ[..., :-1], hidden))
    q = (hidden @ features_of.head_VD.T + bias).softmax(-1)
    p = (features.hidden_BSD[:, None, 10:13] @ features_of.head_VD.T).softmax(-1)
    found: list[float] = torch.minimum(p, q).sum(-1)[0, 0].tolist()
    return found


def test_confidence_learns_the_acceptance_of_the_corrected_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = DSparkDrafter(dspark_contract("anchor_sampling"))
    randomise(drafter, 1)
    expected = pytest.approx(corrected(drafter), abs=1e-5)
    assert foreseen(drafter, monkeypatch) == expected

    def uncorrected(*arguments: Any, bias: Any, **options: Any) -> Any:
        return linear_cross_entropy(*arguments, **options)

    monkeypatch.setattr(objective_module, "linear_cross_entropy", uncorrected)
    assert foreseen(drafter, monkeypatch) != expected


def test_confidence_sends_no_gradient_to_states_or_to_its_target() -> None:
    drafter = DSparkDrafter(dspark_contract("anchor_sampling"))
    randomise(drafter, 1)
    head = drafter.confidence_head
    assert head is not None
    hidden, embedding = torch.randn(4, 24, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    acceptance = torch.rand(4, requires_grad=True)
    confidence_loss(head, hidden, embedding, acceptance, torch.ones(4)).backward()
    assert hidden.grad is None and embedding.grad is None and acceptance.grad is None
    assert head.proj.weight.grad is not None and head.proj.weight.grad.abs().sum() > 0


# --- 8: a block that sees nothing ---


def step_on(lengths: list[int], width: int) -> tuple[StepResult, dict[str, Tensor]]:
    """One step of plain descent at rate 1 over answers of these lengths behind four tokens: what it changes."""
    tokens, marks = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width).bool()
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(length)
        tokens[row, :length] = torch.randint(0, 60, (length,), generator=generator)
        marks[row, 4:length] = True
    drafter = tiny_drafter(block_size=8, max_position_embeddings=256)
    target = tiny_target(max_position_embeddings=256)
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    features = TargetFeatures(target, drafter.contract.target_layer_ids)
    settings = StepSettings(Objective(1.0, 0.0, 4.0, 64), num_anchors=16, clip_norm=1e9, mixed_precision=False)
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.0)
    batch = Batch.of_rows(tokens, marks, torch.tensor(lengths))
    result = train_step(drafter, features, optimizer, [batch], lambda part: torch.Generator(), 1.0, settings)
    return result, {name: before[name] - parameter.detach() for name, parameter in drafter.named_parameters()}


def test_blocks_without_an_anchor_are_finite_beside_full_ones() -> None:
    """B99: texts of 128 and 9 tokens; the shorter one has room for 4 of 16 blocks, and none at 5 tokens."""
    result, both = step_on([128, 9], 128)
    assert bool(result.is_finite)
    alone = [step_on([length], 128) for length in (128, 9)]
    weights = [float((found.counted_Q[1:] * position_weights(8, 4.0)[1:]).sum()) for found, _ in alone]
    for name, change in both.items():
        parts = [weight * changes[name] for weight, (_, changes) in zip(weights, alone, strict=True)]
        torch.testing.assert_close(change, torch.stack(parts).sum(0) / sum(weights), rtol=1e-3, atol=1e-5, msg=name)
    empty, nothing = step_on([5], 128)
    assert float(empty.loss) == 0.0 and all(torch.count_nonzero(change) == 0 for change in nothing.values())


def test_a_row_that_sees_nothing_would_be_no_number() -> None:
    """The fused kernels of this release turn such a row into zeros; a softmax by its formula does not."""
    anchors, valid = torch.tensor([[0, 0, 5]]), torch.tensor([[False, False, True]])
    visible = objective_module.block_visibility(anchors, 4, 12, window=None, causal=False)
    q, k, v = (torch.randn(1, 2, rows, 8) for rows in (12, 24, 24))
    assert torch.isfinite(attention_reference(q, k, v, visible.unsqueeze(1))).all()
    hidden = visible & valid.repeat_interleave(4, dim=1).unsqueeze(-1)
    assert torch.isnan(attention_reference(q, k, v, hidden.unsqueeze(1))).any()
