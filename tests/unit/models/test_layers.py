"""Shared layers: fused projections in the right order, residuals, arithmetic modes, rows that do not see each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from tests.unit.models.conftest import randomise, tiny_target
from torch import Tensor

from paceline.checkpoint.contract import RopeSettings
from paceline.models.layers import (
    DecoderLayer,
    GatedMLP,
    Linear,
    LinearMode,
    RMSNorm,
    RotaryRows,
    SelfAttention,
    set_linear_mode,
)
from paceline.models.positions import position_table
from paceline.ops.linear import FILLED_ROWS, can_pack
from paceline.ops.rms_norm import rms_norm
from paceline.ops.rotary import apply_rotary, expand_rotary


class Recorder:
    """Keeps what a layer hands to attention, and answers with the queries."""

    def __call__(self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor) -> Tensor:
        self.layer, self.q, self.k, self.v = layer, q_BTNH, k_BTMH, v_BTMH
        return q_BTNH


def rotary_rows(head_size: int, num_positions: int) -> RotaryRows:
    table = position_table(RopeSettings(theta=100.0), head_size, num_positions)
    return expand_rotary(table[None], torch.float32)


def attention_layer(*, bias: bool, qk_norm: bool) -> SelfAttention:
    layer = SelfAttention(12, 4, 2, 6, eps=1e-5, bias=bias, qk_norm=qk_norm)
    randomise(layer, 0)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_rows_of_the_fused_projection_are_q_then_k_then_v(bias: bool, qk_norm: bool, is_neox_style: bool) -> None:
    layer = attention_layer(bias=bias, qk_norm=qk_norm)
    x, positions = torch.randn(2, 3, 12), torch.tensor([[4, 5, 6], [0, 1, 8]])
    table = position_table(RopeSettings(theta=100.0), 6, 9)[positions]
    attend = Recorder()
    rows = expand_rotary(table, torch.float32, is_neox_style=is_neox_style)
    y = layer(x, rows, attend, 5, is_neox_style=is_neox_style)
    weight = layer.qkv_proj.weight
    offset = layer.qkv_proj.bias if bias else torch.zeros(48)
    assert offset is not None
    q = functional.linear(x, weight[:24], offset[:24]).view(2, 3, 4, 6)
    k = functional.linear(x, weight[24:36], offset[24:36]).view(2, 3, 2, 6)
    v = functional.linear(x, weight[36:], offset[36:]).view(2, 3, 2, 6)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm.weight, eps=1e-5), rms_norm(k, layer.k_norm.weight, eps=1e-5)
    q, k = (apply_rotary(t, table, is_neox_style=is_neox_style) for t in (q, k))  # norm first, then positions
    assert attend.layer == 5
    for found, expected in ((attend.q, q), (attend.k, k), (attend.v, v)):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(y, functional.linear(q.flatten(-2), layer.o_proj.weight, layer.o_proj.bias))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_context_keys_come_from_the_same_rows_as_a_blocks_own(bias: bool, qk_norm: bool) -> None:
    layer = attention_layer(bias=bias, qk_norm=qk_norm)
    x, rows = torch.randn(2, 3, 12), rotary_rows(6, 3)
    attend = Recorder()
    layer(x, rows, attend, 0, is_neox_style=True)
    k, v = layer.context_kv(x, rows, is_neox_style=True)
    torch.testing.assert_close(k, attend.k)
    torch.testing.assert_close(v, attend.v)


def test_the_gate_is_the_first_half() -> None:
    mlp = GatedMLP(5, 7, bias=True)
    randomise(mlp, 0)
    x = torch.randn(2, 3, 5)
    weight, bias = mlp.gate_up_proj.weight, mlp.gate_up_proj.bias
    assert bias is not None
    gate, up = functional.linear(x, weight[:7], bias[:7]), functional.linear(x, weight[7:], bias[7:])
    inner = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(mlp(x), functional.linear(inner, mlp.down_proj.weight, mlp.down_proj.bias))


def decoder_layer(width: int = 40, head_size: int = 8) -> DecoderLayer:
    layer = DecoderLayer(
        hidden_size=24,
        intermediate_size=width,
        num_heads=4,
        num_kv_heads=2,
        head_size=head_size,
        eps=1e-5,
        attention_bias=False,
        mlp_bias=False,
        qk_norm=True,
    )
    randomise(layer, 0)
    return layer.requires_grad_(False)


def test_a_decoder_layer_adds_both_branches_and_leaves_its_input_alone() -> None:
    layer = decoder_layer()
    x, rows = torch.randn(1, 3, 24), rotary_rows(8, 3)
    before = x.clone()
    y = layer(x, rows, Recorder(), 0)
    assert torch.equal(x, before)
    middle = x + layer.self_attn(layer.input_layernorm(x), rows, Recorder(), 0, is_neox_style=True)
    torch.testing.assert_close(y, middle + layer.mlp(layer.post_attention_layernorm(middle)))


@pytest.mark.parametrize(("width", "head_size"), [(40, 8), (37, 6), (576, 64), (96, 22)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_invariant_layers_give_a_row_the_same_bits_alone_and_in_a_block(
    width: int, head_size: int, dtype: torch.dtype
) -> None:
    """Linear products are one part; norms, the gate and positions must not depend on the number of rows either."""
    layer = decoder_layer(width, head_size).to(dtype)
    set_linear_mode(layer, "row_invariant")
    x, table = torch.randn(1, 17, 24).to(dtype), position_table(RopeSettings(theta=100.0), head_size, 17)[None]

    def run(start: int, end: int) -> Tensor:
        return layer(x[:, start:end], expand_rotary(table[:, start:end], dtype), Recorder(), 0)

    whole = run(0, 17)
    for start, end in ((0, 1), (16, 17), (3, 11), (5, 7)):
        assert torch.equal(run(start, end), whole[:, start:end]), (start, end)


def test_modes_switch_and_count() -> None:
    target = tiny_target()
    num_linears = sum(isinstance(module, Linear) for module in target.modules())
    assert set_linear_mode(target, "row_invariant") == 0
    assert {module.mode for module in target.modules() if isinstance(module, Linear)} == {"row_invariant"}
    assert set_linear_mode(target, "packed") == 0  # float32 has nothing to pack
    packable = can_pack(torch.empty(1, 1, dtype=torch.bfloat16))
    assert set_linear_mode(target.to(torch.bfloat16), "packed") == (num_linears if packable else 0)
    assert set_linear_mode(target, "plain") == 0


@pytest.mark.parametrize("bias", [True, False])
def test_modes_agree(bias: bool) -> None:
    layer = Linear(24, 10, bias=bias)
    randomise(layer, 0)
    layer = layer.requires_grad_(False).to(torch.bfloat16)
    x = torch.randn(2, 3, 24).to(torch.bfloat16)
    results = []
    for mode in ("plain", "packed", "row_invariant"):
        layer.set_mode(mode)
        results.append(layer(x).float())
    torch.testing.assert_close(results[1], results[0], rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(results[2], results[0], rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("mode", ["plain", "packed", "row_invariant"])
def test_a_norm_is_the_same_in_every_mode_and_follows_its_gain_again_in_plain(mode: LinearMode) -> None:
    norm = RMSNorm(24, 1e-5).requires_grad_(False)
    randomise(norm, 0)
    x = torch.randn(2, 3, 24)
    before = norm(x)
    norm.set_mode(mode)
    assert torch.equal(norm(x), before)
    norm.set_mode("plain")
    norm.weight.zero_()
    assert not norm(x).any()


@pytest.mark.parametrize("mode", ["plain", "packed", "row_invariant"])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 3, 24), (2, 1, 24)])
def test_packed_products_alone_get_a_lone_row_filled_up(mode: LinearMode, shape: tuple[int, ...]) -> None:
    norm = RMSNorm(24, 1e-5).requires_grad_(False).to(torch.bfloat16)
    randomise(norm, 0)
    norm.set_mode(mode)
    x = torch.randn(shape).to(torch.bfloat16)
    is_filled = mode == "packed" and shape == (1, 1, 24) and can_pack(norm.weight)
    y = norm.filled(x)
    assert y.shape == ((1, FILLED_ROWS, 24) if is_filled else shape)
    torch.testing.assert_close(y[:, : shape[1]], norm(x))


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_layer_in_packed_arithmetic_agrees_with_the_plain_one(num_rows: int) -> None:
    """With one row, products run over more; attention has to see the one, and its residual is added to the one."""
    layer = decoder_layer().to(torch.bfloat16)
    x, rows = torch.randn(1, num_rows, 24).to(torch.bfloat16), rotary_rows(8, num_rows)
    rows = (rows[0].to(torch.bfloat16), rows[1].to(torch.bfloat16))
    expected = layer(x, rows, Recorder(), 0)
    set_linear_mode(layer, "packed")
    attend = Recorder()
    y = layer(x, rows, attend, 0)
    assert y.shape == x.shape and attend.q.shape[:2] == attend.k.shape[:2] == attend.v.shape[:2] == (1, num_rows)
    torch.testing.assert_close(y, expected, rtol=2**-5, atol=2**-5)


def test_rows_that_are_a_slice_are_multiplied_in_one_product() -> None:
    """Planted by torch itself: for rows with gaps it multiplies request by request, and reads the weight each time."""
    linear = Linear(8, 11)
    torch.nn.init.normal_(linear.weight)
    linear.weight.requires_grad_(False)  # as loaded weights are
    slice_BTD = torch.randn(3, 5, 8)[:, 1:]
    with torch.inference_mode():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as planted:
            expected = torch.nn.functional.linear(slice_BTD, linear.weight)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = linear(slice_BTD)
    assert "aten::bmm" in {entry.key for entry in planted.key_averages()}
    assert "aten::bmm" not in {entry.key for entry in profile.key_averages()}
    assert torch.allclose(found, expected)
