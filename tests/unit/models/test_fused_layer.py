"""The fused form of a layer against its modules, for every kind of layer and number of rows; which layers have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target
from tests.unit.models.conftest import randomise
from torch import Tensor, nn

from paceline.checkpoint.contract import ConvolutionSettings, RopeSettings
from paceline.models import fused_layer
from paceline.models.drafters.convolved_layer import ConvolvedLayer
from paceline.models.fused_layer import fuse, run_fused
from paceline.models.layers import DecoderLayer, LinearMode, SelfAttention, set_linear_mode
from paceline.models.positions import position_table
from paceline.ops.gated_product import gated_product
from paceline.ops.linear_gated import linear_gated
from paceline.ops.paged_attention import PagedAttend
from paceline.ops.rotary import expand_rotary

SHAPES = [(1, 1), (1, 5), (4, 1), (3, 6)]


class Mixes(PagedAttend):
    """Something of queries, stored keys and values and the layer's number; each row sees itself alone."""

    def __init__(self, shape: tuple[int, int], num_kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
        self.shape, self.rows_T = shape, torch.randperm(shape[0] * shape[1])
        self.planes = torch.full((2, num_kv_heads, 1, shape[0] * shape[1], head_size), torch.nan).to(dtype)
        self.sinks: list[Tensor | None] = []

    def cells(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.planes, self.rows_T

    def stored(self, layer: int, q_BTNH: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
        self.sinks.append(sink_N)
        k, v = self.planes.flatten(2, 3)[:, :, self.rows_T].transpose(1, 2).unflatten(1, self.shape).unbind(0)
        group = q_BTNH.shape[2] // k.shape[2]
        return (q_BTNH + layer) * k.repeat_interleave(group, 2) + v.repeat_interleave(group, 2)


def decoder_layer(
    *, bias: bool = False, qk_norm: bool = False, has_sink: bool = False, value_scale: float = 1.0, head_size: int = 8
) -> DecoderLayer:
    return DecoderLayer(
        hidden_size=48,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_size=head_size,
        eps=1e-5,
        attention_bias=bias,
        mlp_bias=bias,
        qk_norm=qk_norm,
        has_sink=has_sink,
        value_scale=value_scale,
    )


def layer_with_convolutions(num_taps: int) -> ConvolvedLayer:
    plain = decoder_layer(qk_norm=True)
    return ConvolvedLayer(plain, 48, ConvolutionSettings(num_taps, 6))


Layer = DecoderLayer | ConvolvedLayer
LAYERS: dict[str, Callable[[], Layer]] = {
    "plain": decoder_layer,
    "biases": lambda: decoder_layer(bias=True),
    "query and key norms": lambda: decoder_layer(qk_norm=True),
    "sinks and a value scale": lambda: decoder_layer(has_sink=True, value_scale=0.5),
    "convolutions": lambda: layer_with_convolutions(2),
    "convolutions of three taps": lambda: layer_with_convolutions(3),
}


def prepared(layer: Layer, mode: LinearMode = "fused", dtype: torch.dtype = torch.float32) -> Layer:
    randomise(layer, 3)
    layer.to(dtype).requires_grad_(False)
    set_linear_mode(layer, mode)
    return layer


def run(
    layer: Layer, x_BTD: Tensor, *, is_fused: bool, is_neox_style: bool = True, most_rows: int | None = None
) -> Tensor:
    torch.manual_seed(5)
    shape = (x_BTD.shape[0], x_BTD.shape[1])
    if most_rows is not None:
        assert layer._fused is not None
        layer._fused = layer._fused._replace(most_rows=most_rows)
    positions = torch.arange(shape[0] * shape[1]).view(shape)
    table = position_table(RopeSettings(theta=100.0), layer.self_attn.head_size, 64)
    attend = Mixes(shape, 2, layer.self_attn.head_size, x_BTD.dtype)
    turns = table[positions]
    rows = turns.flatten(0, 1) if is_fused else expand_rotary(turns, x_BTD.dtype, is_neox_style=is_neox_style)
    with torch.inference_mode():
        y: Tensor = layer(x_BTD, rows, attend, 7, is_neox_style=is_neox_style)
    return y


def assert_agree(found: Tensor, expected: Tensor) -> None:
    unit = 1e-5 if found.dtype == torch.float32 else 2**-5  # the modules round some ten times on the way
    wide = expected.float()
    torch.testing.assert_close(found.float(), wide, rtol=unit, atol=unit * float(wide.abs().max()))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most_rows", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_fused_forms_compute_what_the_modules_compute(
    name: str, shape: tuple[int, int], most_rows: int, dtype: torch.dtype
) -> None:
    layer = prepared(LAYERS[name](), dtype=dtype)
    x = torch.randn(*shape, 48).to(dtype)
    for is_neox_style in (True, False):
        expected = run(layer, x, is_fused=False, is_neox_style=is_neox_style)
        assert_agree(run(layer, x, is_fused=True, is_neox_style=is_neox_style, most_rows=most_rows), expected)
    assert not torch.allclose(run(layer, x, is_fused=True), expected, atol=1e-2) or shape == (1, 1)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("most_rows", [0, 64])
def test_every_part_takes_part(name: str, most_rows: int) -> None:
    """Each weight that changes, changes what comes out, in the fused form as well: none was forgotten."""
    layer = prepared(LAYERS[name]())
    x = torch.randn(1, 4, 48)
    y = run(layer, x, is_fused=True, most_rows=most_rows)
    for part, parameter in layer.named_parameters():
        if "sink" in part:
            continue  # handed on, see below
        with torch.no_grad():
            parameter.mul_(-0.5)
        assert not torch.allclose(run(layer, x, is_fused=True), y), part
        with torch.no_grad():
            parameter.mul_(-2.0)
        assert torch.equal(run(layer, x, is_fused=True), y), part


def test_the_row_count_alone_decides_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def counted(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        launched.append(x.shape[0])
        return linear_gated(x, *arguments, **options)

    monkeypatch.setattr(fused_layer, "linear_gated", counted)
    layer = prepared(decoder_layer())
    table = position_table(RopeSettings(theta=100.0), 8, 128)
    for rows, expected in ((64, [64]), (65, [])):
        launched.clear()
        with torch.inference_mode():
            layer(torch.randn(1, rows, 48), table[:rows], Mixes((1, rows), 2, 8, torch.float32), 0)
        assert launched == expected


@pytest.mark.parametrize("name", LAYERS)
def test_gates_in_one_launch_compute_what_the_modules_compute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As among very many rows of a large layer on a GPU; a layer with biases keeps the library's product."""
    seen: list[tuple[int, ...]] = []

    def recorded(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return gated_product(x, weight)

    monkeypatch.setattr(fused_layer, "takes_one_launch", lambda x, weight: True)
    monkeypatch.setattr(fused_layer, "gated_product", recorded)
    layer, x = prepared(LAYERS[name]()), torch.randn(3, 6, 48)
    expected = run(layer, x, is_fused=False)
    assert_agree(run(layer, x, is_fused=True, most_rows=0), expected)
    assert seen == ([] if layer.mlp.gate_up_proj.bias is not None else [(18, 48)])


@pytest.mark.parametrize("has_convolutions", [False, True])
@pytest.mark.parametrize("most_rows", [0, 64])
def test_a_chain_of_layers_is_each_after_the_other(most_rows: int, has_convolutions: bool) -> None:
    make = (
        (lambda index: layer_with_convolutions(2))
        if has_convolutions
        else lambda index: decoder_layer(qk_norm=index == 1)
    )
    layers = [prepared(make(index)) for index in range(3)]
    for index, layer in enumerate(layers):
        randomise(layer, index)
    x, turns = torch.randn(2, 3, 48), position_table(RopeSettings(theta=100.0), 8, 64)[:6]
    seen: list[tuple[int, Tensor]] = []
    forms = [layer.fused._replace(most_rows=most_rows) for layer in layers if layer.fused is not None]
    torch.manual_seed(1)
    attend = Mixes((2, 3), 2, 8, torch.float32)
    with torch.inference_mode():
        y = run_fused(forms, x, turns, attend, first_layer=4, observe=lambda at, after: seen.append((at, after)))
        for index, layer in enumerate(layers):
            x = layer(x, turns, attend, 4 + index)
            at, after = seen[index]
            assert at == index + 1
            torch.testing.assert_close(after, x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most_rows", [0, 64])
@pytest.mark.parametrize("kept", [None, {2}, {1, 3}])
def test_neither_the_stream_before_nor_what_is_kept_is_overwritten(most_rows: int, kept: set[int] | None) -> None:
    """And keeping changes nothing. Layers behind do overwrite what nobody keeps, or this test would prove nothing."""
    layers = [prepared(decoder_layer(qk_norm=True)) for _ in range(4)]
    forms = [layer.fused._replace(most_rows=most_rows) for layer in layers if layer.fused is not None]
    x, turns = torch.randn(2, 3, 48), position_table(RopeSettings(theta=100.0), 8, 64)[:6]
    before, seen, then = x.clone(), {}, {}

    def observe(at: int, after: Tensor) -> None:
        seen[at], then[at] = after, after.clone()

    torch.manual_seed(1)
    attend = Mixes((2, 3), 2, 8, torch.float32)
    with torch.inference_mode():
        unobserved = run_fused(forms, x, turns, attend)
        y = run_fused(forms, x, turns, attend, observe=observe, is_kept=None if kept is None else kept.__contains__)
    assert torch.equal(x, before) and torch.equal(y, unobserved) and torch.equal(seen[4], y)
    for at in (1, 2, 3):
        is_safe = most_rows == 64 or kept is None or at in kept
        assert torch.equal(seen[at], then[at]) == is_safe, at


def test_blocks_within_a_row_are_kept_apart() -> None:
    layer = prepared(layer_with_convolutions(2))
    x, turns = torch.randn(1, 6, 48), position_table(RopeSettings(theta=100.0), 8, 64)[:6]
    attend = Mixes((1, 6), 2, 8, torch.float32)
    assert layer.fused is not None
    with torch.inference_mode():
        offset, nudge = torch.arange(6) % 3, torch.arange(6).lt(3)[:, None]
        apart = run_fused([layer.fused], x, turns, attend, offset_R=offset)
        joined = run_fused([layer.fused], x, turns, attend)
        changed = run_fused([layer.fused], x + nudge, turns, attend, offset_R=offset)
    torch.testing.assert_close(apart[:, :3], joined[:, :3])
    assert not torch.allclose(apart[:, 3:], joined[:, 3:], atol=1e-3)
    torch.testing.assert_close(changed[:, 3:], apart[:, 3:])


def test_sinks_reach_attention() -> None:
    layer = prepared(decoder_layer(has_sink=True))
    attend = Mixes((1, 2), 2, 8, torch.float32)
    table = position_table(RopeSettings(theta=100.0), 8, 64)
    with torch.inference_mode():
        layer(torch.randn(1, 2, 48), table[:2], attend, 0)
    (sink,) = attend.sinks
    assert sink is not None and torch.equal(sink, layer.self_attn.attention_sink_bias)


def test_layers_without_pairs_of_channels_and_other_modes_have_no_fused_form() -> None:
    odd = decoder_layer()
    attention = SelfAttention(48, 4, 2, 7, eps=1e-5, bias=False, qk_norm=False)
    assert fuse(odd.input_layernorm, attention, odd.post_attention_layernorm, odd.mlp) is None
    strided = decoder_layer()
    strided.mlp.down_proj.weight = nn.Parameter(torch.empty(40, 48).T)
    assert fuse(strided.input_layernorm, strided.self_attn, strided.post_attention_layernorm, strided.mlp) is None
    for mode in ("plain", "row_invariant"):
        assert prepared(decoder_layer(), mode).fused is None  # type: ignore[arg-type]


def test_a_target_and_a_drafter_gather_the_fused_forms_of_their_layers() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target.contract)
    for model in (target, drafter.backbone):
        assert not model._fused
        set_linear_mode(model, "fused")
        assert len(model._fused) == len(model.layers)
        set_linear_mode(model, "plain")
        assert not model._fused
