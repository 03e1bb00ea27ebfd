"""Native choices against the operations of torch: the same values and the same ids, equal ones among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ops.candidate_walk import candidate_walk_reference
from paceline.ops.native import choices as native
from paceline.ops.native.rows import can_run
from paceline.ops.top_k_tokens import top_k_tokens_reference

pytestmark = pytest.mark.skipif(
    not can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)


@pytest.mark.parametrize(("width", "k"), [(1, 1), (7, 7), (100, 16), (4096, 16), (1000, 64), (33, 2)])
@pytest.mark.parametrize("spread", [3, 10_000])
def test_the_k_best_are_those_of_a_stable_sort(width: int, k: int, spread: int) -> None:
    x = torch.randint(-spread, spread, (2, 3, width), generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0, width // 3 :] = -torch.inf
    x[0, 1] = x[0, 1].sort().values
    x[0, 2, ::2] = -0.0
    for found, expected in zip(native.top_k(x, k), top_k_tokens_reference(x + 0.0, k), strict=True):
        assert torch.equal(found, expected)
    assert native.can_find_top_k(x, native.MOST_KEPT) and not native.can_find_top_k(x, native.MOST_KEPT + 1)
    assert not native.can_find_top_k(x.float(), k)


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize(("num_candidates", "rank"), [(1, 4), (6, 8), (16, 48)])
def test_a_walk_goes_where_the_reference_goes(num_requests: int, num_candidates: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator).bfloat16()  # exact sums, and ties

    unary, projected = numbers(num_requests, 7, num_candidates), numbers(num_requests, 7, rank)
    predecessor, successor = numbers(100, rank), numbers(100, rank)
    unary[0, 3, 0] = torch.nan
    ids = torch.stack([torch.randperm(100, generator=generator)[:num_candidates] for _ in range(7 * num_requests)])
    given = unary, ids.view(num_requests, 7, -1), projected, predecessor, successor, torch.arange(num_requests)
    if num_candidates == 1:
        unary[0, 3, 0] = 0.0
    walked = native.walk(*given)
    expected = candidate_walk_reference(*given, torch.zeros(num_requests), None)
    assert torch.equal(walked[0], expected[0])
    torch.testing.assert_close(walked[1], expected[1], equal_nan=True)
    assert not native.can_walk(unary, projected.float())


def test_gradients_go_through_torch() -> None:
    x = torch.randn(2, 100).bfloat16().requires_grad_()
    assert not native.can_find_top_k(x, 4) and not native.can_walk(x)
    with torch.no_grad():
        assert native.can_find_top_k(x, 4) and native.can_walk(x)
