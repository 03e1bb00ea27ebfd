"""Mixture of experts: routing by worked numbers and a slow twin, the grouped form, shares of ranks, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.gated_activation import Activation
from paceline.ops.linear import can_pack
from paceline.ops.mixture_of_experts import (
    ExpertWeights,
    Routing,
    RoutingRule,
    mix_experts,
    mix_experts_reference,
    pack_experts,
    route,
    router_logits,
)

SITU = Activation("situ", 4.0, 25.0)


def slow_route(logits: list[float], bias: list[float] | None, rule: RoutingRule) -> dict[int, float]:
    """One row in float64; expert to weight."""
    if rule.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    choice = scores if bias is None else [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(logits) // rule.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(rule.num_groups)]
    counted = 1 if bias is None else 2
    ranked = sorted(groups, key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:counted]))
    candidates = [e for group in ranked[: rule.num_kept_groups] for e in group]
    chosen = sorted(candidates, key=lambda e: -choice[e])[: rule.num_experts_per_token]
    total = sum(scores[e] for e in chosen) if rule.is_renormalised else 1.0
    return {e: scores[e] / total * rule.scaling_factor for e in chosen}


def slow_expert(x_X: Tensor, experts: ExpertWeights, expert: int, activation: Activation) -> Tensor:
    gate_up = experts.gate_up_EZX[expert].double() @ x_X.double()
    inside = []
    for gate, up in zip(*(part.tolist() for part in gate_up.chunk(2)), strict=True):
        if activation.kind == "situ":
            assert activation.linear_beta is not None
            up = activation.linear_beta * math.tanh(up / activation.linear_beta)
            inside.append(activation.beta * math.tanh(gate / activation.beta) / (1 + math.exp(-gate)) * up)
        else:
            inside.append(gate / (1 + math.exp(-gate)) * up)
    return experts.down_EXI[expert].double() @ torch.tensor(inside, dtype=torch.float64)


def random_experts(num_experts: int, width: int, inside: int, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    gate_up = torch.randn(num_experts, 2 * inside, width) / width**0.5
    return ExpertWeights(gate_up.to(dtype), (torch.randn(num_experts, width, inside) / inside**0.5).to(dtype))


def random_routing(num_rows: int, num_experts: int, num_chosen: int) -> Routing:
    return route(torch.randn(num_rows, num_experts), None, RoutingRule(num_chosen))


def test_worked_routing() -> None:
    """Sigmoids 0.5, 0.7311, 0.2689, 0.8808; the bias lifts the first above the second, and not into the weights."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    found = route(logits, torch.tensor([0.3, 0.0, 0.0, 0.0]), RoutingRule(2, scaling_factor=2.0))
    assert found.expert_ids_TA.tolist() == [[3, 0]]
    assert found.weights_TA[0].tolist() == pytest.approx([2 * 0.880797 / 1.380797, 2 * 0.5 / 1.380797], abs=1e-5)
    plain = route(logits, None, RoutingRule(2, is_renormalised=False))
    assert plain.expert_ids_TA.tolist() == [[3, 1]]
    assert plain.weights_TA[0].tolist() == pytest.approx([0.880797, 0.731059], abs=1e-5)
    soft = route(logits, None, RoutingRule(1, scores="softmax", is_renormalised=False))
    assert float(soft.weights_TA) == pytest.approx(math.e**2 / (1 + math.e + math.e**-1 + math.e**2), abs=1e-6)


def test_groups_are_chosen_by_their_two_best_and_then_all_others_are_out() -> None:
    logits = torch.tensor([[4.0, -4.0, 1.0, 1.0]])  # the first group has the best expert, the second the better pair
    rule = RoutingRule(1, num_groups=2, num_kept_groups=1)
    assert route(logits, torch.zeros(4), rule).expert_ids_TA.item() in (2, 3)
    assert route(logits, None, rule).expert_ids_TA.item() == 0, "without a bias a group counts as its best"


@given(
    num_groups=st.sampled_from([1, 2, 4]),
    num_kept=st.integers(1, 4),
    num_chosen=st.integers(1, 3),
    scores=st.sampled_from(["sigmoid", "softmax"]),
    has_bias=st.booleans(),
    is_renormalised=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_routing_agrees_with_a_slow_twin(
    num_groups: int, num_kept: int, num_chosen: int, scores: Any, has_bias: bool, is_renormalised: bool, seed: int
) -> None:
    rule = RoutingRule(num_chosen, scores, num_groups, min(num_kept, num_groups), is_renormalised, 2.446)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 12, generator=generator) * 2
    bias = torch.randn(12, generator=generator) * 0.3 if has_bias else None
    found = route(logits, bias, rule)
    assert found.expert_ids_TA.dtype == torch.int64 and found.weights_TA.dtype == torch.float32
    for row in range(4):
        expected = slow_route(logits[row].tolist(), None if bias is None else bias.tolist(), rule)
        assert found.expert_ids_TA[row].tolist() == list(expected), "best first"
        assert found.weights_TA[row].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_scores_that_are_all_zero_give_finite_weights() -> None:
    assert torch.equal(route(torch.full((1, 4), -200.0), None, RoutingRule(2)).weights_TA, torch.zeros(1, 2))


def test_router_logits_are_float32_products_of_the_stored_weights() -> None:
    x, weight = torch.randn(3, 40).bfloat16(), torch.randn(6, 40).bfloat16()
    expected = (x.double() @ weight.double().t()).float()
    for mode in ("plain", "row_invariant"):
        found = router_logits(x, weight, mode=mode)  # type: ignore[arg-type]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(router_logits(x, weight.float(), mode=mode), found)  # type: ignore[arg-type]
    assert (torch.nn.functional.linear(x, weight).float() - expected).abs().max() > 1e-3


@pytest.mark.parametrize("activation", [SITU, Activation("silu")])
@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), [(1, 1, 1), (5, 4, 2), (9, 6, 3), (3, 20, 16)])
def test_both_forms_agree_with_a_slow_twin(
    activation: Activation, num_rows: int, num_experts: int, num_chosen: int
) -> None:
    experts, x = random_experts(num_experts, 6, 5), torch.randn(num_rows, 6)
    routing = random_routing(num_rows, num_experts, num_chosen)
    grouped = mix_experts(x, routing, experts, activation)
    reference = mix_experts_reference(x, routing, experts, activation, 0, "plain")
    for row in range(num_rows):
        expected = torch.zeros(6, dtype=torch.float64)
        for expert, weight in zip(routing.expert_ids_TA[row].tolist(), routing.weights_TA[row].tolist(), strict=True):
            expected += weight * slow_expert(x[row], experts, expert, activation)
        for found in (grouped, reference):
            torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    experts, x = pack_experts(random_experts(20, 24, 7, dtype)), torch.randn(19, 24).to(dtype)
    routing = random_routing(19, 20, 16)
    whole = mix_experts(x, routing, experts, SITU, mode="row_invariant")
    expected = mix_experts_reference(x, routing, experts, SITU, 0, "row_invariant")
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # the order of 16 sums
    torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)
    for row in (0, 7, 18):
        one = slice(row, row + 1)
        alone = Routing(routing.expert_ids_TA[one], routing.weights_TA[one])
        assert torch.equal(mix_experts(x[one], alone, experts, SITU, mode="row_invariant")[0], whole[row])


def test_outputs_are_summed_in_float32_and_rounded_once() -> None:
    experts, x = random_experts(4, 16, 8, torch.bfloat16), torch.randn(40, 16).bfloat16()
    routing = random_routing(40, 4, 3)
    found = mix_experts(x, routing, experts, SITU)
    outputs = torch.stack(
        [mix_experts(x, Routing(ids[:, None], torch.ones(40, 1)), experts, SITU) for ids in routing.expert_ids_TA.T]
    )
    wide = (outputs.float() * routing.weights_TA.T.unsqueeze(-1)).sum(0)
    torch.testing.assert_close(found, wide.bfloat16(), rtol=2**-7, atol=2**-9)
    rounded_at_each_step = torch.zeros_like(x)
    for y, weight in zip(outputs, routing.weights_TA.T, strict=True):
        rounded_at_each_step += y * weight.bfloat16().unsqueeze(-1)
    assert (rounded_at_each_step.float() - wide).abs().mean() > 1.5 * (found.float() - wide).abs().mean()


def test_packed_weights_are_the_same_experts() -> None:
    experts, x = random_experts(3, 32, 16, torch.bfloat16), torch.randn(5, 32).bfloat16()
    packed = pack_experts(experts)
    assert (packed.packed is not None) == can_pack(experts.down_EXI)
    routing = random_routing(5, 3, 2)
    expected = mix_experts(x, routing, experts, SITU)
    torch.testing.assert_close(mix_experts(x, routing, packed, SITU, mode="packed"), expected, rtol=2**-6, atol=2**-7)
    assert pack_experts(random_experts(2, 4, 4)).packed is None, "only bf16 on a CPU is packed"


def test_shares_of_ranks_make_the_whole() -> None:
    experts, x = random_experts(6, 8, 5), torch.randn(7, 8)
    routing = random_routing(7, 6, 3)
    expected, total = mix_experts(x, routing, experts, SITU), torch.zeros(7, 8)
    for first in (0, 2, 4):
        part = ExpertWeights(experts.gate_up_EZX[first : first + 2], experts.down_EXI[first : first + 2])
        share = mix_experts(x, routing, part, SITU, first_expert=first)
        torch.testing.assert_close(share, mix_experts_reference(x, routing, part, SITU, first, "plain"))
        total += share
    torch.testing.assert_close(total, expected)


def test_a_bad_row_spoils_no_neighbour() -> None:
    experts, x = random_experts(4, 8, 5), torch.randn(6, 8)
    logits = torch.randn(6, 4)
    x[2], logits[2] = torch.nan, torch.nan
    found = mix_experts(x, route(logits, None, RoutingRule(2)), experts, SITU)
    assert found[2].isnan().all() and torch.isfinite(found[[0, 1, 3, 4, 5]]).all()


def test_gradients_reach_rows_router_and_experts() -> None:
    experts = [weight.double() for weight in random_experts(3, 4, 3)[:2]]
    x, logits = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64) * 3
    leaves = [t.requires_grad_() for t in (x, logits, *experts)]
    bias = torch.tensor([0.2, 0.0, -0.2], dtype=torch.float64)

    def run(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return mix_experts(x, route(logits, bias, RoutingRule(2)), ExpertWeights(gate_up, down), SITU)

    assert torch.autograd.gradcheck(run, leaves)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="2 equal groups"):
        route(torch.zeros(1, 5), None, RoutingRule(1, num_groups=2))
    with pytest.raises(ShapeError, match="1 of which hold at least 3"):
        route(torch.zeros(1, 4), None, RoutingRule(3, num_groups=2))
    experts, routing = random_experts(2, 4, 3), random_routing(5, 2, 1)
    for x, weights, message in (
        (torch.zeros(5, 3), experts, "down has shape"),
        (torch.zeros(5, 4), experts._replace(gate_up_EZX=torch.zeros(2, 3, 4)), "gate_up has shape"),
        (torch.zeros(6, 4), experts, "expert_ids has shape"),
    ):
        with pytest.raises(ShapeError, match=message):
            mix_experts(x, routing, weights, SITU)
    nothing = mix_experts(torch.zeros(0, 4), random_routing(0, 2, 1), experts, SITU)
    assert nothing.shape == (0, 4)
