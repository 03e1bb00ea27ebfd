"""A product with a norm's factor, bias and residual stream, and rows prepared for the next norm: every cut."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import CUTS, DTYPES, assert_close, random
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import skinny_launch
from paceline.ops.linear_residual import (
    linear_residual,
    linear_residual_reference,
    linear_residual_scaled,
    linear_residual_triton,
    norm_linear,
)
from paceline.ops.scale_rows import scale_rows
from paceline.ops.skinny_launch import new_counters
from paceline.ops.skinny_product import ScaledRows
from paceline.ops.skinny_tile import Tile

EPS = 1e-5
Given = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, float]


def inputs(T: int, width: int, num_outputs: int, dtype: torch.dtype, *, is_normed: bool) -> Given:
    x, weight = random(T, width, dtype=dtype), random(num_outputs, width, dtype=dtype, scale=width**-0.5)
    if is_normed:
        squares = torch.rand(T, 5) * width / 5 + 0.1
        return x, squares, weight, None, None, None, EPS
    bias, residual = random(num_outputs, dtype=dtype), random(T, num_outputs, dtype=dtype)
    return x, None, weight, bias, residual, 1 + random(num_outputs, scale=0.3), 0.0


def moved(given: Given, device: torch.device) -> Given:
    return tuple(part.to(device) if isinstance(part, Tensor) else part for part in given)  # type: ignore[return-value]


def assert_same(found: Tensor | ScaledRows, expected: Tensor | ScaledRows, *, is_interpreted: bool) -> None:
    """Sums of squares come in other parts: their total counts."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert_close(found, expected, is_interpreted=is_interpreted)
        return
    assert isinstance(found, ScaledRows)
    assert_close(found.x_TD, expected.x_TD, is_interpreted=is_interpreted)
    assert_close(found.scaled_TD, expected.scaled_TD, is_interpreted=is_interpreted, roundings=2)
    of_own_rows = found.x_TD.float().square().sum(-1).cpu()
    torch.testing.assert_close(found.squares_TS.sum(-1).cpu(), of_own_rows, rtol=1e-5, atol=1e-6)


def test_the_references_agree_with_a_float64_twin() -> None:
    x, _, weight, bias, residual, gain, _ = inputs(3, 10, 7, torch.float32, is_normed=False)
    assert bias is not None and residual is not None and gain is not None
    wide = x.double() @ weight.double().T
    found = linear_residual(x, weight, residual, bias_O=bias)
    torch.testing.assert_close(found, (wide + bias + residual).float(), rtol=1e-5, atol=1e-5)
    rows = linear_residual_scaled(x, weight, residual, gain)
    torch.testing.assert_close(rows.x_TD, (wide + residual).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.scaled_TD, rows.x_TD * gain)
    torch.testing.assert_close(rows.squares_TS.sum(-1), rows.x_TD.square().sum(-1))


def test_prepared_rows_and_a_product_are_a_norm_and_a_product() -> None:
    x, weight, bias, gain = random(3, 10), random(7, 10), random(7), random(10)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * gain
    found = norm_linear(scale_rows(x, gain), weight, eps=EPS, bias_O=bias)
    torch.testing.assert_close(found, (normed @ weight.double().T + bias).float(), rtol=1e-5, atol=1e-5)


def test_shapes_that_differ_are_refused() -> None:
    x, weight, residual = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="residual has shape"):
        linear_residual(x, weight, torch.zeros(3, 3))
    with pytest.raises(ShapeError, match="gain has shape"):
        linear_residual_scaled(x, weight, residual, torch.ones(4))
    with pytest.raises(ShapeError, match="weight has shape"):
        norm_linear(scale_rows(x, torch.ones(4)), torch.zeros(3, 5), eps=EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("T", "tile"), CUTS)
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, T: int, tile: Tile, is_normed: bool, dtype: torch.dtype
) -> None:
    given = inputs(T, 72 if T == 3 else 64, 70 if T < 17 else 40, dtype, is_normed=is_normed)
    expected = linear_residual_reference(*given)
    counters = new_counters(kernel_device)
    for _ in range(2):  # the second run finds the counters as the first left them
        found = linear_residual_triton(*moved(given, kernel_device), tile=tile, counters=counters)
        assert_same(found, expected, is_interpreted=kernel_device.type == "cpu")
        assert not counters.any()


def test_a_cut_of_the_librarys_own_choice_and_its_own_counters(kernel_device: torch.device) -> None:
    given = inputs(2, 64, 33, torch.float32, is_normed=True)
    found = linear_residual_triton(*moved(given, kernel_device))
    assert_same(found, linear_residual_reference(*given), is_interpreted=kernel_device.type == "cpu")


@pytest.mark.parametrize("is_normed", [False, True])
def test_no_cell_of_the_workspace_is_read_before_it_is_written(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, is_normed: bool
) -> None:
    def poisoned(size: int, device: torch.device) -> Tensor:
        return torch.full((size,), torch.nan, device=device)

    monkeypatch.setattr(skinny_launch, "_new_floats", poisoned)
    given = inputs(5, 40, 40, torch.float32, is_normed=is_normed)
    found = linear_residual_triton(*moved(given, kernel_device), tile=Tile(32, 16, 4))
    assert_same(found, linear_residual_reference(*given), is_interpreted=kernel_device.type == "cpu")


def test_rows_past_the_last_are_neither_read_nor_written(kernel_device: torch.device) -> None:
    """Neighbours in memory are NaN."""
    x, _, weight, _, residual, gain, _ = inputs(3, 64, 32, torch.float32, is_normed=False)
    assert residual is not None and gain is not None
    wide_x, wide_residual = (torch.full((5, part.shape[1]), torch.nan) for part in (x, residual))
    wide_x[:3], wide_residual[:3] = x, residual
    there = [part.to(kernel_device) for part in (wide_x, weight, wide_residual, gain)]
    found = linear_residual_triton(there[0][:3], None, there[1], None, there[2][:3], there[3], 0.0)
    expected = linear_residual_reference(x, None, weight, None, residual, gain, 0.0)
    assert_same(found, expected, is_interpreted=kernel_device.type == "cpu")


def test_a_lost_part_would_be_seen(kernel_device: torch.device) -> None:
    """The check has teeth: leaving out the inputs of one part fails it."""
    given = inputs(3, 64, 32, torch.float32, is_normed=True)
    found = linear_residual_triton(*moved(given, kernel_device), tile=Tile(32, 16, 4))
    given[0][:, 48:] = 0.0
    with pytest.raises(AssertionError):
        assert_same(found, linear_residual_reference(*given), is_interpreted=kernel_device.type == "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("num_outputs", "width"), [(576, 576), (576, 1536), (4096, 4096), (4096, 12288)])
@pytest.mark.parametrize("T", [1, 8, 16, 32, 64])
def test_real_sizes_on_a_gpu(num_outputs: int, width: int, T: int) -> None:
    given = moved(inputs(T, width, num_outputs, torch.bfloat16, is_normed=False), torch.device("cuda"))
    expected = linear_residual_reference(*given)
    assert isinstance(expected, ScaledRows)
    counters = new_counters(given[0].device)
    found = [linear_residual_triton(*given, counters=counters) for _ in range(3)]
    assert_same(found[0], ScaledRows(*(part.cpu() for part in expected)), is_interpreted=False)
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))
