"""Root-mean-square norm: against float64, in 16 bits, gradients, and rows that do not see each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ops.rms_norm import mirror_gain, rms_norm, rms_norm_mirrored, rms_norm_reference


def slow_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]):
        mean_square = sum(float(value) ** 2 for value in row) / len(row)
        rows.append(row / (mean_square + eps) ** 0.5 * weight.double())
    return torch.stack(rows).view(x.shape)


@given(width=st.integers(1, 70), scale=st.sampled_from([1e-3, 1.0, 1e4]), seed=st.integers(0, 1000))
def test_both_forms_agree_with_a_slow_float64_formula(width: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, width, generator=generator) * scale
    weight = torch.randn(width, generator=generator)
    expected = slow_rms_norm(x, weight, 1e-5).float()
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-5), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5), expected, rtol=1e-5, atol=1e-6)


def test_eps_is_added_to_the_mean_square() -> None:
    x = torch.full((1, 4), 1e-3)
    assert rms_norm(x, torch.ones(4), eps=1e-6)[0, 0].item() == pytest.approx(2**-0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_16_bit_inputs_are_kept_in_float32(dtype: torch.dtype) -> None:
    # 300^2 overflows float16, and a bf16 sum of 1000 squares would stop growing long before its end.
    x = (300 + torch.arange(1000) % 7).to(dtype).expand(2, 1000).contiguous()
    y = rms_norm(x, torch.ones(1000, dtype=dtype), eps=1e-5)
    assert y.dtype == dtype
    expected = slow_rms_norm(x, torch.ones(1000), 1e-5)
    assert (y.double() - expected).abs().max() <= 1.01 * torch.finfo(dtype).eps


def test_the_gain_is_plain_and_cast_to_the_input() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, torch.zeros(8), eps=1e-5), torch.zeros_like(x))  # not 1 + w
    assert rms_norm(x, torch.ones(8, dtype=torch.float32), eps=1e-5).dtype == torch.bfloat16


def test_gradients_match_finite_differences() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, eps=1e-5), (x, weight))


@pytest.mark.parametrize("width", [7, 24, 65, 576])
def test_a_rows_bits_do_not_depend_on_other_rows(width: int) -> None:
    x, weight = torch.randn(33, width), torch.randn(width)
    whole = rms_norm(x, weight, eps=1e-5)
    for row in (0, 1, 15, 32):
        assert torch.equal(rms_norm(x[row : row + 1], weight, eps=1e-5)[0], whole[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_gradient_the_layer_norm_form_is_the_same_function(dtype: torch.dtype) -> None:
    """On a CPU, rows that need no gradient go through layer norm of (x, -x); a large outlier is the hard case."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 576, generator=generator) * torch.tensor([1e-4, 1.0, 30.0, 1e3, 1.0])[:, None]
    x[4, 7] = 25_000.0
    x = x.to(dtype)
    gain = (torch.rand(576, generator=generator) + 0.5).to(dtype)
    wanted = slow_rms_norm(x, gain, 1e-5)
    found = rms_norm(x, gain, eps=1e-5)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < bound
    traced = rms_norm(x, gain.clone().requires_grad_(True), eps=1e-5)  # the form that training differentiates
    assert float((found.double() - traced.detach().double()).abs().max() / wanted.abs().max()) < bound


@pytest.mark.parametrize("num_copies", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mirrored_rows_are_the_norm_and_its_negative_in_turn(num_copies: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 5, 24).to(dtype), torch.randn(24).to(dtype)
    y = rms_norm_mirrored(x.unsqueeze(-2), mirror_gain(weight, num_copies), eps=1e-5)
    assert y.shape == (3, 5, num_copies, 24) and y.dtype == dtype
    expected = rms_norm(x, weight, eps=1e-5)
    for copy in range(num_copies):  # sums over 2 and over 4 copies may differ in their last bit
        torch.testing.assert_close(y[..., copy, :], expected if copy % 2 == 0 else -expected)


def test_a_prepared_gain_is_a_copy_and_gives_the_same_bits() -> None:
    x, weight = torch.randn(7, 24), torch.randn(24)
    gain = mirror_gain(weight, 2)
    expected = rms_norm(x, weight, eps=1e-5)
    weight.zero_()
    assert torch.equal(rms_norm_mirrored(x.unsqueeze(-2), gain, eps=1e-5)[:, 0], expected)


def test_16_bit_outputs_are_rounded_once() -> None:
    """A gain that is multiplied in after a rounding doubles the error; the canary does that."""
    x, weight = torch.randn(500, 64).to(torch.bfloat16), (torch.rand(64) + 0.5).to(torch.bfloat16)
    exact = slow_rms_norm(x, weight, 1e-5)
    unit = torch.ones_like(weight)
    twice = rms_norm(x, unit, eps=1e-5) * weight
    half_unit = torch.finfo(torch.bfloat16).eps / 2

    def worst(y: torch.Tensor) -> float:
        return float(((y.double() - exact) / exact).abs().max())

    assert worst(rms_norm(x, weight, eps=1e-5)) <= 1.01 * half_unit < worst(twice)
