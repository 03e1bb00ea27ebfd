"""A product with norm, bias and residual stream: a float64 twin, and the kernel in every cut."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.products import DTYPES, ROWS, TILES, assert_close, random
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import skinny_product
from paceline.ops.linear_residual import (
    linear_residual,
    linear_residual_reference,
    linear_residual_triton,
    norm_linear,
)
from paceline.ops.skinny_product import Tile, new_counters

EPS = 1e-5


def inputs(
    T: int, width: int, num_outputs: int, dtype: torch.dtype, *, is_normed: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, float]:
    x, weight = random(T, width, dtype=dtype), random(num_outputs, width, dtype=dtype, scale=width**-0.5)
    if is_normed:
        return x, weight, None, None, 1 + random(width, scale=0.3), EPS
    return x, weight, random(num_outputs, dtype=dtype), random(T, num_outputs, dtype=dtype), None, 0.0


def test_the_references_agree_with_a_float64_twin() -> None:
    x, weight, bias, residual, _, _ = inputs(3, 10, 7, torch.float32, is_normed=False)
    assert bias is not None and residual is not None
    wide = x.double() @ weight.double().T
    found = linear_residual(x, weight, residual, bias_O=bias)
    torch.testing.assert_close(found, (wide + bias + residual).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear_residual(x, weight, residual), (wide + residual).float(), rtol=1e-5, atol=1e-5)
    gain = torch.randn(10)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * gain
    found = norm_linear(x, weight, gain, eps=EPS, bias_O=bias)
    torch.testing.assert_close(found, (normed @ weight.double().T + bias).float(), rtol=1e-5, atol=1e-5)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match="residual has shape"):
        linear_residual(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3, 3))
    with pytest.raises(ShapeError, match="weight has shape"):
        norm_linear(torch.zeros(2, 4), torch.zeros(3, 5), torch.ones(4), eps=EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("T", "tile"), list(zip(ROWS, [*TILES, Tile(64, 32, 3)], strict=True)))
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, T: int, tile: Tile, is_normed: bool, dtype: torch.dtype
) -> None:
    given = inputs(T, 72 if T == 3 else 64, 70 if T < 17 else 40, dtype, is_normed=is_normed)
    expected = linear_residual_reference(*given)
    there = [part.to(kernel_device) if isinstance(part, Tensor) else part for part in given]
    counters = new_counters(kernel_device)
    for _ in range(2):  # the second run finds the counters as the first left them
        found = linear_residual_triton(*there, tile=tile, counters=counters)  # type: ignore[arg-type]
        assert_close(found, expected, is_interpreted=kernel_device.type == "cpu")
        assert not counters.any()


def test_a_cut_of_the_librarys_own_choice_and_its_own_counters(kernel_device: torch.device) -> None:
    given = inputs(2, 64, 33, torch.float32, is_normed=True)
    found = linear_residual_triton(*(part.to(kernel_device) if isinstance(part, Tensor) else part for part in given))  # type: ignore[arg-type]
    assert_close(found, linear_residual_reference(*given), is_interpreted=kernel_device.type == "cpu")


def test_no_cell_of_the_workspace_is_read_before_it_is_written(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(5, 40, 40, torch.float32, is_normed=True)
    monkeypatch.setattr(
        skinny_product, "_new_floats", lambda size, device: torch.full((size,), torch.nan, device=device)
    )
    there = [part.to(kernel_device) if isinstance(part, Tensor) else part for part in given]
    found = linear_residual_triton(*there, tile=Tile(32, 16, 4))  # type: ignore[arg-type]
    assert_close(found, linear_residual_reference(*given), is_interpreted=kernel_device.type == "cpu")


def test_rows_past_the_last_are_neither_read_nor_written(kernel_device: torch.device) -> None:
    """Neighbours in memory are NaN, and stay so."""
    x, weight, _, residual, gain, eps = inputs(3, 64, 32, torch.float32, is_normed=False)
    assert residual is not None
    wide_x, wide_residual = (torch.full((5, part.shape[1]), torch.nan) for part in (x, residual))
    wide_x[:3], wide_residual[:3] = x, residual
    moved = [part.to(kernel_device) for part in (wide_x, weight, wide_residual)]
    found = linear_residual_triton(moved[0][:3], moved[1], None, moved[2][:3], gain, eps)
    assert_close(
        found,
        linear_residual_reference(x, weight, None, residual, gain, eps),
        is_interpreted=kernel_device.type == "cpu",
    )


def test_a_lost_part_would_be_seen(kernel_device: torch.device) -> None:
    """The check has teeth: leaving out the inputs of one part fails it."""
    x, weight, _, _, gain, eps = inputs(3, 64, 32, torch.float32, is_normed=True)
    there = [part.to(kernel_device) for part in (x, weight, gain)]  # type: ignore[union-attr]
    found = linear_residual_triton(there[0], there[1], None, None, there[2], eps, tile=Tile(32, 16, 4))
    x[:, 48:] = 0.0
    with pytest.raises(AssertionError):
        assert_close(
            found,
            linear_residual_reference(x, weight, None, None, gain, eps),
            is_interpreted=kernel_device.type == "cpu",
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("num_outputs", "width"), [(576, 576), (576, 1536), (4096, 4096), (4096, 12288)])
@pytest.mark.parametrize("T", [1, 8, 16, 32, 64])
def test_real_sizes_on_a_gpu(num_outputs: int, width: int, T: int) -> None:
    x, weight, _, residual, _, _ = inputs(T, width, num_outputs, torch.bfloat16, is_normed=False)
    expected = linear_residual_reference(x, weight, None, residual, None, 0.0)
    assert residual is not None
    there = [part.cuda() for part in (x, weight, residual)]
    counters = new_counters(there[0].device)
    found = [linear_residual(there[0], there[1], there[2], counters=counters) for _ in range(3)]
    assert_close(found[0], expected, is_interpreted=False)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
