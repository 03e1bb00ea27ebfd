"""A residual sum and its norm against a float64 twin and the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import DTYPES, assert_close, random

from paceline.errors import ShapeError
from paceline.ops.add_norm import add_norm, add_norm_reference, add_norm_triton

EPS = 1e-5


def test_the_reference_agrees_with_a_float64_twin() -> None:
    x, y, gain = torch.randn(3, 2, 7), torch.randn(3, 2, 7), torch.randn(7)
    total, normed = add_norm(x, y, gain, eps=EPS)
    assert torch.equal(total, x + y)
    wide = (x + y).double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * gain
    torch.testing.assert_close(normed, expected.float(), rtol=1e-5, atol=1e-6)
    same, normed = add_norm(x, None, gain, eps=EPS)
    assert same is x
    torch.testing.assert_close(normed, add_norm(x, torch.zeros_like(x), gain, eps=EPS)[1])
    copy, normed_too = add_norm(x, None, gain, eps=EPS, copies=True)
    assert torch.equal(copy, x) and copy.data_ptr() != x.data_ptr() and torch.equal(normed_too, normed)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="gain has shape"):
        add_norm(torch.zeros(2, 4), None, torch.ones(3), eps=EPS)
    with pytest.raises(ShapeError, match="y has shape"):
        add_norm(torch.zeros(2, 4), torch.zeros(2, 3), torch.ones(4), eps=EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("adds", "copies"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (5, 576)])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, adds: bool, copies: bool, rows: int, width: int
) -> None:
    x, y, gain = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype), random(width)
    expected = add_norm_reference(x, y if adds else None, gain, EPS)
    there = [part.to(kernel_device) for part in (x, y, gain)]
    found = add_norm_triton(there[0], there[1] if adds else None, there[2], EPS, copies)
    assert (found[0].data_ptr() == there[0].data_ptr()) == (not adds and not copies)
    for ours, right in zip(found, expected, strict=True):
        assert_close(ours, right, is_interpreted=kernel_device.type == "cpu", roundings=2)
