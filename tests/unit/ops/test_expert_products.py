"""Grouped products of experts: tiles that cover every pair once, and the kernels against the grouped form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ops.expert_products import expert_products_triton, tiles_of, weigh_experts_triton
from paceline.ops.gated_activation import Activation
from paceline.ops.mixture_of_experts import ExpertWeights, expert_products_grouped


@given(ids=st.lists(st.integers(-1, 5), min_size=1, max_size=40), num_experts=st.integers(1, 5), size=st.integers(1, 8))
def test_tiles_cover_every_pair_of_an_expert_once(ids: list[int], num_experts: int, size: int) -> None:
    order, *tiles = tiles_of(torch.tensor(ids), num_experts, size)
    covered: list[int] = []
    for expert, start, end in zip(*(values.tolist() for values in tiles), strict=True):
        if expert == num_experts:
            continue  # more tiles than this routing needs
        pairs = order[start : min(start + size, end)].tolist()
        assert pairs and all(ids[pair] == expert for pair in pairs)
        covered += pairs
    assert sorted(covered) == [pair for pair, expert in enumerate(ids) if 0 <= expert < num_experts]


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("activation", [Activation("situ", 4.0, 25.0), Activation("silu")])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen", "width", "inside"),
    [(1, 1, 1, 3, 2), (7, 4, 2, 24, 70), (20, 2, 2, 70, 24), (40, 1, 1, 8, 8)],
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
    # The interpreter multiplies matrices of bf16 as if they were integers.
    narrow = torch.float16 if kernel_device.type == "cpu" else torch.bfloat16
    dtype = torch.float32 if is_wide else narrow
    experts = ExpertWeights(
        (torch.randn(num_experts, 2 * inside, width) / width**0.5).to(dtype),
        (torch.randn(num_experts, width, inside) / inside**0.5).to(dtype),
    )
    x = torch.randn(num_rows, width).to(dtype)
    ids = torch.rand(num_rows, max(num_experts, num_chosen)).argsort(dim=1)[:, :num_chosen]
    ids[0, 0] = -1  # held by another rank
    ids[-1, -1] = num_experts
    expected = expert_products_grouped(x, ids, experts, activation, "plain")
    there = [t.to(kernel_device) for t in (x, ids, *experts[:2])]
    found = expert_products_triton(*there, activation).cpu()
    is_here = ((ids >= 0) & (ids < num_experts)).flatten()
    assert found.dtype == dtype and not expected[~is_here].any(), "what nobody computes here is not written"
    tolerance = 2e-5 if is_wide else 2**-6
    torch.testing.assert_close(found[is_here], expected[is_here], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_weighed_and_those_elsewhere_are_not_read(kernel_device: torch.device, dtype: torch.dtype) -> None:
    ids, weights = torch.tensor([[2, 0], [-1, 1], [3, 4]]), torch.rand(3, 2)
    y = torch.randn(6, 21).to(dtype)
    expected = (y.float().view(3, 2, 21) * weights.unsqueeze(-1)).masked_fill(((ids < 0) | (ids > 2)).unsqueeze(-1), 0)
    y[[2, 4, 5]] = torch.nan
    there = [part.to(kernel_device) for part in (y, ids, weights)]
    found = weigh_experts_triton(*there, 3).cpu()
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected.sum(1).to(dtype), rtol=tolerance, atol=tolerance)
    assert found.dtype == dtype and not found[2].any()
