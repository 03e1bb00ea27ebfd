"""Adaptive weights: the worked numbers, and what must not move them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.ops.linear_cross_entropy import LowRankBias
from paceline.training.position_weighting import adaptive_weights, label_cross_entropy

CONFIDENCES = torch.tensor([0.9, 0.5, 0.8, 0.2])


def weights(confidences: Tensor, counts: list[int], alpha: float = 0.5) -> list[float]:
    found: list[float] = adaptive_weights(
        -confidences.log().view(1, 1, -1), torch.tensor(counts, dtype=torch.bool).view(1, 1, -1), alpha=alpha
    )[0, 0].tolist()
    return found


def test_golden_numbers() -> None:
    found = weights(CONFIDENCES, [1, 1, 1, 1])
    assert found == pytest.approx([2.6885, 1.7385, 1.0260, 0.38475], abs=5e-5)
    # What remains of a weight without the way up to its draft: the expected number of drafts from there on.
    reach = [0.95, 0.7125, 0.64125, 0.38475]
    assert [w / p for w, p in zip(found, reach, strict=True)] == pytest.approx([2.83, 2.44, 1.6, 1.0], abs=5e-5)
    assert weights(CONFIDENCES, [1, 1, 0, 0]) == pytest.approx([1.6625, 0.7125, 0.0, 0.0], abs=5e-5)


def test_without_smoothing_a_hopeless_draft_silences_all_after_it() -> None:
    hopeless = torch.tensor([0.9, 0.0, 0.8])
    assert weights(hopeless, [1, 1, 1], alpha=0.0) == pytest.approx([0.9, 0.0, 0.0])
    assert weights(hopeless, [1, 1, 1], alpha=1.0) == pytest.approx([3.0, 2.0, 1.0])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -300.0])
def test_what_does_not_count_may_hold_anything(garbage: float) -> None:
    losses = torch.tensor([[[0.1, 0.7, garbage, garbage]]])
    counts = torch.tensor([[[True, True, False, False]]])
    clean = adaptive_weights(losses.nan_to_num(0.0, 0.0), counts)
    assert torch.equal(adaptive_weights(losses, counts), clean)


def pooled(losses_BAK: Tensor, counts_BAK: Tensor) -> float:
    """The loss as a step divides it: by the number of drafts that count."""
    return float((adaptive_weights(losses_BAK, counts_BAK) * losses_BAK).sum() / counts_BAK.sum())


def test_a_block_that_comes_twice_changes_nothing_and_neither_does_a_cut_into_parts() -> None:
    """Pitfall 26: divided by conversations or by the blocks of one part, the same data would weigh otherwise."""
    losses = torch.rand(4, 3, 5)
    counts = torch.rand(4, 3, 5) < 0.7
    counts = counts.long().cumprod(-1).bool()
    whole = pooled(losses, counts)
    assert pooled(losses.repeat(1, 2, 1), counts.repeat(1, 2, 1)) == pytest.approx(whole, rel=1e-6)
    sums = [
        float((adaptive_weights(losses[part], counts[part]) * losses[part]).sum()) for part in (slice(1), slice(1, 4))
    ]
    assert sum(sums) / float(counts.sum()) == pytest.approx(whole, rel=1e-6)
    # The planted fault: every part divides by its own conversations, and the parts are averaged.
    by_conversation = (sums[0] / 1 + sums[1] / 3) / 2
    assert by_conversation != pytest.approx(whole, rel=1e-2)


def test_no_gradient_flows_through_the_weights() -> None:
    """Else the drafter would be rewarded for weights that are small."""
    losses = torch.rand(1, 2, 4, requires_grad=True)
    found = adaptive_weights(losses, torch.ones(1, 2, 4, dtype=torch.bool))
    assert not found.requires_grad
    (found * losses).sum().backward()
    assert losses.grad is not None and torch.equal(losses.grad, found)


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_the_loss_of_a_row_is_that_of_its_label(chunk_rows: int) -> None:
    hidden, head, labels = torch.randn(9, 6), torch.randn(13, 6), torch.randint(0, 13, (9,))
    bias = LowRankBias(torch.randn(9, 2), torch.randn(13, 2))
    logits = (hidden @ head.T).double()
    for given, added in ((None, 0.0), (bias, (bias.code_RK @ bias.table_VK.T).double())):
        expected = -(logits + added).log_softmax(-1).gather(1, labels[:, None])[:, 0]
        found = label_cross_entropy(hidden, labels, head, bias=given, chunk_rows=chunk_rows)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert label_cross_entropy(torch.randn(0, 6), none, torch.randn(13, 6), bias=None, chunk_rows=4).shape == (0,)
