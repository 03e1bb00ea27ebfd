"""Taps side by side against norms one by one, and the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import DTYPES, assert_close, random

from paceline.errors import ShapeError
from paceline.ops.norm_taps import (
    join_taps,
    join_taps_reference,
    join_taps_triton,
    norm_taps,
    norm_taps_reference,
    norm_taps_triton,
)
from paceline.ops.rms_norm import rms_norm_reference

EPS = 1e-5


def test_each_tap_is_normed_on_its_own() -> None:
    taps, gain = [random(2, 3, 5) * 10**scale for scale in range(3)], random(3, 5)
    y = norm_taps(taps, gain, eps=EPS)
    assert y.shape == (2, 3, 15)
    for index, tap in enumerate(taps):
        expected = rms_norm_reference(tap, gain[index], EPS)
        torch.testing.assert_close(y[..., 5 * index : 5 * index + 5], expected)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="gain has shape"):
        norm_taps([torch.zeros(2, 4)], torch.ones(2, 4), eps=EPS)
    with pytest.raises(ShapeError, match="tap has shape"):
        norm_taps([torch.zeros(2, 4), torch.zeros(2, 5)], torch.ones(2, 4), eps=EPS)
    with pytest.raises(ShapeError, match="tap has shape"):
        join_taps([torch.zeros(2, 4), torch.zeros(3, 4)], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_taps_lie_side_by_side_as_they_are(kernel_device: torch.device, dtype: torch.dtype) -> None:
    taps = [random(2, 3, 5), *(random(2, 3, 5, dtype=dtype) for _ in range(2))]
    expected = torch.cat([tap.to(dtype) for tap in taps], dim=-1)
    assert torch.equal(join_taps(taps, dtype), expected) and torch.equal(join_taps_reference(taps, dtype), expected)
    found = join_taps_triton([tap.to(kernel_device) for tap in taps], dtype)
    assert_close(found, expected, is_interpreted=kernel_device.type == "cpu")
    swapped = torch.cat([tap.to(dtype) for tap in reversed(taps)], dim=-1)
    with pytest.raises(AssertionError):
        assert_close(found, swapped, is_interpreted=kernel_device.type == "cpu")
    assert join_taps([tap[:0] for tap in taps], dtype).shape == (0, 3, 15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_taps", "rows", "width"), [(1, 1, 1), (3, 4, 100), (5, 2, 576)])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, num_taps: int, rows: int, width: int
) -> None:
    taps, gain = [random(1, rows, width, dtype=dtype) for _ in range(num_taps)], random(num_taps, width, dtype=dtype)
    taps[0] = taps[0].float()  # a stream that is wider than the drafter
    found = norm_taps_triton([tap.to(kernel_device) for tap in taps], gain.to(kernel_device), EPS)
    is_interpreted = kernel_device.type == "cpu"
    assert_close(found, norm_taps_reference(taps, gain, EPS), is_interpreted=is_interpreted, roundings=2)
