"""Gated activations: check values of the spec, a slow float64 twin, gradients, halves of a projection, the kernel."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import ShapeError
from paceline.ops import gated_activation as module
from paceline.ops.gated_activation import (
    Activation,
    gated_activation,
    gated_activation_reference,
    gated_activation_triton,
)

SILU, BOUNDED, HALF_BOUNDED = Activation("silu"), Activation("situ", 4.0, 25.0), Activation("situ", 4.0)
ACTIVATIONS = [SILU, BOUNDED, HALF_BOUNDED, Activation("situ")]


def slow_product(gate: float, up: float, activation: Activation) -> float:
    share = 1 / (1 + math.exp(-gate))
    if activation.kind == "silu":
        return gate * share * up
    if activation.linear_beta is not None:
        up = activation.linear_beta * math.tanh(up / activation.linear_beta)
    return activation.beta * math.tanh(gate / activation.beta) * share * up


@pytest.mark.parametrize(
    ("gate", "up", "bounded", "half_bounded"),
    [(1.0, 2.0, 1.429351, 1.432399), (-3.0, 30.0, -2.511176, -3.614699), (10.0, -1.0, -3.944175, -3.946278)],
)
def test_the_worked_numbers(gate: float, up: float, bounded: float, half_bounded: float) -> None:
    pair = torch.tensor([gate]), torch.tensor([up])
    assert float(gated_activation(*pair, BOUNDED)) == pytest.approx(bounded, abs=1e-6)
    assert float(gated_activation(*pair, HALF_BOUNDED)) == pytest.approx(half_bounded, abs=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_agrees_with_a_slow_float64_twin(activation: Activation) -> None:
    gate, up = torch.randn(3, 7) * 4, torch.randn(3, 7) * 30
    expected = [slow_product(float(g), float(u), activation) for g, u in zip(gate.flatten(), up.flatten(), strict=True)]
    found = gated_activation(gate, up, activation)
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), rtol=2e-6, atol=2e-6)


def test_the_two_families_and_their_bounds_are_told_apart() -> None:
    gate, up = torch.full((1,), 6.0), torch.full((1,), 40.0)
    values = [float(gated_activation(gate, up, activation)) for activation in ACTIVATIONS]
    assert min(abs(a - b) for i, a in enumerate(values) for b in values[:i]) > 1.0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_16_bit_products_are_rounded_once(activation: Activation) -> None:
    gate, up = torch.randn(50, 9).bfloat16(), torch.randn(50, 9).bfloat16()
    wide = gated_activation(gate.float(), up.float(), activation)
    assert torch.equal(gated_activation(gate, up, activation), wide.bfloat16())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation: Activation) -> None:
    gate, up = (torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: gated_activation(g, u, activation), (gate, up))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_rows_bits_do_not_depend_on_other_rows(activation: Activation) -> None:
    both = torch.randn(17, 2 * 13)
    gate, up = both.split(13, dim=-1)
    whole = gated_activation(gate, up, activation)
    assert all(torch.equal(gated_activation(gate[i], up[i], activation), whole[i]) for i in range(17))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"up has shape \[2, 4\], expected \[2, 3\]"):
        gated_activation(torch.zeros(2, 3), torch.zeros(2, 4), SILU)
    assert gated_activation(torch.zeros(0, 3), torch.zeros(0, 3), SILU).shape == (0, 3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (2, 130), (2, 1030)])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, activation: Activation, dtype: torch.dtype, rows: int, width: int
) -> None:
    both = (torch.randn(1, rows, 2 * width) * torch.logspace(-3, 1, 2 * width)).to(dtype)
    gate, up = both.split(width, dim=-1)
    expected = gated_activation_reference(gate, up, activation)
    there = both.to(kernel_device).split(width, dim=-1)
    found = gated_activation_triton(*there, activation).cpu()
    assert found.shape == expected.shape and found.dtype == dtype
    exact = 3e-6 if kernel_device.type == "cpu" else 1e-5  # exp of a GPU, with logits up to 40
    tolerance = exact if dtype == torch.float32 else 2**-7  # the interpreter cuts down to bf16
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_order_of_programs_leaves_nothing_out(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    monkeypatch.setattr(module, "_ORDER", order)
    monkeypatch.setattr(module, "_LARGEST_BLOCK", 16)
    gate, up = torch.randn(5, 2 * 39).split(39, dim=-1)
    found = gated_activation_triton(*(half.to(kernel_device) for half in (gate, up)), SILU).cpu()
    torch.testing.assert_close(found, gated_activation_reference(gate, up, SILU), rtol=1e-5, atol=1e-6)
