"""The flat form of a layer against its modules: equal bits for every kind of layer, and which layers have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.models.conftest import drafter_contract, randomise
from torch import Tensor

from paceline.checkpoint.contract import ConvolutionSettings, RopeSettings
from paceline.models.drafters.convolved_layer import ConvolvedLayer, convolved_layer
from paceline.models.layers import DecoderLayer, LinearMode, set_linear_mode
from paceline.models.positions import position_table
from paceline.ops.linear import can_pack
from paceline.ops.rotary import expand_rotary

pytestmark = pytest.mark.skipif(
    not can_pack(torch.empty(1, 1, dtype=torch.bfloat16)), reason="no native bf16 products on this processor"
)

Layer = DecoderLayer | ConvolvedLayer
SHAPES = [(1, 1), (1, 5), (4, 1), (3, 6)]


def plain_layer(
    *, bias: bool = False, qk_norm: bool = False, has_sink: bool = False, value_scale: float = 1.0
) -> DecoderLayer:
    return DecoderLayer(
        hidden_size=48,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        eps=1e-5,
        attention_bias=bias,
        mlp_bias=bias,
        qk_norm=qk_norm,
        has_sink=has_sink,
        value_scale=value_scale,
    )


def layer_with_convolutions(num_taps: int) -> ConvolvedLayer:
    layer = convolved_layer(drafter_contract(convolution=ConvolutionSettings(num_taps, 6)), 0)
    assert isinstance(layer, ConvolvedLayer)
    return layer


LAYERS: dict[str, Callable[[], Layer]] = {
    "plain": plain_layer,
    "biases": lambda: plain_layer(bias=True),
    "query and key norms": lambda: plain_layer(qk_norm=True),
    "convolutions": lambda: layer_with_convolutions(2),
    "convolutions of three taps": lambda: layer_with_convolutions(3),
    "convolutions of one tap": lambda: layer_with_convolutions(1),
}


def prepared(layer: Layer, mode: LinearMode = "packed") -> Layer:
    randomise(layer, 3)
    layer.to(torch.bfloat16).requires_grad_(False)
    set_linear_mode(layer, mode)
    return layer


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
    """Something of queries, keys, values and the layer's number; each row sees itself alone."""
    group = q.shape[2] // k.shape[2]
    return (q + layer) * k.repeat_interleave(group, 2) + v.repeat_interleave(group, 2)


def run(layer: Layer, x_BTD: Tensor, *, is_neox_style: bool = True, offset_R: Tensor | None = None) -> Tensor:
    head_size = layer.self_attn.head_size
    positions = torch.arange(x_BTD.shape[0] * x_BTD.shape[1]).view(x_BTD.shape[:2])
    table = position_table(RopeSettings(theta=100.0), head_size, 64)[positions]
    rows = expand_rotary(table, x_BTD.dtype, is_neox_style=is_neox_style)
    offsets = {} if offset_R is None else {"offset_R": offset_R}
    with torch.inference_mode():
        y: Tensor = layer(x_BTD, rows, attend, 7, is_neox_style=is_neox_style, **offsets)
    return y


def run_modules(layer: Layer, x_BTD: Tensor, **options: Any) -> Tensor:
    flat, layer._flat = layer._flat, None
    y = run(layer, x_BTD, **options)
    layer._flat = flat
    return y


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_flat_form_has_the_bits_of_the_modules(name: str, shape: tuple[int, int]) -> None:
    layer = prepared(LAYERS[name]())
    assert layer._flat is not None
    x = torch.randn(*shape, layer.input_layernorm.weight.shape[0]).to(torch.bfloat16)
    assert torch.equal(run(layer, x), run_modules(layer, x))


def test_blocks_within_a_row_are_kept_apart() -> None:
    layer = prepared(layer_with_convolutions(2))
    x, offset = torch.randn(1, 6, 24).to(torch.bfloat16), torch.arange(6) % 3
    two_blocks = run(layer, x, offset_R=offset)
    assert torch.equal(two_blocks, run_modules(layer, x, offset_R=offset))
    assert not torch.equal(two_blocks[:, 3:], run(layer, x)[:, 3:])


@pytest.mark.parametrize("name", LAYERS)
def test_every_part_takes_part(name: str) -> None:
    """Each weight that is changed before packing changes the flat form, too: none was forgotten or taken twice."""
    layer = prepared(LAYERS[name]())
    x = torch.randn(1, 4, layer.input_layernorm.weight.shape[0]).to(torch.bfloat16)
    y = run(layer, x)
    for part, parameter in layer.named_parameters():
        for factor, is_same in ((-0.5, False), (-2.0, True)):
            with torch.no_grad():
                parameter.mul_(factor)
            set_linear_mode(layer, "packed")
            assert torch.equal(run(layer, x), y) is is_same, part


def test_channels_that_are_turned_in_pairs_go_through_the_modules() -> None:
    layer = prepared(plain_layer())
    x = torch.randn(1, 4, 48).to(torch.bfloat16)
    assert torch.equal(run(layer, x, is_neox_style=False), run_modules(layer, x, is_neox_style=False))
    assert not torch.equal(run(layer, x, is_neox_style=False), run(layer, x))


def test_layers_that_the_flat_form_leaves_out() -> None:
    assert prepared(plain_layer(has_sink=True))._flat is None
    assert prepared(plain_layer(value_scale=0.5))._flat is None
    assert prepared(plain_layer(), "row_invariant")._flat is None
    assert prepared(layer_with_convolutions(2), "row_invariant")._flat is None
    layer = prepared(plain_layer())
    set_linear_mode(layer, "plain")
    assert layer._flat is None
    wide = plain_layer()
    set_linear_mode(wide, "packed")  # float32 has nothing to pack
    assert wide._flat is None
