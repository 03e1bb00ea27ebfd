"""Elementwise functions: right, the same bits anywhere in a tensor, and with sound gradients far out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.elementwise import sigmoid, softplus, widen


def is_row_safe(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether pieces of a tensor, of lengths that no vector register divides, give the bits of the whole."""
    x = torch.randn(4096) * 3
    whole = function(x)
    return all(torch.equal(function(x[i : i + 5].clone()), whole[i : i + 5]) for i in range(0, 4090, 5))


@pytest.mark.parametrize("function", [sigmoid, softplus, torch.exp, torch.tanh, torch.rsqrt])
def test_bits_do_not_depend_on_the_place(function: Callable[[Tensor], Tensor]) -> None:
    assert is_row_safe(lambda x: function(x.abs() + 0.1 if function is torch.rsqrt else x))


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="seen with AVX512")
def test_the_check_of_places_sees_what_it_is_for() -> None:
    assert not all(is_row_safe(function) for function in (torch.sigmoid, functional.silu, functional.softplus))


def test_values_against_the_standard_library() -> None:
    for value in (-1e4, -88.0, -20.0, -1.5, -0.0, 1e-6, 0.7, 19.9, 20.1, 1e4):
        x = torch.tensor([value])
        expected = 1 / (1 + math.exp(-value)) if value > -700 else 0.0
        assert float(sigmoid(x)) == pytest.approx(expected, rel=2e-7, abs=1e-38)
        above = math.log1p(math.exp(value)) if value <= 20 else value
        assert float(softplus(x)) == pytest.approx(above, rel=2e-7, abs=1e-38)


def test_16_bit_values_are_widened_and_float64_is_kept() -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        x = torch.ones(3, dtype=dtype)
        assert widen(x).dtype == sigmoid(x).dtype == softplus(x).dtype == wide


@pytest.mark.parametrize("function", [sigmoid, softplus])
def test_gradients(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([-3.0, 0.0, 2.5, 25.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x,))
    far = torch.tensor([-200.0, 200.0], requires_grad=True)
    assert torch.isfinite(torch.autograd.grad(function(far).sum(), far)[0]).all()
