"""Rows prepared for a norm: the definition, and the kernel against it."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import DTYPES, assert_close, random

from paceline.errors import ShapeError
from paceline.ops.scale_rows import scale_rows, scale_rows_reference, scale_rows_triton


def test_rows_are_scaled_and_their_squares_summed() -> None:
    x, gain = torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([2.0, -1.0])
    rows = scale_rows(x, gain)
    assert rows.x_TD is x
    assert rows.scaled_TD.tolist() == [[2.0, 2.0], [6.0, -0.5]]
    assert rows.squares_TS.tolist() == [[5.0], [9.25]]


def test_widths_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="gain has shape"):
        scale_rows(torch.zeros(2, 4), torch.ones(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (5, 576)])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, rows: int, width: int
) -> None:
    x, gain = random(rows, width, dtype=dtype), random(width)
    expected = scale_rows_reference(x, gain)
    found = scale_rows_triton(x.to(kernel_device), gain.to(kernel_device))
    assert_close(found.scaled_TD, expected.scaled_TD, is_interpreted=kernel_device.type == "cpu")
    torch.testing.assert_close(found.squares_TS.cpu(), expected.squares_TS, rtol=1e-5, atol=1e-5)
