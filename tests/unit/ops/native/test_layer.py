"""A layer in one native call against its operations one by one: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.models.native_layer import NativeLayer, run_native
from paceline.ops.native import rows as native
from paceline.ops.native.attention import BlockedAttention, InLayer
from paceline.ops.native.layer import LayerCall, LayersCall, NativeConvolution
from paceline.ops.rotary import expand_rotary, rotary_table

pytestmark = pytest.mark.skipif(
    not native.can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)

WIDTH, HEADS, KV_HEADS, SIZE, INNER, EPS = 48, 4, 2, 16, 40, 1e-5
STARTS = [5, 0, 30]


class Causal(InLayer):
    """Rows of three requests behind some stored keys."""

    def __init__(self, planes: Tensor, num_rows: int) -> None:
        starts = torch.tensor(STARTS)
        table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
        positions = starts.unsqueeze(1) + torch.arange(num_rows)
        write_rows = table.long().gather(1, positions // 16) * 16 + positions % 16
        self.seen = torch.zeros_like(positions).int(), (positions + 1).int()
        self.attend = BlockedAttention(
            planes, table, torch.arange(3), starts, num_rows=num_rows, end=64, write_rows_BT=write_rows
        )
        self.num_threads = self.attend.num_threads

    def in_layer(self, layer: int) -> int:
        return self.attend.in_layer(layer, *self.seen)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("num_rows", [1, 4, 9])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_one_call_has_the_bits_of_many(num_rows: int, has_bias: bool, has_qk_norm: bool) -> None:
    def weight(outputs: int, inputs: int, seed: int, *, is_gated: bool = False) -> native.NativeWeight:
        bias = numbers(outputs, seed=10 + seed) if has_bias else None
        return native.pack((numbers(outputs, inputs, seed=seed).float() / 7).bfloat16(), bias, is_gated=is_gated)

    qkv = weight((HEADS + 2 * KV_HEADS) * SIZE, WIDTH, 1)
    o, gate_up, down = (
        weight(WIDTH, HEADS * SIZE, 2),
        weight(2 * INNER, WIDTH, 3, is_gated=True),
        weight(WIDTH, INNER, 4),
    )
    gains = numbers(WIDTH, seed=5), numbers(WIDTH, seed=6)
    qk_gains = (numbers(SIZE, seed=7), numbers(SIZE, seed=8)) if has_qk_norm else None
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    whole = LayerCall(qkv=qkv, o=o, gate_up=gate_up, down=down, gains=gains, qk_gains=qk_gains, eps=EPS, **sizes)

    x, planes = numbers(3, num_rows, WIDTH), numbers(2, 2, KV_HEADS, 13, 16, SIZE)
    positions = torch.tensor(STARTS).unsqueeze(1) + torch.arange(num_rows)
    rows = expand_rotary(rotary_table(torch.linspace(1.0, 0.1, SIZE // 2), 64)[positions], torch.bfloat16)
    apart = planes.clone()
    y = whole(x, rows, Causal(planes, num_rows), 1)

    attend = Causal(apart, num_rows)
    heads = native.linear(x, qkv, gain_I=gains[0], eps=EPS)
    native.turn_heads_(heads, rows, gains=qk_gains, eps=EPS, **sizes)
    q, k, v = heads.view(3, num_rows, -1, SIZE).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    stream = native.linear(attend.attend(1, q, k, v, *attend.seen).flatten(-2), o, residual_TO=x)
    gated = native.linear(stream, gate_up, gain_I=gains[1], eps=EPS)
    assert torch.equal(y, native.linear(gated, down, residual_TO=stream))
    assert torch.equal(planes, apart)
    assert torch.equal(x, numbers(3, num_rows, WIDTH)), "the stream that came in may have been tapped"
    assert y.isfinite().all() and not torch.equal(y, x)


@pytest.mark.parametrize("num_rows", [1, 4, 9])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("has_offset", [False, True])
def test_one_call_of_a_convolved_layer_has_the_bits_of_many(
    num_rows: int, num_threads: int, has_offset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against `run_native` where attention has no address, with sides of 3 and 2 taps, in groups of 12 and of 48."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)

    def weight(outputs: int, inputs: int, seed: int, *, is_gated: bool = False) -> native.NativeWeight:
        return native.pack((numbers(outputs, inputs, seed=seed).float() / 7).bfloat16(), is_gated=is_gated)

    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    convolutions = (
        NativeConvolution(weight(2 * 3 * 4, WIDTH, 11), numbers(6, WIDTH, seed=12).float()),
        NativeConvolution(weight(2 * 2, WIDTH, 13), numbers(4, WIDTH, seed=14).float()),
    )
    weights = {
        "qkv": weight((HEADS + 2 * KV_HEADS) * SIZE, WIDTH, 1),
        "o": weight(WIDTH, HEADS * SIZE, 2),
        "gate_up": weight(2 * INNER, WIDTH, 3, is_gated=True),
        "down": weight(WIDTH, INNER, 4),
    }
    gains = numbers(WIDTH, seed=5), numbers(WIDTH, seed=6)
    whole = LayerCall(**weights, gains=gains, qk_gains=None, eps=EPS, convolutions=convolutions, **sizes)
    layer = NativeLayer(
        input_gain_D=gains[0],
        mlp_gain_D=gains[1],
        qk_gains=None,
        eps=EPS,
        whole=whole,
        attention_convolution=convolutions[0],
        mlp_convolution=convolutions[1],
        **weights,
        **sizes,
    )
    x, planes = numbers(3, num_rows, WIDTH), numbers(2, 2, KV_HEADS, 13, 16, SIZE)
    positions = torch.tensor(STARTS).unsqueeze(1) + torch.arange(num_rows)
    rows = expand_rotary(rotary_table(torch.linspace(1.0, 0.1, SIZE // 2), 64)[positions], torch.bfloat16)
    offset = torch.arange(num_rows).repeat(3) if has_offset else None
    attend, apart = Causal(planes, num_rows), Causal(planes.clone(), num_rows)
    found = run_native(layer, x, rows, attend, 1, offset)
    expected = run_native(layer, x, rows, lambda layer, q, k, v: apart.attend(layer, q, k, v, *apart.seen), 1, offset)
    assert torch.equal(found, expected) and found.isfinite().all()
    in_layers = LayersCall([whole, whole])(x, rows, Causal(planes, num_rows), attend.attend.key_stride, offset)
    first = run_native(layer, x, rows, attend, 0, offset)
    assert torch.equal(in_layers[0], first) and torch.equal(
        in_layers[1], run_native(layer, first, rows, attend, 1, offset)
    )
    other = run_native(layer, x, rows, attend, 1, None if has_offset else torch.arange(num_rows).repeat(3))
    assert not torch.equal(other, found), "where a block begins makes a difference"
    swapped = LayerCall(
        **weights, gains=gains, qk_gains=None, eps=EPS, convolutions=(convolutions[0], convolutions[0]), **sizes
    )
    assert not torch.equal(swapped(x, rows, attend, 1, offset), found), "and so does whose taps they are"


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_layers_in_one_call_have_the_bits_of_one_after_the_other(
    num_rows: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE}
    outputs = {"qkv": (HEADS + 2 * KV_HEADS) * SIZE, "o": WIDTH, "gate_up": 2 * INNER, "down": WIDTH}
    inputs = {"qkv": WIDTH, "o": HEADS * SIZE, "gate_up": WIDTH, "down": INNER}

    def layer(seed: int) -> LayerCall:
        weights = {
            name: native.pack((numbers(outputs[name], inputs[name], seed=seed).float() / 7).bfloat16(), is_gated=gated)
            for name, gated in (("qkv", False), ("o", False), ("gate_up", True), ("down", False))
        }
        return LayerCall(
            **weights, gains=(numbers(WIDTH, seed=5), numbers(WIDTH, seed=6)), qk_gains=None, eps=EPS, **sizes
        )

    calls = [layer(seed) for seed in (1, 2, 3)]
    x, planes = numbers(3, num_rows, WIDTH), numbers(3, 2, KV_HEADS, 13, 16, SIZE)
    positions = torch.tensor(STARTS).unsqueeze(1) + torch.arange(num_rows)
    rows = expand_rotary(rotary_table(torch.linspace(1.0, 0.1, SIZE // 2), 64)[positions], torch.bfloat16)
    apart = planes.clone()
    attend = Causal(planes, num_rows)
    found = LayersCall(calls)(x, rows, attend, attend.attend.key_stride)
    expected = x
    for index, call in enumerate(calls):
        expected = call(expected, rows, Causal(apart, num_rows), index)
        assert torch.equal(found[index], expected), f"the stream behind layer {index}"
    assert torch.equal(planes, apart), "each layer's keys where they belong"
    assert not torch.equal(LayersCall(calls)(x, rows, Causal(apart, num_rows), 0)[2], expected), (
        "a wrong stride is seen"
    )
