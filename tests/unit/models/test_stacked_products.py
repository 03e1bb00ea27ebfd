"""Products of the same rows as one: the same numbers, one memory, and a stack that follows its parts."""

from __future__ import annotations

import pytest
import torch

from paceline.models.layers import Linear
from paceline.models.stacked_products import stack_products


def linears(*sizes: int) -> list[Linear]:
    parts = [Linear(12, size) for size in sizes]
    for part in parts:
        torch.nn.init.normal_(part.weight.requires_grad_(False))
    return parts


@pytest.mark.parametrize("sizes", [(7,), (24, 3, 5), (16, 16)])
def test_each_part_is_that_products_own(sizes: tuple[int, ...]) -> None:
    parts, x = linears(*sizes), torch.randn(2, 3, 12)
    expected = [part(x) for part in parts]
    stacked = stack_products(parts)
    found = stacked(x)
    assert len(found) == len(sizes) and stacked.weight_SD.shape[0] % 16 == 0
    for ours, theirs, part in zip(found, expected, parts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(part(x), theirs, rtol=1e-5, atol=1e-5)


def test_parts_are_the_stacks_memory() -> None:
    first, second = linears(4, 6)
    stacked = stack_products((first, second))
    second.weight.zero_()
    assert not stacked(torch.ones(1, 12))[1].any() and stacked(torch.ones(1, 12))[0].all()
    assert first.weight.is_contiguous() and second.weight.is_contiguous()


def test_a_bias_is_nobodys() -> None:
    with pytest.raises(AssertionError, match="biases"):
        stack_products((Linear(4, 2, bias=True),))
