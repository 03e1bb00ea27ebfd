"""A mixture of experts on a GPU: routing, and both forms of the experts' products, at the sizes of a Kimi layer.

256 experts of 1,024 inside at width 2,304, eight chosen per row. The floor reads every expert that is chosen once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from benchmarks.gpu_micro_clock import Bench, MicroCase, Row, relative_error
from torch import Tensor

from paceline.ops import mixture_of_experts as mixture
from paceline.ops.expert_products import expert_products_triton, weigh_experts_triton
from paceline.ops.few_expert_products import MOST_ROWS, few_expert_products_triton
from paceline.ops.gated_activation import Activation

PART = "experts"
ROWS = (1, 8, 16, 64, 128, 512)
_SITU = Activation("situ", 4.0, 25.0)


def expert_cases(is_real: bool) -> Iterator[MicroCase]:
    """Routing, then the products of experts, sorted by expert first and without."""
    layer = _Layer(*((256, 8, 2304, 1024) if is_real else (4, 2, 16, 8)))
    for rows in ROWS if is_real else (3,):
        yield MicroCase(PART, "routing", rows, partial(_routing, layer, rows))
        for name, products in (("few rows", few_expert_products_triton), ("sorted", expert_products_triton)):
            if is_real and (rows <= MOST_ROWS or products is expert_products_triton):
                yield MicroCase(PART, f"products, {name}", rows, partial(_products, layer, rows, products))
        yield MicroCase(PART, "sum of experts", rows, partial(_sum, layer, rows))


class _Layer:
    """One layer's experts, far more than the cache holds, made when the first case asks for them."""

    def __init__(self, num_experts: int, num_chosen: int, width: int, inside: int) -> None:
        self.num_experts, self.num_chosen, self.width, self.inside = num_experts, num_chosen, width, inside
        self._experts: mixture.ExpertWeights | None = None

    def experts(self, bench: Bench) -> mixture.ExpertWeights:
        """Random matrices."""
        if self._experts is None:
            shapes = ((self.num_experts, 2 * self.inside, self.width), (self.num_experts, self.width, self.inside))
            gate_up, down = (
                torch.empty(shape, dtype=torch.bfloat16, device=bench.device).normal_() for shape in shapes
            )
            self._experts = mixture.ExpertWeights(gate_up.mul_(self.width**-0.5), down.mul_(self.inside**-0.5))
        return self._experts

    def routing(self, rows: int, bench: Bench) -> mixture.Routing:
        """Experts drawn alike."""
        chosen = torch.rand(rows, self.num_experts, device=bench.device).topk(self.num_chosen).indices
        return mixture.Routing(chosen, torch.rand(rows, self.num_chosen, device=bench.device))


def _routing(layer: _Layer, rows: int, bench: Bench) -> Row:
    logits = torch.randn(rows, layer.num_experts, device=bench.device)
    bias = torch.randn(layer.num_experts, device=bench.device) * 0.1
    rule = mixture.RoutingRule(layer.num_chosen)
    row = bench.measure([partial(mixture.route, logits, bias, rule)] * 50, num_bytes=logits.numel() * 4)
    found, expected = mixture.route(logits, bias, rule), mixture.route_reference(logits, bias, rule)
    differing = (found.expert_ids_TA != expected.expert_ids_TA).float().mean()
    return {**row, "error": float(differing), "allowed": 0.02}  # a near tie may fall either way


def _products(layer: _Layer, rows: int, products: object, bench: Bench) -> Row:
    assert callable(products)
    experts = layer.experts(bench)
    routings = [layer.routing(rows, bench) for _ in range(8)]
    x = torch.randn(rows, layer.width, dtype=torch.bfloat16, device=bench.device)
    matrices = (experts.gate_up_EZX, experts.down_EXI)
    num_read = sum(routing.expert_ids_TA.unique().numel() for routing in routings) / len(routings)
    one = 2 * 3 * layer.width * layer.inside
    row = bench.measure(
        [partial(products, x, routing.expert_ids_TA, *matrices, _SITU) for routing in routings],
        num_bytes=num_read * one,
        num_flops=rows * layer.num_chosen * one,
    )
    some = slice(0, 2)
    found = products(x, routings[0].expert_ids_TA, *matrices, _SITU).view(rows, layer.num_chosen, -1)[some]
    wide = mixture.ExpertWeights(*(_wide_experts(part, routings[0].expert_ids_TA[some]) for part in matrices))
    own = torch.arange(found.shape[0] * found.shape[1], device=bench.device).view(found.shape[:2])
    expected = mixture.expert_products_grouped(x[some].float(), own, wide, _SITU, "plain")
    return {**row, "error": relative_error(found.flatten(0, 1), expected), "allowed": 1e-2}


def _wide_experts(matrices: Tensor, ids_TA: Tensor) -> Tensor:
    """The matrices of some pairs, in float32, one after the other."""
    return matrices[ids_TA.flatten()].float()


def _sum(layer: _Layer, rows: int, bench: Bench) -> Row:
    routing = layer.routing(rows, bench)
    y = torch.randn(rows * layer.num_chosen, layer.width, dtype=torch.bfloat16, device=bench.device)
    if not bench.is_real:
        return bench.measure([lambda: None], num_bytes=0)
    call = partial(weigh_experts_triton, y, *routing, layer.num_experts)
    row = bench.measure([call] * 50, num_bytes=(y.numel() + rows * layer.width) * 2)
    expected = (y.float().view(rows, -1, layer.width) * routing.weights_TA.unsqueeze(-1)).sum(1)
    return {**row, "error": relative_error(call(), expected), "allowed": 1e-2}
