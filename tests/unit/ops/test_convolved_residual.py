"""Convolution, residual sum and norm in one: its parts one by one, and the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import DTYPES, assert_close, random
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.convolved_residual import (
    convolved_residual,
    convolved_residual_reference,
    convolved_residual_triton,
)
from paceline.ops.grouped_convolution import grouped_convolution
from paceline.ops.rms_norm import rms_norm_reference

EPS = 1e-5
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float]


def inputs(rows: int, width: int, taps: int, groups: int, dtype: torch.dtype, *, has_gain: bool = True) -> Given:
    both = random(rows, 2, taps, groups, dtype=dtype, scale=0.5)  # one half of a wider projection
    offsets = torch.arange(rows) % 3
    gain = 1 + random(width, scale=0.3) if has_gain else None
    stream = random(rows, width, dtype=dtype)
    return random(rows, width, dtype=dtype), random(taps, width), both[:, 1], offsets, stream, gain, EPS


def test_it_is_its_parts_one_after_the_other() -> None:
    z, base, delta, offsets, x, gain, _ = inputs(7, 12, 2, 3, torch.float32)
    assert gain is not None
    total, normed = convolved_residual(z, base, delta, offsets, x, gain, eps=EPS)
    torch.testing.assert_close(total, x + grouped_convolution(z, base, delta, offsets))
    torch.testing.assert_close(normed, rms_norm_reference(total, gain, EPS))
    alone, again = convolved_residual(z, base, delta, offsets, x, None, eps=EPS)
    assert torch.equal(alone, total) and again is alone


def test_shapes_that_differ_are_refused() -> None:
    z, base, delta, offsets, x, gain, _ = inputs(4, 12, 2, 3, torch.float32)
    for name, given in (
        ("z", (z[:3], base, delta, offsets)),
        ("delta", (z, base, delta[:3], offsets)),
        ("base", (z, base[:1], delta, offsets)),
        ("offset", (z, base, delta, offsets[:3])),
    ):
        with pytest.raises(ShapeError, match=f"{name} has shape"):
            convolved_residual(*given, x, gain, eps=EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_gain", [True, False])
@pytest.mark.parametrize(("rows", "width", "taps", "groups"), [(1, 4, 1, 2), (7, 96, 2, 6), (5, 40, 3, 4)])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, has_gain: bool, rows: int, width: int, taps: int, groups: int
) -> None:
    given = inputs(rows, width, taps, groups, dtype, has_gain=has_gain)
    expected = convolved_residual_reference(*given)
    there = [part.to(kernel_device) if isinstance(part, Tensor) else part for part in given]
    for found, right in zip(convolved_residual_triton(*there), expected, strict=True):  # type: ignore[arg-type]
        assert_close(found, right, is_interpreted=kernel_device.type == "cpu", roundings=3)
