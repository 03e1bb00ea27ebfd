"""Rotary positions: worked numbers of both pairings, relative angles, channels that pass through, dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ops.rotary import apply_rotary, expand_rotary, rotary_table, rotary_turns, turn_heads

FREQUENCIES = torch.tensor([1.0, 0.01])  # head size 4, theta 10000


@pytest.mark.parametrize(
    ("is_neox_style", "expected"),
    [
        (True, [-1.984111, 1.959901, 2.462378, 4.019800]),
        (False, [-1.142640, 1.922076, 2.959851, 4.029800]),
    ],
)
def test_worked_numbers_of_both_pairings(is_neox_style: bool, expected: list[float]) -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # one position, one head
    y = apply_rotary(x, rotary_table(FREQUENCIES, 2)[1:2], is_neox_style=is_neox_style)
    torch.testing.assert_close(y[0, 0], torch.tensor(expected), rtol=0, atol=2e-6)


def test_position_zero_changes_nothing_and_scale_multiplies() -> None:
    x = torch.randn(1, 3, 4)
    assert torch.equal(apply_rotary(x, rotary_table(FREQUENCIES, 1)), x)
    torch.testing.assert_close(apply_rotary(x, rotary_table(FREQUENCIES, 1, scale=1.5)), x * 1.5)


@given(
    first=st.integers(0, 500),
    distance=st.integers(0, 100),
    shift=st.integers(0, 500),
    is_neox_style=st.booleans(),
    seed=st.integers(0, 100),
)
def test_products_depend_on_distance_alone(
    first: int, distance: int, shift: int, is_neox_style: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64).unbind(0)
    frequencies = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    angles = torch.outer(torch.arange(1200, dtype=torch.float64), frequencies)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)

    def product(q_position: int, k_position: int) -> float:
        turned_q = apply_rotary(q, table[q_position : q_position + 1], is_neox_style=is_neox_style)
        turned_k = apply_rotary(k, table[k_position : k_position + 1], is_neox_style=is_neox_style)
        return float((turned_q * turned_k).sum())

    assert product(first + distance, first) == pytest.approx(product(first + distance + shift, first + shift), abs=1e-9)


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_channels_past_the_rotated_ones_pass_through(is_neox_style: bool) -> None:
    x = torch.randn(5, 2, 10)
    table = rotary_table(FREQUENCIES, 5)
    y = apply_rotary(x, table, is_neox_style=is_neox_style)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert torch.equal(y[..., :4], apply_rotary(x[..., :4], table, is_neox_style=is_neox_style))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_every_leading_shape_gathers_its_own_rows() -> None:
    table = rotary_table(FREQUENCIES, 9)
    positions = torch.tensor([[3, 8], [0, 1], [5, 2]])
    x = torch.randn(3, 2, 4, 4)
    y = apply_rotary(x, table[positions])
    for index in ((0, 1), (1, 0), (2, 1)):
        assert torch.equal(y[index], apply_rotary(x[index], table[positions[index]]))


def test_16_bit_inputs_are_turned_in_float32_and_rounded_once() -> None:
    x = torch.randn(4, 2, 4, dtype=torch.bfloat16)
    table = rotary_table(FREQUENCIES, 4)
    y = apply_rotary(x, table)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, apply_rotary(x.float(), table).to(torch.bfloat16))


def test_the_pairings_differ() -> None:
    x = torch.randn(3, 2, 4)
    table = rotary_table(FREQUENCIES, 3)
    assert not torch.allclose(apply_rotary(x, table), apply_rotary(x, table, is_neox_style=False))


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("size", [4, 10])
def test_the_form_with_expanded_rows_agrees(is_neox_style: bool, size: int) -> None:
    x, table = torch.randn(2, 5, 3, size), rotary_table(FREQUENCIES, 5, scale=1.2)
    rows = expand_rotary(table, torch.float32, is_neox_style=is_neox_style)
    y = turn_heads(x, rows, is_neox_style=is_neox_style)
    torch.testing.assert_close(y, apply_rotary(x, table, is_neox_style=is_neox_style), rtol=1e-6, atol=1e-6)


def test_expanded_rows_in_16_bits_stay_within_rounding() -> None:
    x, table = torch.randn(5, 3, 4).to(torch.bfloat16), rotary_table(FREQUENCIES, 5)
    y = turn_heads(x, expand_rotary(table, torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert (y.float() - apply_rotary(x.float(), table)).abs().max() <= 4 * 2**-8 * x.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("half", [1, 2, 20])
def test_turns_are_the_rows_at_the_positions(half: int, dtype: torch.dtype, is_neox_style: bool) -> None:
    table = rotary_table(torch.logspace(0, -3, half), 60, scale=1.25)
    table[3, 0] = torch.tensor([torch.nan, torch.inf, 1.00390625, 1.01171875])[:half].repeat(5)[:half]  # ties, too
    table[4, 1] = -0.0
    table.view(torch.int32)[5, 0, 0] = 0x7F800001  # a NaN whose upper half alone is infinity
    positions = torch.tensor([[0, 59, 7], [3, 4, -1], [3, 5, 58]])
    for view in (positions, positions.t(), positions[:0], positions[0, 1]):
        expected = expand_rotary(table[view], dtype, is_neox_style=is_neox_style)
        found = rotary_turns(table, view, dtype, is_neox_style=is_neox_style)
        for one, other in zip(found, expected, strict=True):
            bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
            assert one.shape == other.shape and torch.equal(one.isnan(), other.isnan())
            sound = ~one.isnan()
            assert torch.equal(one.contiguous().view(bits)[sound], other.contiguous().view(bits)[sound])
    for outside in (60, -61):
        with pytest.raises(IndexError):
            rotary_turns(table, torch.tensor([0, outside]), dtype, is_neox_style=is_neox_style)
