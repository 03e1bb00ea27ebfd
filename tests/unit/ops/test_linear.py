"""Three arithmetics of one product: agreement, and bits that do not depend on neighbours in row-invariant mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.linear import ROW_TILE, can_pack, linear_packed, linear_row_invariant, pack_weight

ROW_COUNTS = (1, 2, 3, 8, 16, 17, 33)
SHAPES = [(64, 96), (33, 17), (13, 5), (10, 8), (24, 3), (16, 1), (576, 192)]


def moved_rows(product: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """One row's result at several places among different neighbours."""
    results = []
    for num_rows in ROW_COUNTS:
        for place in {0, 1, 5, num_rows - 1}:
            if place < num_rows:
                rows = torch.randn(num_rows, x.shape[0]).to(dtype)
                rows[place] = x
                results.append(product(rows)[place])
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_size", "out_size"), SHAPES)
def test_row_invariant_bits_do_not_depend_on_number_or_place(in_size: int, out_size: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(out_size, in_size).to(dtype), torch.randn(out_size).to(dtype)
    x = torch.randn(in_size).to(dtype)
    results = moved_rows(lambda rows: linear_row_invariant(rows, weight, bias), x, dtype)
    assert all(torch.equal(result, results[0]) for result in results)


def test_the_plain_product_would_fail_the_test_above() -> None:
    """Not a promise of torch, but the reason for the mode: some shape changes its bits with the number of rows."""
    differs = False
    for in_size, out_size in SHAPES:
        weight, x = torch.randn(out_size, in_size), torch.randn(in_size)
        results = moved_rows(lambda rows, weight=weight: functional.linear(rows, weight), x, torch.float32)
        differs |= not all(torch.equal(result, results[0]) for result in results)
    if not differs:
        pytest.skip("this machine's library is row-invariant by itself")


@pytest.mark.parametrize("out_size", [2, 7, 64])
def test_row_invariant_bits_do_not_depend_on_addresses(out_size: int) -> None:
    weight, x = torch.randn(out_size, 32), torch.randn(16, 32)
    expected = linear_row_invariant(x, weight, None)
    for offset in range(1, 9):
        storage = torch.empty(x.numel() + offset)
        unaligned = storage[offset:].view(x.shape).copy_(x)
        assert torch.equal(linear_row_invariant(unaligned, weight, None), expected)
        strided = torch.zeros(16, 32 + offset)
        strided[:, :32] = x
        assert torch.equal(linear_row_invariant(strided[:, :32], weight, None), expected)


@pytest.mark.parametrize("num_rows", [0, 1, ROW_TILE, ROW_TILE + 1])
def test_row_invariant_keeps_shapes_and_values(num_rows: int) -> None:
    x, weight, bias = torch.randn(2, num_rows, 24), torch.randn(5, 24), torch.randn(5)
    y = linear_row_invariant(x, weight, bias)
    assert y.shape == (2, num_rows, 5)
    torch.testing.assert_close(y, functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_row_invariant_gradients_match_the_plain_ones() -> None:
    x, weight = torch.randn(3, 13, dtype=torch.float64), torch.randn(5, 13, dtype=torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: linear_row_invariant(a, b, None), (x, weight))


needs_packing = pytest.mark.skipif(
    not can_pack(torch.empty(1, 1, dtype=torch.bfloat16)), reason="no native bf16 products on this processor"
)


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 3, 16, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_agrees_with_plain(num_rows: int, has_bias: bool) -> None:
    x = torch.randn(2, num_rows, 72, dtype=torch.bfloat16)
    weight = torch.randn(40, 72, dtype=torch.bfloat16) / 8
    bias = torch.randn(40, dtype=torch.bfloat16) if has_bias else None
    y = linear_packed(x, pack_weight(weight), bias)
    assert y.shape == (2, num_rows, 40) and y.dtype == torch.bfloat16
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert ((y.double() - exact).abs() <= 2**-7 * exact.abs() + 2**-6).all()


@needs_packing
def test_packing_is_a_copy() -> None:
    weight = torch.randn(40, 72, dtype=torch.bfloat16)
    packed = pack_weight(weight)
    before = linear_packed(torch.ones(1, 72, dtype=torch.bfloat16), packed, None)
    weight.zero_()
    assert torch.equal(linear_packed(torch.ones(1, 72, dtype=torch.bfloat16), packed, None), before)


def test_only_bf16_on_the_cpu_is_packed() -> None:
    assert not can_pack(torch.empty(4, 4, dtype=torch.float32))
    assert not can_pack(torch.empty(4, 4, dtype=torch.bfloat16, device="meta"))
