"""Norm and gate: the worked row of the spec, a slow float64 twin, order of the two, gradients, the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.gated_rms_norm import (
    gate_by_sigmoid,
    gate_by_sigmoid_triton,
    gated_rms_norm,
    gated_rms_norm_reference,
    gated_rms_norm_triton,
)


def slow_norm(x_TNH: Tensor, gate_TNH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    y = torch.empty(x_TNH.shape, dtype=torch.float64)
    for t in range(x_TNH.shape[0]):
        for n in range(x_TNH.shape[1]):
            mean_square = sum(float(value) ** 2 for value in x_TNH[t, n]) / x_TNH.shape[2]
            for h in range(x_TNH.shape[2]):
                gate = 1 / (1 + math.exp(-float(gate_TNH[t, n, h])))
                y[t, n, h] = float(x_TNH[t, n, h]) / math.sqrt(mean_square + eps) * float(weight_H[h]) * gate
    return y


@pytest.mark.parametrize(
    ("o", "expected"),
    [((1.025158, 0.254694), (0.686239, 0.498558)), ((1.035046, 0.249870), (0.687355, 0.485231))],
)
def test_the_worked_numbers(o: tuple[float, float], expected: tuple[float, float]) -> None:
    found = gated_rms_norm(torch.tensor([[o]]), torch.tensor([[[0.0, 1.0]]]), torch.tensor([1.0, 2.0]), eps=1e-5)
    torch.testing.assert_close(found, torch.tensor([[expected]]), rtol=0, atol=2e-6)


def test_the_reference_agrees_with_a_slow_float64_twin() -> None:
    x, gate, weight = torch.randn(4, 3, 7), torch.randn(4, 3, 7) * 3, torch.randn(7)
    found = gated_rms_norm(x, gate, weight, eps=1e-3)
    torch.testing.assert_close(found.double(), slow_norm(x, gate, weight, 1e-3), rtol=1e-5, atol=1e-6)


def test_16_bit_values_are_rounded_once_and_a_float32_gain_stays_wide() -> None:
    x, gate, weight = torch.randn(9, 2, 6), torch.randn(9, 2, 6).bfloat16(), 1 + torch.rand(6)
    wide = gated_rms_norm(x, gate.float(), weight, eps=1e-5)
    found = gated_rms_norm(x, gate, weight, eps=1e-5)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wide.bfloat16())


def test_a_rows_bits_do_not_depend_on_other_rows() -> None:
    x, gate, weight = torch.randn(11, 3, 5), torch.randn(11, 3, 5), torch.randn(5)
    whole, gated = gated_rms_norm(x, gate, weight, eps=1e-5), gate_by_sigmoid(x, gate)
    for i in range(11):
        assert torch.equal(gated_rms_norm(x[i : i + 1], gate[i : i + 1], weight, eps=1e-5)[0], whole[i])
        assert torch.equal(gate_by_sigmoid(x[i], gate[i]), gated[i])


def test_gradients() -> None:
    x, gate = (torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *leaves: gated_rms_norm(*leaves, eps=1e-3), (x, gate, weight))
    assert torch.autograd.gradcheck(gate_by_sigmoid, (x, gate))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="gate has shape"):
        gated_rms_norm(torch.zeros(2, 2, 3), torch.zeros(2, 1, 3), torch.zeros(3), eps=1e-5)
    with pytest.raises(ShapeError, match="weight has shape"):
        gated_rms_norm(torch.zeros(2, 2, 3), torch.zeros(2, 2, 3), torch.zeros(6), eps=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 1, 2), (3, 5, 7), (2, 11, 32)])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device, dtype: torch.dtype, rows: int, heads: int, size: int
) -> None:
    x, weight = torch.randn(rows, heads, size).to(dtype), torch.randn(size)
    wider = torch.randn(rows, 3, heads, size).to(dtype)  # the gate is a part of a joint projection
    expected = gated_rms_norm_reference(x, wider[:, 1], weight, 1e-5)
    there = [t.to(kernel_device) for t in (x, wider, weight)]
    found = gated_rms_norm_triton(there[0], there[1][:, 1], there[2], 1e-5).cpu()
    assert found.dtype == dtype
    tolerance = 3e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 1100)])
def test_the_gates_kernel_agrees_with_its_definition(
    kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, gate = torch.randn(shape).to(dtype), (torch.randn(shape) * 4).to(dtype)
    wider = torch.cat((gate, gate + 1), dim=-1).to(kernel_device)
    found = gate_by_sigmoid_triton(x.to(kernel_device), wider[..., : shape[-1]]).cpu()
    assert found.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, gate_by_sigmoid(x, gate), rtol=tolerance, atol=tolerance)


def test_a_gate_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match="gate has shape"):
        gate_by_sigmoid(torch.zeros(2, 3), torch.zeros(3))
