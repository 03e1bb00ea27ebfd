"""Grouped convolution: worked examples of the spec, a slow float64 twin, block borders, gradients, the kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.grouped_convolution import (
    convolution_factors,
    grouped_convolution,
    grouped_convolution_differentiable_triton,
    grouped_convolution_gradients_triton,
    grouped_convolution_reference,
    grouped_convolution_triton,
)

# Spec 8.1: two taps, width 4, groups of 2, blocks of 3 rows.
BASE = torch.tensor([[1.0, 1, 1, 1], [0.5, -0.5, 0.25, 0]])
DELTA = torch.tensor(
    [
        [[0.1, 0.2], [9, 9]],
        [[0, -0.5], [0.5, 1]],
        [[-1, 0], [0, 0.25]],
        [[0, 0], [1, 1]],
        [[0, 0], [1, 1]],
        [[0.5, 0.5], [0, 0]],
    ]
)
X = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [1, 0, -1, 2], [2, 1, 0, -1], [0, 1, 1, 1]])
Y = torch.tensor(
    [
        [1.1, 2.2, 3.6, 4.8],
        [6, 6, 7.25, 8],
        [2.5, -3, 14.5, 14],
        [1, 0, -1, 2],
        [3.5, 1, -1.25, 1],
        [1, 1, 1.5, 1.5],
    ]
)


def offsets(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def slow_convolution(x_RD: Tensor, base_TD: Tensor, delta_RTG: Tensor, lengths: list[int]) -> Tensor:
    """One block, row, channel and tap at a time, in float64."""
    group_size = x_RD.shape[1] // delta_RTG.shape[2]
    x, base, delta = x_RD.double(), base_TD.double(), delta_RTG.double()
    y = torch.zeros_like(x)
    start = 0
    for length in lengths:
        for row in range(length):
            for channel in range(x.shape[1]):
                for tap in range(min(base.shape[0], row + 1)):
                    factor = base[tap, channel] + delta[start + row, tap, channel // group_size]
                    y[start + row, channel] += factor * x[start + row - tap, channel]
        start += length
    return y


def test_the_worked_example() -> None:
    torch.testing.assert_close(grouped_convolution(X[:3], BASE, DELTA[:3], offsets(3)), Y[:3])
    torch.testing.assert_close(grouped_convolution(X, BASE, DELTA, offsets(3, 3)), Y)


def test_a_wrong_block_length_leaks_into_the_next_block() -> None:
    leaked = grouped_convolution(X, BASE, DELTA, offsets(6))
    torch.testing.assert_close(leaked[3], torch.tensor([14.5, 5, 12.75, 14]))
    torch.testing.assert_close(leaked[[0, 1, 2, 4, 5]], Y[[0, 1, 2, 4, 5]])


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_taps=st.integers(1, 5),
    num_groups=st.integers(1, 4),
    group_size=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_the_reference_agrees_with_a_slow_float64_twin(
    lengths: list[int], num_taps: int, num_groups: int, group_size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, width = sum(lengths), num_groups * group_size
    x = torch.randn(rows, width, generator=generator)
    base = torch.randn(num_taps, width, generator=generator)
    delta = torch.randn(rows, num_taps, num_groups, generator=generator)
    found = grouped_convolution(x, base, delta, offsets(*lengths))
    torch.testing.assert_close(found.double(), slow_convolution(x, base, delta, lengths), rtol=1e-5, atol=1e-5)


def test_a_shorter_block_has_the_same_values() -> None:
    whole = grouped_convolution(X[:3], BASE, DELTA[:3], offsets(3))
    assert torch.equal(grouped_convolution(X[:2], BASE, DELTA[:2], offsets(2)), whole[:2])


def test_nothing_of_a_neighbour_is_read() -> None:
    x = X.clone()
    x[:3] = torch.nan
    assert torch.equal(grouped_convolution(x, BASE, DELTA, offsets(3, 3))[3:], Y[3:])


def test_16_bit_rows_are_summed_in_float32_and_rounded_once() -> None:
    x, base, delta = torch.randn(7, 6), torch.randn(3, 6), torch.randn(7, 3, 2)
    low = [t.to(torch.bfloat16) for t in (x, base, delta)]
    wide = grouped_convolution(*[t.float() for t in low], offsets(4, 3))
    found = grouped_convolution(*low, offsets(4, 3))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wide.to(torch.bfloat16))


def test_gradients() -> None:
    x, base, delta = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 4), (3, 4), (5, 3, 2)))
    offset = offsets(3, 2)
    x.requires_grad_(), base.requires_grad_(), delta.requires_grad_()
    y = grouped_convolution(x, base, delta, offset)
    weight = torch.randn(5, 4)
    found = torch.autograd.grad((y * weight).sum(), (x, base, delta))
    step = 1e-2  # exact: the function is linear in each argument
    for argument, gradient in zip((x, base, delta), found, strict=True):
        for index in range(argument.numel()):
            moved = argument.detach().clone()
            moved.view(-1)[index] += step
            others = [moved if other is argument else other.detach() for other in (x, base, delta)]
            change = ((grouped_convolution(*others, offset) - y.detach()) * weight).sum() / step
            assert float(gradient.view(-1)[index]) == pytest.approx(float(change), abs=2e-4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((6, 4), (2, 4), (5, 2, 2), (6,)), r"delta has shape \[5, 2, 2\]"),
        (((6, 4), (2, 4), (6, 2, 3), (6,)), "G a divisor of 4"),
        (((6, 4), (3, 4), (6, 2, 2), (6,)), r"base has shape \[3, 4\], expected \[2, 4\]"),
        (((6, 4), (2, 4), (6, 2, 2), (3,)), r"offset has shape \[3\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        grouped_convolution(*[torch.zeros(shape) for shape in shapes])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "num_taps", "num_groups", "group_size"),
    [
        ([3, 3], 2, 2, 2),
        ([1], 1, 1, 1),
        ([5, 1, 4], 3, 3, 7),
        ([2, 2], 5, 9, 4),
        ([8] * 3, 2, 36, 16),
        ([4], 2, 1, 1100),
    ],
)
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    num_taps: int,
    num_groups: int,
    group_size: int,
) -> None:
    rows, width = sum(lengths), num_groups * group_size
    x, base = torch.randn(rows, width).to(dtype), torch.randn(num_taps, width).to(dtype)
    projected = torch.full((rows, 2, num_taps, num_groups), torch.nan).to(dtype)  # the other half is not to be read
    projected[:, 1] = torch.randn(rows, num_taps, num_groups)
    offset = offsets(*lengths)
    expected = grouped_convolution_reference(x, base, projected[:, 1], offset)
    there = [t.to(kernel_device) for t in (x, base, projected, offset)]
    found = grouped_convolution_triton(there[0], there[1], there[2][:, 1], there[3]).cpu()
    assert found.dtype == dtype
    # One unit of the last place: the interpreter cuts float32 down to bf16 where a GPU rounds.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
    torch.testing.assert_close(found, expected, **tolerance)
    leaked = grouped_convolution_triton(there[0], there[1], there[2][:, 1], torch.arange(rows).to(kernel_device)).cpu()
    if len(lengths) > 1 and num_taps > 1:
        assert (leaked - expected).abs().max() > 0.05


def test_the_kernel_reads_nothing_of_a_neighbour(kernel_device: torch.device) -> None:
    x = X.clone()
    x[:3] = torch.nan
    there = [t.to(kernel_device) for t in (x, BASE, DELTA, offsets(3, 3))]
    torch.testing.assert_close(grouped_convolution_triton(*there)[3:].cpu(), Y[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "num_taps", "num_groups", "group_size"),
    [
        ([3, 3], 2, 2, 2),
        ([1], 1, 1, 1),
        ([5, 1, 4], 3, 3, 7),
        ([2, 2], 5, 9, 4),
        ([8] * 5, 2, 36, 16),
        ([4], 2, 1, 1100),
        ([3] * 2, 2, 70, 16),
    ],
)
def test_the_gradient_kernel_agrees_with_autograd_through_the_reference(
    kernel_device: torch.device,
    dtype: torch.dtype,
    lengths: list[int],
    num_taps: int,
    num_groups: int,
    group_size: int,
) -> None:
    rows, width = sum(lengths), num_groups * group_size
    x, base = torch.randn(rows, width).to(dtype), torch.randn(num_taps, width)  # float32 masters beside 16-bit rows
    projected = torch.full((rows, 2, num_taps, num_groups), torch.nan).to(dtype)
    projected[:, 1] = torch.randn(rows, num_taps, num_groups)
    dy, offset = torch.randn(rows, width).to(dtype), offsets(*lengths)
    leaves = [t.clone().requires_grad_() for t in (x, base, projected[:, 1])]
    expected = torch.autograd.grad(grouped_convolution_reference(*leaves, offset), leaves, dy)
    there = [t.to(kernel_device) for t in (x, base, projected, offset)]
    leaves = [there[0].requires_grad_(), there[1].requires_grad_(), there[2].requires_grad_()]
    y = grouped_convolution_differentiable_triton(leaves[0], leaves[1], leaves[2][:, 1], there[3])
    found = torch.autograd.grad(y, leaves, dy.to(kernel_device))
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2e-2}
    for ours, theirs in zip((found[0], found[1], found[2][:, 1]), expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs, **tolerance)
    leaked = grouped_convolution_gradients_triton(
        there[0], there[1], there[2][:, 1], torch.arange(rows).to(kernel_device), dy.to(kernel_device)
    )
    if len(lengths) > 1 and num_taps > 1:
        assert (leaked[0].cpu() - expected[0]).abs().max() > 0.05


def test_a_neighbour_owes_nothing_and_gets_nothing(kernel_device: torch.device) -> None:
    """NaN in one block's rows and gradients stays out of every gradient of the other's rows."""
    x, dy = X.clone(), torch.ones_like(X)
    x[:3], dy[:3] = torch.nan, torch.nan
    there = [t.to(kernel_device) for t in (x, BASE, DELTA, offsets(3, 3), dy)]
    dx, _, ddelta = grouped_convolution_gradients_triton(*there)
    assert torch.isfinite(dx[3:]).all() and torch.isfinite(ddelta[3:]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 6])
def test_no_offsets_mean_one_block(dtype: torch.dtype, num_rows: int) -> None:
    x, base, delta = torch.randn(num_rows, 12), torch.randn(3, 12), torch.randn(num_rows, 3, 4)
    arguments = x.to(dtype), base.to(dtype), delta.to(dtype)
    assert torch.equal(grouped_convolution(*arguments, None), grouped_convolution(*arguments, offsets(num_rows)))


def test_factors_of_two_convolutions_at_once_are_those_of_each() -> None:
    base, delta = torch.randn(4, 12).to(torch.bfloat16), torch.randn(5, 4, 4).to(torch.bfloat16)
    both = convolution_factors(base, delta)
    for side, taps in enumerate((slice(0, 2), slice(2, 4))):
        each = convolution_factors(base[taps], delta[:, taps])
        assert all(torch.equal(one, other) for one, other in zip(both[2 * side : 2 * side + 2], each, strict=True))


def test_sums_go_tap_by_tap() -> None:
    """The bits are those of the plainest way to write it."""
    x, base, delta, offset = torch.randn(7, 12), torch.randn(3, 12), torch.randn(7, 3, 4), offsets(4, 3)
    y = x * (base[0] + delta[:, 0].repeat_interleave(3, dim=1))
    for tap in (1, 2):
        earlier = torch.cat((torch.zeros(tap, 12), x[:-tap])).masked_fill((offset < tap).unsqueeze(1), 0.0)
        y = y + earlier * (base[tap] + delta[:, tap].repeat_interleave(3, dim=1))
    assert torch.equal(grouped_convolution(x, base, delta, offset), y)
