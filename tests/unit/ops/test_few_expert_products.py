"""Experts of a step's rows without sorting: the kernels against the grouped form, and what they must not read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ops.few_expert_products import few_expert_products_triton
from paceline.ops.gated_activation import Activation
from paceline.ops.mixture_of_experts import (
    ExpertWeights,
    Routing,
    _mix_by_kernels,
    expert_products_grouped,
    mix_experts_reference,
)

SITU = Activation("situ", 4.0, 25.0)


def random_experts(num_experts: int, width: int, inside: int, dtype: torch.dtype) -> ExpertWeights:
    return ExpertWeights(
        (torch.randn(num_experts, 2 * inside, width) / width**0.5).to(dtype),
        (torch.randn(num_experts, width, inside) / inside**0.5).to(dtype),
    )


def narrow_on(device: torch.device) -> torch.dtype:
    """The interpreter multiplies matrices of bf16 as if they were integers."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("activation", [SITU, Activation("silu")])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "width", "inside"),
    [(1, 1, 1, 3, 2), (7, 4, 2, 24, 70), (17, 5, 3, 70, 24), (64, 2, 2, 8, 8)],
)
def test_the_kernels_agree_with_the_grouped_form(
    kernel_device: torch.device,
    is_wide: bool,
    activation: Activation,
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    width: int,
    inside: int,
) -> None:
    dtype = torch.float32 if is_wide else narrow_on(kernel_device)
    experts = random_experts(num_experts, width, inside, dtype)
    x = torch.randn(num_rows, width).to(dtype)
    ids = torch.rand(num_rows, num_experts).argsort(dim=1)[:, :num_chosen]
    if num_rows > 1:
        ids[0, 0], ids[-1, -1] = -1, num_experts  # held by other ranks
    is_here = ((ids >= 0) & (ids < num_experts)).flatten()
    expected = expert_products_grouped(x, ids, experts, activation, "plain")
    wider = torch.cat((x, x + 1), dim=1).to(kernel_device)  # rows are parts of wider ones
    there = [part.to(kernel_device) for part in (ids, *experts[:2])]
    found = few_expert_products_triton(wider[:, :width], *there, activation).cpu()
    assert found.dtype == dtype
    tolerance = 2e-5 if is_wide else 2**-6
    torch.testing.assert_close(found[is_here], expected[is_here], rtol=tolerance, atol=tolerance)


def test_nobody_reads_other_experts_or_other_rows(kernel_device: torch.device) -> None:
    experts = random_experts(5, 24, 40, torch.float32)
    x, ids = torch.randn(6, 24), torch.tensor([[0, 2], [2, 4], [4, 0], [0, 4], [2, 0], [4, 2]])
    expected = expert_products_grouped(x, ids, experts, SITU, "plain")
    for part in experts[:2]:
        part[[1, 3]] = torch.nan
    x[5] = torch.nan
    there = [part.to(kernel_device) for part in (x, ids, *experts[:2])]
    found = few_expert_products_triton(*there, SITU).cpu()
    torch.testing.assert_close(found[:10], expected[:10], rtol=2e-5, atol=2e-5)
    assert bool(found[10:].isnan().all())


@pytest.mark.parametrize("num_rows", [5, 65])
def test_either_form_makes_the_mixture(kernel_device: torch.device, num_rows: int) -> None:
    experts = random_experts(3, 12, 10, torch.float32)
    x = torch.randn(num_rows, 12)
    ids = torch.rand(num_rows, 4).argsort(dim=1)[:, :2]  # one of four experts lies elsewhere
    routing = Routing(ids, torch.rand(num_rows, 2))
    expected = mix_experts_reference(x, routing, experts, SITU, 0, "plain")

    def moved(part: Tensor) -> Tensor:
        return part.to(kernel_device)

    there = ExpertWeights(moved(experts.gate_up_EZX), moved(experts.down_EXI))
    found = _mix_by_kernels(moved(x), Routing(moved(ids), moved(routing.weights_TA)), there, SITU, "plain").cpu()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    swapped = Routing(ids.flip(1), routing.weights_TA)
    assert (mix_experts_reference(x, swapped, experts, SITU, 0, "plain") - expected).abs().max() > 0.01
