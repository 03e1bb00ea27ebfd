"""Products in whole numbers against the weight that is meant and the rounded row; a row's bits are its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.tiny_codes import coded, meant
from torch import Tensor

from paceline.checkpoint.gguf_codes import BlockCodes
from paceline.ops.native import integers
from paceline.ops.native.integers import round_rows
from paceline.ops.native.rows import INTEGERS_4, INTEGERS_8, NativeWeight, linear, norm

pytestmark = pytest.mark.skipif(not integers.can_run_integers(), reason="no products in whole numbers on this machine")

SHAPES = [(960, 576), (576, 1536), (40, 96), (1, 32)]


def numbers(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def pack(held: BlockCodes, bias: Tensor | None = None, *, is_gated: bool = False) -> NativeWeight:
    return integers.pack_integers(held.scales_OC, held.minima_OC, held.codes_OI, bias, is_gated=is_gated)


def product(x: Tensor, held: BlockCodes) -> Tensor:
    return round_rows(x).double() @ meant(held).double().T


def is_near(found: Tensor, exact: Tensor) -> bool:
    """Within one rounding to bfloat16, and a float32 sum."""
    return bool(((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4 * exact.abs().max()).all())


def test_rows_are_rounded_by_the_largest_of_each_block() -> None:
    """127 steps on either side of nought, half a step at most from every number."""
    x = numbers(5, 96)
    x[0, 3], x[1] = 40.0, 0.0
    largest = x.float().view(5, 3, 32).abs().amax(-1, keepdim=True)
    error = (round_rows(x) - x.float()).view(5, 3, 32).abs()
    assert (error <= largest / 254 * 1.0001).all() and error[0, 0].max() > 0.01
    assert (round_rows(x)[1] == 0).all()
    steps = (round_rows(x).view(5, 3, 32) / largest.clamp(min=1e-9) * 127).round()
    assert steps.abs().max() == 127 and len(steps[2, 0].unique()) > 20


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 65])
def test_products_are_those_of_the_weight_that_is_meant(bits: int, num_rows: int) -> None:
    for num_outputs, num_inputs in SHAPES:
        held = coded(numbers(num_outputs, num_inputs, seed=1), bits)
        x = numbers(num_rows, num_inputs)
        packed = pack(held)
        assert packed.form == (INTEGERS_4 if bits == 4 else INTEGERS_8)
        found = linear(x, packed)
        assert is_near(found, product(x, held))
        whole = x.double() @ meant(held).double().T
        assert (found.double() - whole).norm() < 0.01 * whole.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_widest_row_has_room(bits: int) -> None:
    held, x = coded(numbers(20, 16384, seed=1), bits), numbers(18, 16384)
    assert is_near(linear(x, pack(held)), product(x, held))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rows_bits_are_its_own(bits: int) -> None:
    packed = pack(coded(numbers(96, 576, seed=1), bits))
    x = numbers(70, 576)
    alone = torch.cat([linear(row, packed) for row in x.split(1)])
    for num_rows in (2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 64, 70):
        assert torch.equal(linear(x[:num_rows], packed), alone[:num_rows])


@pytest.mark.parametrize("bits", [4, 8])
def test_threads_share_panels_and_change_no_bit(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = pack(coded(numbers(160, 576, seed=1), bits)), numbers(70, 576)
    alone = linear(x, packed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(linear(x, packed), alone)


@pytest.mark.parametrize("bits", [4, 8])
def test_bias_residual_norm_and_gates_go_with_it(bits: int) -> None:
    held, x, bias = coded(numbers(80, 64, scale=0.1, seed=1), bits), numbers(5, 64), numbers(80, seed=2)
    residual, gain = numbers(5, 80, seed=3), 1 + numbers(64, scale=0.1, seed=4)
    exact = product(x, held) + bias.double()
    assert is_near(linear(x, pack(held, bias), residual_TO=residual), exact + residual.double())
    gate, up = exact.chunk(2, dim=-1)
    assert is_near(linear(x, pack(held, bias, is_gated=True)), torch.nn.functional.silu(gate) * up)
    normed = linear(x, pack(held), gain_I=gain, eps=1e-5)
    assert torch.equal(normed, linear(norm(x, gain, eps=1e-5), pack(held)))


@pytest.mark.parametrize(
    "fault", ["neighbours swapped", "halves of a block swapped", "scales of the next block", "sign"]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_wrong_order_is_seen(fault: str, bits: int) -> None:
    held = coded(numbers(64, 128, seed=1), bits)
    codes = held.codes_OI
    wrong = {
        "neighbours swapped": dataclasses.replace(held, codes_OI=codes.view(64, -1, 2).flip(2).flatten(1)),
        "halves of a block swapped": dataclasses.replace(held, codes_OI=codes.view(64, -1, 2, 16).flip(2).flatten(1)),
        "scales of the next block": dataclasses.replace(held, scales_OC=held.scales_OC.roll(1, dims=1)),
        "sign": dataclasses.replace(held, codes_OI=15 - codes if bits == 4 else -codes),
    }[fault]
    x = numbers(3, 128)
    assert is_near(linear(x, pack(held)), product(x, held)) and not is_near(linear(x, pack(wrong)), product(x, held))


def test_every_code_is_read_as_itself() -> None:
    eye = torch.eye(32).bfloat16()
    one = torch.ones(16, 1, dtype=torch.float16)
    fours = torch.arange(512).remainder(16).to(torch.uint8).view(16, 32)
    assert torch.equal(linear(eye, integers.pack_integers(one, one * -3, fours)), (fours.float() - 3).T.bfloat16())
    eights = torch.arange(512).remainder(255).sub(127).to(torch.int8).view(16, 32)
    assert torch.equal(linear(eye, integers.pack_integers(one, None, eights)), eights.float().T.bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_sums_stay_whole(bits: int) -> None:
    """All codes and all inputs at their ends: nothing saturates on the way."""
    codes = torch.full((16, 64), 15 if bits == 4 else 127)
    held = BlockCodes(
        torch.ones(16, 2).half(),
        torch.zeros(16, 2).half() if bits == 4 else None,
        codes.to(torch.uint8 if bits == 4 else torch.int8),
    )
    for sign in (1, -1):
        found = linear(torch.full((1, 64), sign * 2.0).bfloat16(), pack(held))
        assert torch.equal(found, torch.full((1, 16), sign * 2.0 * 64 * float(codes[0, 0])).bfloat16())


@pytest.mark.parametrize("spoilt", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_that_is_not_finite_spoils_itself_alone(spoilt: float, bits: int) -> None:
    packed, x = pack(coded(numbers(64, 64, seed=1), bits)), numbers(3, 64)
    alone = linear(x, packed)
    x[1, 5] = spoilt
    found = linear(x, packed)
    assert torch.equal(found[[0, 2]], alone[[0, 2]]) and not found[1].isfinite().any()


@pytest.mark.parametrize("tiny", [0.0, 1e-40, 1e-38, 1e-30])
def test_next_to_nothing_stays_finite(tiny: float) -> None:
    held = coded(numbers(64, 64, seed=1), 8)
    found = linear(torch.full((1, 64), tiny).bfloat16(), pack(held))
    assert found.isfinite().all() and found.abs().max() <= 64 * 8 * tiny
