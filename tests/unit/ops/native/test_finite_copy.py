"""A copy that looks at what it copies: the bits of torch's copy, and no number that is not finite gets by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ops.native import finite_copy
from paceline.ops.native.rows import can_run

pytestmark = pytest.mark.skipif(
    not can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)
STORED = (torch.float32, torch.bfloat16, torch.float16)
TO = (torch.float32, torch.bfloat16)
UNEVEN = 2 * 65536 + 77  # three pieces, the last of which fills no register


def copied(stored: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """What arrives and what is said of it; the number behind the last is left alone."""
    room = torch.full((stored.numel() + 1,), 7.0, dtype=dtype)
    to = room[:-1].view(stored.shape)
    assert finite_copy.can_copy(to, stored)
    answer = finite_copy.copy_if_finite(to, stored)
    assert room[-1] == 7.0
    return to, answer


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", TO)
@pytest.mark.parametrize("stored_dtype", STORED)
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (15,), (5, 13), (3, 64), (UNEVEN,)])
def test_it_leaves_the_bits_of_a_copy(shape: tuple[int, ...], stored_dtype: torch.dtype, dtype: torch.dtype) -> None:
    stored = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(stored_dtype)
    to, is_finite = copied(stored, dtype)
    assert is_finite
    assert torch.equal(bits(to), bits(stored.to(dtype)))


@pytest.mark.parametrize("stored_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", TO)
def test_every_half_arrives_as_torch_has_it(stored_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """All 65,536 of them, the smallest included; one by one, whether it is finite."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(stored_dtype)
    finite = halves[halves.isfinite()]
    to, is_finite = copied(finite, dtype)
    assert is_finite
    assert torch.equal(bits(to), bits(finite.to(dtype)))
    others = halves[~halves.isfinite()]
    assert not any(copied(one.view(1), dtype)[1] for one in (*others[:40], *others[-40:]))


def test_rounding_is_that_of_torch_at_ties_and_at_both_ends() -> None:
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1))
    patterns[::2] = patterns[::2] // 2**16 * 2**16 + 2**15  # halfway between two bfloats
    patterns[1::8] %= 2**23  # too small for a full significand
    stored = patterns.to(torch.int32).view(torch.float32)
    stored = stored[stored.to(torch.bfloat16).isfinite()]
    to, is_finite = copied(stored, torch.bfloat16)
    assert is_finite
    assert torch.equal(bits(to), bits(stored.to(torch.bfloat16)))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_number_passes_and_the_next_does_not(sign: int) -> None:
    """What would still round to a finite bfloat, what would not; the largest of float32 in float32."""
    last, next_one = torch.tensor([[0x7F7F7FFF], [0x7F7F8000]], dtype=torch.int32).view(torch.float32)
    for stored, dtype in ((last, torch.bfloat16), (next_one, torch.bfloat16), (next_one, torch.float32)):
        to, is_finite = copied(sign * stored, dtype)
        assert is_finite is bool(to.isfinite().all()) is (stored is last or dtype == torch.float32)


@pytest.mark.parametrize("dtype", TO)
@pytest.mark.parametrize("stored_dtype", STORED)
def test_one_bad_number_anywhere_is_seen(stored_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """In every lane of a full set of registers, of a part of one, of the first and of the last piece."""
    for size, places in ((91, range(91)), (UNEVEN, (0, 65535, 65536, UNEVEN - 78, UNEVEN - 1))):
        for place in places:
            for value in (torch.nan, torch.inf, -torch.inf):
                stored = torch.ones(size, dtype=stored_dtype)
                stored[place] = value
                to, is_finite = copied(stored, dtype)
                assert not is_finite
                assert torch.equal(to.isfinite(), stored.isfinite())


def test_what_each_of_two_threads_finds_counts() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for place in (0, 65535, 65536, UNEVEN - 1):
            stored = torch.ones(UNEVEN)
            stored[place] = torch.nan
            to, is_finite = copied(stored, torch.float32)
            assert not is_finite and torch.equal(to.isnan(), stored.isnan())
    finally:
        torch.set_num_threads(before)


def test_what_it_does_not_take() -> None:
    square = torch.ones(4, 4)
    assert finite_copy.can_copy(square, square)
    assert not finite_copy.can_copy(square.half(), square), "no float16 is written"
    assert not finite_copy.can_copy(square, square.double())
    assert not finite_copy.can_copy(square, square.int())
    assert not finite_copy.can_copy(square.t(), square)
    assert not finite_copy.can_copy(square, square[:, :2])
    assert not finite_copy.can_copy(square, square[:1]), "torch would spread the row over all rows"
    assert not finite_copy.can_copy(square.to("meta"), square)
