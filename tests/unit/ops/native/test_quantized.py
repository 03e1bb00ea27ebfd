"""Products with codes against the weight that these mean, in float64, and that a row's bits are its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.tiny_codes import coded, meant
from torch import Tensor

from paceline.checkpoint.gguf_codes import BlockCodes
from paceline.ops.native import quantized
from paceline.ops.native.rows import CODES_4, CODES_8, NativeWeight, linear

pytestmark = pytest.mark.skipif(not quantized.can_run_quantized(), reason="no products with codes on this machine")

SHAPES = [(960, 576), (576, 1536), (40, 96), (1, 32)]


def numbers(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def pack(held: BlockCodes, bias: Tensor | None = None, *, is_gated: bool = False) -> NativeWeight:
    assert quantized.can_pack_codes(held.scales_OC, held.minima_OC, held.codes_OI)
    return quantized.pack_codes(held.scales_OC, held.minima_OC, held.codes_OI, bias, is_gated=is_gated)


def is_near(found: Tensor, exact: Tensor) -> bool:
    """Within one rounding to bfloat16, and a float32 sum."""
    return bool(((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4 * exact.abs().max()).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 65])
def test_products_are_those_of_the_weight_that_is_meant(bits: int, num_rows: int) -> None:
    for num_outputs, num_inputs in SHAPES:
        held = coded(numbers(num_outputs, num_inputs, seed=1), bits)
        x = numbers(num_rows, num_inputs)
        exact = x.double() @ meant(held).double().T
        packed = pack(held)
        assert packed.form == (CODES_4 if bits == 4 else CODES_8)
        found = linear(x, packed)
        assert is_near(found, exact)
        rounded = x.double() @ meant(held).bfloat16().double().T
        if num_outputs > 1:
            assert (found.double() - exact).norm() < (found.double() - rounded).norm(), "no weight is rounded"


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
    exact = x.double() @ meant(held).double().T + bias.double()
    assert is_near(linear(x, pack(held, bias), residual_TO=residual), exact + residual.double())
    gate, up = exact.chunk(2, dim=-1)
    assert is_near(linear(x, pack(held, bias, is_gated=True)), torch.nn.functional.silu(gate) * up)
    from paceline.ops.native.rows import norm

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
    exact = x.double() @ meant(held).double().T
    assert is_near(linear(x, pack(held)), exact) and not is_near(linear(x, pack(wrong)), exact)


def test_every_code_is_read_as_itself() -> None:
    eye = torch.eye(32).bfloat16()
    one = torch.ones(16, 1, dtype=torch.float16)
    fours = torch.arange(512).remainder(16).to(torch.uint8).view(16, 32)
    assert torch.equal(linear(eye, quantized.pack_codes(one, one * -3, fours)), (fours.float() - 3).T.bfloat16())
    eights = torch.arange(512).remainder(255).sub(127).to(torch.int8).view(16, 32)
    assert torch.equal(linear(eye, quantized.pack_codes(one, None, eights)), eights.float().T.bfloat16())


def test_what_has_no_form_is_refused() -> None:
    four, eight = coded(numbers(8, 64), 4), coded(numbers(8, 64), 8)

    def fits(held: BlockCodes) -> bool:
        return quantized.can_pack_codes(held.scales_OC, held.minima_OC, held.codes_OI)

    assert fits(four) and fits(eight)
    assert not fits(dataclasses.replace(four, minima_OC=None)), "bytes without a sign"
    assert not fits(dataclasses.replace(four, codes_OI=four.codes_OI + 16))
    assert not fits(dataclasses.replace(four, minima_OC=torch.full((8, 2), -torch.inf, dtype=torch.float16)))
    assert not fits(dataclasses.replace(eight, codes_OI=torch.full((8, 64), -128, dtype=torch.int8)))
    assert not fits(dataclasses.replace(eight, codes_OI=eight.codes_OI[:, :48])), "half a block"
    assert not fits(dataclasses.replace(eight, scales_OC=eight.scales_OC.float()))
    wide = BlockCodes(torch.ones(1, 1024).half(), None, torch.zeros(1, 32768, dtype=torch.int8))
    assert not fits(wide), "more than the sums of a row have room for"


def test_an_infinite_row_spoils_itself_alone() -> None:
    packed, x = pack(coded(numbers(64, 64, seed=1), 4)), numbers(3, 64)
    alone = linear(x, packed)
    x[1, 5] = torch.inf
    found = linear(x, packed)
    assert torch.equal(found[[0, 2]], alone[[0, 2]]) and not found[1].isfinite().any()
