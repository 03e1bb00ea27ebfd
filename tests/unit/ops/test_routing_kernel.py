"""Routing in one launch, against the definition; ties, bad rows, and a bias that must not weigh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.ops.mixture_of_experts import RoutingRule, _route_kernel, route_reference


@pytest.mark.parametrize(
    "changes",
    [{}, {"scores": "softmax"}, {"is_renormalised": False, "scaling_factor": 2.5}],
    ids=str,
)
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (8, 2), (37, 6), (16, 16)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_kernel_agrees_with_the_definition(
    kernel_device: torch.device, num_experts: int, num_chosen: int, has_bias: bool, changes: dict[str, Any]
) -> None:
    rule = RoutingRule(num_chosen, **changes)
    logits, bias = torch.randn(5, num_experts) * 2, torch.randn(num_experts) * 0.3
    expected = route_reference(logits, bias if has_bias else None, rule)
    found = _route_kernel(logits.to(kernel_device), bias.to(kernel_device) if has_bias else None, rule)
    assert torch.equal(found.expert_ids_TA.cpu(), expected.expert_ids_TA)
    torch.testing.assert_close(found.weights_TA.cpu(), expected.weights_TA, rtol=2e-6, atol=2e-6)


def test_equal_scores_go_to_the_lower_id(kernel_device: torch.device) -> None:
    logits = torch.tensor([[0.5, 2.0, 0.5, 2.0, 0.5]], device=kernel_device)
    found = _route_kernel(logits, None, RoutingRule(4))
    assert found.expert_ids_TA.tolist() == [[1, 3, 0, 2]]


def test_the_bias_chooses_and_does_not_weigh(kernel_device: torch.device) -> None:
    logits, bias = torch.zeros(1, 3, device=kernel_device), torch.tensor([0.0, 0.0, 5.0], device=kernel_device)
    found = _route_kernel(logits, bias, RoutingRule(1, is_renormalised=False))
    assert found.expert_ids_TA.tolist() == [[2]] and found.weights_TA.tolist() == [[0.5]]


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_a_bad_row_spoils_itself_and_no_neighbour(kernel_device: torch.device, scores: Any) -> None:
    """It still has experts that exist, each once: whatever they say is weighed with NaN."""
    rule, logits = RoutingRule(3, scores=scores), torch.randn(3, 6)
    logits[1, 4] = torch.nan
    found = _route_kernel(logits.to(kernel_device), None, rule)
    ids, weights = found.expert_ids_TA.cpu(), found.weights_TA.cpu()
    assert bool(weights[1].isnan().all()) and len(set(ids[1].tolist())) == 3 and int(ids.max()) < 6
    expected = route_reference(logits[[0, 2]], None, rule)
    assert torch.equal(ids[[0, 2]], expected.expert_ids_TA)
    torch.testing.assert_close(weights[[0, 2]], expected.weights_TA, rtol=2e-6, atol=2e-6)


def test_scores_that_are_all_zero_give_finite_weights(kernel_device: torch.device) -> None:
    logits = torch.full((1, 4), -80.0, device=kernel_device)
    found = _route_kernel(logits, None, RoutingRule(2))
    assert found.expert_ids_TA.tolist() == [[0, 1]] and bool(found.weights_TA.isfinite().all())
