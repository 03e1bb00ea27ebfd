"""Mixture of experts: which experts serve a row, and the weighted sum of what they say.

    s       = sigmoid(logits) or softmax(logits)                    float32 from float32 logits
    chosen  = the A best of s + bias, among groups with the best sums of two; the bias has no other use
    w       = s of the chosen ones, divided by their sum if renormalised, times the scaling factor
    y       = sum over the chosen of w_a * down_a act(gate_a x, up_a x)

Experts' outputs are rounded to the rows' dtype, then weighed and summed in float32, best first, and rounded once. The
grouped form computes each expert once for all rows that chose it.

Source: DeepSeek-V3 (arXiv 2412.19437, 2.1.2) for the routing; Kimi-Linear and K3, spec 3.6. T rows, D width, E experts,
A chosen per row, G groups, X width of an expert's input, I of its inside, Z = 2 I, P = T * A pairs of row and expert.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, needs_gradient
from paceline.ops.elementwise import sigmoid, widen
from paceline.ops.expert_products import expert_products_triton, weigh_experts_triton
from paceline.ops.few_expert_products import MOST_ROWS, few_expert_products_triton
from paceline.ops.gated_activation import Activation, gated_activation
from paceline.ops.linear import can_pack, linear_packed, linear_row_invariant, pack_weight
from paceline.ops.routing_kernel import route_triton

Arithmetic = Literal["plain", "packed", "native", "quantized", "int8", "row_invariant", "fused"]  # as `ops/linear.py`
_SMALLEST_SUM = 1e-20  # keeps weights finite where all scores are zero; changes no other sum


class RoutingRule(NamedTuple):
    """How a model routes; with one group all experts compete."""

    num_experts_per_token: int
    scores: Literal["sigmoid", "softmax"] = "sigmoid"
    num_groups: int = 1
    num_kept_groups: int = 1
    is_renormalised: bool = True
    scaling_factor: float = 1.0


class Routing(NamedTuple):
    """The chosen experts of each row, int64, best first, and their float32 weights."""

    expert_ids_TA: Tensor
    weights_TA: Tensor


class ExpertWeights(NamedTuple):
    """Experts' matrices: gate rows, then up rows, of each; `packed` from `pack_experts`."""

    gate_up_EZX: Tensor
    down_EXI: Tensor
    packed: tuple[tuple[Tensor, Tensor], ...] | None = None


def pack_experts(weights: ExpertWeights) -> ExpertWeights:
    """The same experts with oneDNN's forms of their matrices, where this build and processor have them."""
    if not (can_pack(weights.gate_up_EZX) and can_pack(weights.down_EXI)):
        return weights
    pairs = zip(weights.gate_up_EZX, weights.down_EXI, strict=True)
    return weights._replace(packed=tuple((pack_weight(gate_up), pack_weight(down)) for gate_up, down in pairs))


def router_logits(x_TD: Tensor, weight_ED: Tensor, *, mode: Arithmetic = "plain") -> Tensor:
    """Scores of all experts in float32: among hundreds, logits rounded to bf16 choose others.

    Args:
        x_TD: rows, any float dtype.
        weight_ED: as stored; kept in float32 it need not be widened at each call.
        mode: "row_invariant" gives a row the same bits whatever its neighbours.
    """
    if mode == "row_invariant":
        return linear_row_invariant(widen(x_TD), widen(weight_ED), None)
    return functional.linear(widen(x_TD), widen(weight_ED))


def route_reference(logits_TE: Tensor, correction_bias_E: Tensor | None, rule: RoutingRule) -> Routing:
    """The definition."""
    num_experts = logits_TE.shape[1]
    group_size = num_experts // rule.num_groups
    scores_TE = sigmoid(logits_TE) if rule.scores == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE.detach() if correction_bias_E is None else scores_TE.detach() + correction_bias_E
    if rule.num_groups > 1:
        choice_TGE = choice_TE.unflatten(1, (rule.num_groups, group_size))
        num_counted = 1 if correction_bias_E is None else min(2, group_size)
        group_scores_TG = choice_TGE.topk(num_counted, dim=-1).values.sum(-1)
        kept = group_scores_TG.topk(rule.num_kept_groups, dim=-1).indices
        is_dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept, False)
        choice_TE = choice_TGE.masked_fill(is_dropped_TG.unsqueeze(-1), -torch.inf).flatten(1)
    ids_TA = choice_TE.topk(rule.num_experts_per_token, dim=-1).indices
    weights_TA = scores_TE.gather(1, ids_TA)
    if rule.is_renormalised:
        weights_TA = weights_TA / (weights_TA.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return Routing(ids_TA, weights_TA * rule.scaling_factor)


def _route_kernel(logits_TE: Tensor, correction_bias_E: Tensor | None, rule: RoutingRule) -> Routing:
    found = route_triton(
        logits_TE,
        correction_bias_E,
        rule.num_experts_per_token,
        is_sigmoid=rule.scores == "sigmoid",
        is_renormalised=rule.is_renormalised,
        scaling_factor=rule.scaling_factor,
        smallest_sum=_SMALLEST_SUM,
    )
    return Routing(*found)


def route(logits_TE: Tensor, correction_bias_E: Tensor | None, rule: RoutingRule) -> Routing:
    """Choose experts and weigh them.

    Args:
        logits_TE: float32.
        correction_bias_E: float32, added for the choice alone; None: there is none, and a group counts as its best.
        rule: of the model.
    Raises:
        ShapeError: the experts do not fall into such groups, or too few remain to choose from.
    """
    num_experts = logits_TE.shape[1]
    group_size = num_experts // rule.num_groups
    if num_experts % rule.num_groups or rule.num_experts_per_token > group_size * rule.num_kept_groups:
        wanted = f"{rule.num_groups} equal groups of experts, {rule.num_kept_groups} of which hold at least "
        raise ShapeError("logits", expected=f"{wanted}{rule.num_experts_per_token}", found=logits_TE.shape)
    if rule.num_groups > 1 or logits_TE.numel() == 0 or needs_gradient(logits_TE):
        return route_reference(logits_TE, correction_bias_E, rule)
    return choose("route", logits_TE, route_reference, _route_kernel)(logits_TE, correction_bias_E, rule)


def mix_experts_reference(
    x_TX: Tensor, routing: Routing, experts: ExpertWeights, activation: Activation, first_expert: int, mode: Arithmetic
) -> Tensor:
    """The definition: row by row, expert by expert."""
    mixed = []
    for x_X, ids, weights_A in zip(x_TX, routing.expert_ids_TA.tolist(), routing.weights_TA, strict=True):
        total_X = torch.zeros(x_X.shape, dtype=weights_A.dtype, device=x_X.device)
        for expert, weight in zip(ids, weights_A, strict=True):
            if 0 <= expert - first_expert < experts.down_EXI.shape[0]:
                here = [_Run(expert - first_expert, 0, 1)]
                gate, up = _products(x_X.unsqueeze(0), experts, 0, here, mode).chunk(2, dim=-1)
                y_1X = _products(gated_activation(gate, up, activation), experts, 1, here, mode)
                total_X = total_X + weight * y_1X[0].to(weight.dtype)
        mixed.append(total_X)
    return torch.stack(mixed).to(x_TX.dtype)


def expert_products_grouped(
    x_TX: Tensor, expert_ids_TA: Tensor, experts: ExpertWeights, activation: Activation, mode: Arithmetic
) -> Tensor:
    """What each chosen expert says to its row, [P, X], zeros for experts outside; one expert after the other."""
    num_experts, num_chosen = experts.down_EXI.shape[0], expert_ids_TA.shape[1]
    ids_P = expert_ids_TA.flatten()
    order_P = ids_P.argsort(stable=True)
    runs = _runs(ids_P[order_P].tolist(), num_experts)
    gathered_PX = x_TX[order_P // num_chosen]
    gate_up_PZ = _products(gathered_PX, experts, 0, runs, mode)
    gate_PI, up_PI = gate_up_PZ.chunk(2, dim=-1)
    y_PX = _products(gated_activation(gate_PI, up_PI, activation), experts, 1, runs, mode)
    return y_PX[order_P.argsort()]


class _Run(NamedTuple):
    """Neighbouring pairs of one expert; None where it is not here."""

    expert: int | None
    first: int
    end: int


def _runs(sorted_ids: list[int], num_experts: int) -> list[_Run]:
    runs, first = [], 0
    for expert, pairs in itertools.groupby(sorted_ids):
        end = first + len(list(pairs))
        runs.append(_Run(expert if 0 <= expert < num_experts else None, first, end))
        first = end
    return runs


def _products(x_PI: Tensor, experts: ExpertWeights, which: int, runs: list[_Run], mode: Arithmetic) -> Tensor:
    """One of the experts' two products, each run with its expert's matrix; zeros where it is not here."""
    weights = experts.down_EXI if which else experts.gate_up_EZX
    outputs = []
    for expert, first, end in runs:
        if expert is None:
            outputs.append(x_PI.new_zeros(end - first, weights.shape[1]))
        else:
            packed = None if experts.packed is None else experts.packed[expert][which]
            outputs.append(_product(x_PI[first:end], weights[expert], packed, mode))
    return torch.cat(outputs)


def _product(x_TI: Tensor, weight_OI: Tensor, packed: Tensor | None, mode: Arithmetic) -> Tensor:
    if mode == "row_invariant":
        return linear_row_invariant(x_TI, weight_OI, None, packed=packed)
    if mode == "packed" and packed is not None:
        return linear_packed(x_TI, packed, None)
    return functional.linear(x_TI, weight_OI)


def _mix_grouped(
    x_TX: Tensor, routing: Routing, experts: ExpertWeights, activation: Activation, mode: Arithmetic
) -> Tensor:
    y_PX = expert_products_grouped(x_TX, routing.expert_ids_TA, experts, activation, mode)
    y_TAX = y_PX.view(x_TX.shape[0], -1, x_TX.shape[1])
    return (y_TAX * routing.weights_TA.unsqueeze(-1)).sum(1).to(x_TX.dtype)


def _mix_by_kernels(
    x_TX: Tensor, routing: Routing, experts: ExpertWeights, activation: Activation, mode: Arithmetic
) -> Tensor:
    """Three launches for the rows of a step; more rows are sorted first, and waited for in neither case."""
    products = few_expert_products_triton if x_TX.shape[0] <= MOST_ROWS else expert_products_triton
    y_PX = products(x_TX, routing.expert_ids_TA, experts.gate_up_EZX, experts.down_EXI, activation)
    return weigh_experts_triton(y_PX, routing.expert_ids_TA, routing.weights_TA, experts.down_EXI.shape[0])


def mix_experts(
    x_TX: Tensor,
    routing: Routing,
    experts: ExpertWeights,
    activation: Activation,
    *,
    first_expert: int = 0,
    mode: Arithmetic = "plain",
) -> Tensor:
    """The weighted sum of each row's experts.

    Args:
        x_TX: rows as experts read them, any float dtype.
        routing: of the same rows, over all experts of the model.
        experts: matrices in the rows' dtype.
        activation: inside every expert.
        first_expert: id of the first of these experts; others add nothing. Partial sums of all ranks make the whole.
        mode: arithmetic of the products on a CPU; "packed" takes plain ones where nothing is packed.
    Returns:
        [T, X] in the rows' dtype. Differentiable in the rows, the weights of the routing and the matrices.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    num_rows, width = x_TX.shape
    num_experts, _, inside = experts.down_EXI.shape
    if experts.down_EXI.shape[1] != width:
        raise ShapeError("down", expected=[num_experts, width, inside], found=experts.down_EXI.shape)
    if experts.gate_up_EZX.shape != (num_experts, 2 * inside, width):
        raise ShapeError("gate_up", expected=[num_experts, 2 * inside, width], found=experts.gate_up_EZX.shape)
    if routing.expert_ids_TA.shape != routing.weights_TA.shape or routing.expert_ids_TA.shape[0] != num_rows:
        raise ShapeError("expert_ids", expected=f"[{num_rows}, A], as weights", found=routing.expert_ids_TA.shape)
    if x_TX.numel() == 0:
        return torch.zeros_like(x_TX)
    own = routing._replace(expert_ids_TA=routing.expert_ids_TA - first_expert) if first_expert else routing
    if needs_gradient(x_TX, routing.weights_TA, experts.gate_up_EZX, experts.down_EXI):
        return _mix_grouped(x_TX, own, experts, activation, mode)
    return choose("mix_experts", x_TX, _mix_grouped, _mix_by_kernels)(x_TX, own, experts, activation, mode)
