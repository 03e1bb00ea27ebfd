"""The first half of a gated MLP: a float64 twin, and the kernel in every cut."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import CUTS, DTYPES, assert_close, random
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.linear_gated import linear_gated, linear_gated_reference, linear_gated_triton
from paceline.ops.skinny_launch import new_counters
from paceline.ops.skinny_tile import Tile

EPS = 1e-5
Given = tuple[Tensor, Tensor | None, Tensor, Tensor | None, float]


def inputs(T: int, width: int, num_outputs: int, dtype: torch.dtype, *, is_full: bool) -> Given:
    x, weight = random(T, width, dtype=dtype), random(2 * num_outputs, width, dtype=dtype, scale=width**-0.5)
    if not is_full:
        return x, None, weight, None, EPS
    return x, torch.rand(T, 3) * width / 3 + 0.1, weight, random(2 * num_outputs, dtype=dtype), EPS


def moved(given: Given, device: torch.device) -> Given:
    return tuple(part.to(device) if isinstance(part, Tensor) else part for part in given)  # type: ignore[return-value]


def test_the_reference_agrees_with_a_float64_twin() -> None:
    x, squares, weight, bias, eps = inputs(3, 10, 7, torch.float32, is_full=True)
    assert bias is not None and squares is not None
    wide = x.double()
    factor = torch.rsqrt(squares.double().sum(-1, keepdim=True) / 10 + eps)
    gate, up = (wide * factor @ weight.double().T + bias).chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * up).float()
    torch.testing.assert_close(linear_gated(x, squares, weight, eps=eps, bias_X=bias), expected, rtol=1e-5, atol=1e-5)
    gate, up = (wide @ weight.double().T).chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * up).float()
    torch.testing.assert_close(linear_gated(x, None, weight, eps=eps), expected, rtol=1e-5, atol=1e-5)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="an even number"):
        linear_gated(torch.zeros(2, 4), None, torch.zeros(3, 4), eps=EPS)
    with pytest.raises(ShapeError, match="bias has shape"):
        linear_gated(torch.zeros(2, 4), None, torch.zeros(6, 4), eps=EPS, bias_X=torch.zeros(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("T", "tile"), CUTS)
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, T: int, tile: Tile, is_full: bool, dtype: torch.dtype
) -> None:
    given = inputs(T, 72 if T == 3 else 64, 37, dtype, is_full=is_full)
    expected = linear_gated_reference(*given)
    counters = new_counters(kernel_device)
    for _ in range(2):
        found = linear_gated_triton(*moved(given, kernel_device), tile=tile, counters=counters)
        assert_close(found, expected, is_interpreted=kernel_device.type == "cpu")
        assert not counters.any()


def test_gates_and_up_projections_are_told_apart(kernel_device: torch.device) -> None:
    given = inputs(2, 32, 16, torch.float32, is_full=True)
    found = linear_gated_triton(*moved(given, kernel_device))
    swapped = (*given[:2], given[2].roll(16, 0), *given[3:])
    with pytest.raises(AssertionError):
        assert_close(found, linear_gated_reference(*swapped), is_interpreted=kernel_device.type == "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "num_outputs"), [(576, 1536), (4096, 12288)])
@pytest.mark.parametrize("T", [1, 8, 16, 32, 64])
def test_real_sizes_on_a_gpu(width: int, num_outputs: int, T: int) -> None:
    given = moved(inputs(T, width, num_outputs, torch.bfloat16, is_full=True), torch.device("cuda"))
    expected = linear_gated_reference(*given)
    found = [linear_gated_triton(*given) for _ in range(3)]
    assert_close(found[0], expected.cpu(), is_interpreted=False)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
