"""DFlash2's layer: the worked example of the spec, a slow float64 twin, block borders, and planted faults."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.unit.models.conftest import drafter_contract, randomise
from torch import Tensor

from paceline.checkpoint.contract import ConvolutionSettings
from paceline.errors import ShapeError
from paceline.models.drafters.backbone import DrafterBackbone
from paceline.models.drafters.convolved_layer import ConvolvedLayer, GroupedConvolution, convolved_layer
from paceline.models.layers import RMSNorm
from paceline.ops.rotary import expand_rotary

# Spec 8.2: width 4, groups of 2, two taps, one block of 3 rows.
INPUT = torch.tensor([[[1.0, 2, 0, 1], [2, 0, 1, -1], [0, 1, 2, 0]]])
PREPARED = torch.tensor([[[1.1, 2.2, 0, 1], [2.4, 0, 1, -1.1], [0, 1, 2, 0]]])
FINISHED = torch.tensor([[[2.2, 4.4, 0, 2], [5.9, 2.2, 2.1, -3.31], [2.88, 2, 3.4, 1.1]]])


@torch.no_grad()
def worked_convolution() -> GroupedConvolution:
    convolution = GroupedConvolution(4, ConvolutionSettings(num_taps=2, group_size=2))
    for row, column, value in ((0, 0, 0.1), (3, 3, 0.1), (5, 2, 0.05), (6, 1, 0.1)):
        convolution.kernel_projection.weight[row, column] = value
    convolution.base_kernel[1, 1] = torch.tensor([0.5, 0.5, -0.5, -0.5])
    return convolution


@torch.no_grad()
def test_both_sides_of_the_worked_example_share_one_projection() -> None:
    convolution, offset = worked_convolution(), torch.arange(3)
    prepared, closing = convolution.prepare(INPUT, offset)
    torch.testing.assert_close(prepared, PREPARED)
    torch.testing.assert_close(closing, torch.tensor([[[0, 0], [0.2, 0]], [[0, 0.05], [0, 0]], [[0, 0.1], [0.1, 0]]]))
    torch.testing.assert_close(convolution.finish(prepared * 2, closing, offset), FINISHED)
    # P25: coefficients of the sublayer's output, and those of the row that is read.
    _, from_output = convolution.prepare(prepared * 2, offset)
    assert (convolution.finish(prepared * 2, from_output, offset) - FINISHED).abs().max() > 0.1
    of_source = closing.clone()
    of_source[1:, 1] = closing[:-1, 1]
    assert (convolution.finish(prepared * 2, of_source, offset) - FINISHED).abs().max() > 0.1


@torch.no_grad()
def test_a_new_convolution_hands_every_row_on_as_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        convolution = GroupedConvolution(12, ConvolutionSettings(num_taps=3, group_size=4)).to(dtype)
        x, offset = torch.randn(2, 5, 12).to(dtype), torch.arange(5).repeat(2)
        prepared, closing = convolution.prepare(x, offset)
        assert torch.equal(prepared, x)
        assert torch.equal(convolution.finish(x, closing, offset), x)


# --- a whole layer ---


def make_layer(num_taps: int = 3, group_size: int = 6) -> ConvolvedLayer:
    contract = drafter_contract(convolution=ConvolutionSettings(num_taps, group_size))
    layer = convolved_layer(contract, 0)
    assert isinstance(layer, ConvolvedLayer)
    randomise(layer, 3)
    return layer.requires_grad_(False)


def attend_to_the_block(layer: int, q: Tensor, k: Tensor, v: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
    """Full attention of each [B] row to itself, without context."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    weights = torch.einsum("btnh,bsnh->bnts", q, k).softmax(-1)
    return torch.einsum("bnts,bsnh->btnh", weights, v)


def attend_to_the_row(layer: int, q: Tensor, k: Tensor, v: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
    """Each row sees itself alone, so that only the convolution mixes rows."""
    return v.repeat_interleave(q.shape[2] // v.shape[2], 2) + q


def run_layer(layer: ConvolvedLayer, x_BQD: Tensor, attend: Any, offset_R: Tensor | None = None) -> Tensor:
    B, Q, _ = x_BQD.shape
    table = torch.stack((torch.ones(B, Q, 4), torch.zeros(B, Q, 4)), dim=2)
    y: Tensor = layer(x_BQD, expand_rotary(table, x_BQD.dtype), attend, 0, offset_R=offset_R)
    return y


def slow_side(x_QD: Tensor, source_QD: Tensor, convolution: GroupedConvolution, side: int) -> Tensor:
    """One row, channel and tap at a time; `x_QD` is what the coefficients come from."""
    weight, base = convolution.kernel_projection.weight, convolution.base_kernel
    _, num_taps, width = base.shape
    num_groups = weight.shape[0] // (2 * num_taps)
    y = torch.zeros_like(source_QD)
    for row in range(x_QD.shape[0]):
        projected = weight @ x_QD[row]
        for channel in range(width):
            group = channel * num_groups // width
            for tap in range(min(num_taps, row + 1)):
                delta = projected[side * num_taps * num_groups + tap * num_groups + group]
                y[row, channel] += (base[side, tap, channel] + delta) * source_QD[row - tap, channel]
    return y


def slow_norm(x_QD: Tensor, norm: RMSNorm) -> Tensor:
    return x_QD / (x_QD.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def slow_layer(layer: ConvolvedLayer, x_QD: Tensor, attend: Any) -> Tensor:
    """One block; attention and MLP through the modules, in float64."""
    twin = copy.deepcopy(layer).double()
    table = torch.stack((torch.ones(1, len(x_QD), 4), torch.zeros(1, len(x_QD), 4)), dim=2)
    rows = expand_rotary(table, torch.float64)
    x = x_QD.double()
    for norm, convolution, is_attention in (
        (twin.input_layernorm, twin.attention_conv, True),
        (twin.post_attention_layernorm, twin.mlp_conv, False),
    ):
        y = slow_norm(x, norm)
        z = slow_side(y, y, convolution, 0)[None]
        z = twin.self_attn(z, rows, attend, 0, is_neox_style=True) if is_attention else twin.mlp(z)
        x = x + slow_side(y, z[0], convolution, 1)
    return x


@pytest.mark.parametrize(("num_taps", "group_size"), [(2, 6), (3, 24), (1, 8), (4, 1)])
def test_a_layer_agrees_with_a_slow_float64_twin(num_taps: int, group_size: int) -> None:
    layer, x = make_layer(num_taps, group_size), torch.randn(2, 5, 24)
    found = run_layer(layer, x, attend_to_the_block)
    for block in range(2):
        slow = slow_layer(layer, x[block], attend_to_the_block)
        torch.testing.assert_close(found[block].double(), slow, rtol=1e-4, atol=1e-4)
    # The twin must be able to tell: the same layer without its convolutions is another one.
    plain = copy.deepcopy(layer)
    for convolution in (plain.attention_conv, plain.mlp_conv):
        convolution.base_kernel.zero_()[:, 0] = 1.0
        convolution.kernel_projection.weight.zero_()
    assert (run_layer(plain, x, attend_to_the_block) - found).abs().max() > 1e-2


def test_a_shorter_block_has_the_same_rows() -> None:
    layer, x = make_layer(), torch.randn(1, 6, 24)
    whole = run_layer(layer, x, attend_to_the_row)
    torch.testing.assert_close(run_layer(layer, x[:, :4], attend_to_the_row), whole[:, :4])
    assert (run_layer(layer, x[:, 2:], attend_to_the_row)[:, :2] - whole[:, 2:4]).abs().max() > 1e-2


def test_rows_of_a_neighbour_make_no_difference() -> None:
    layer, x = make_layer(), torch.randn(3, 4, 24)
    together = run_layer(layer, x, attend_to_the_row)
    other = x.clone()
    other[0] = 100.0
    assert torch.equal(run_layer(layer, other, attend_to_the_row)[1:], together[1:])
    leaking = torch.arange(12)  # P24: the block border is not known
    changed = run_layer(layer, other, attend_to_the_row, leaking) - run_layer(layer, x, attend_to_the_row, leaking)
    assert changed[1].abs().max() > 1e-2


# --- the backbone ---


def make_backbone() -> DrafterBackbone:
    contract = drafter_contract(convolution=ConvolutionSettings(num_taps=2, group_size=6))
    backbone = DrafterBackbone(contract, make_layer=convolved_layer)
    randomise(backbone, 5)
    return backbone.requires_grad_(False)


def test_blocks_side_by_side_equal_blocks_of_their_own() -> None:
    backbone, x = make_backbone(), torch.randn(2, 3, 4, 24)
    positions = torch.randint(100, (2, 3, 1)) + torch.arange(4)
    apart = backbone(x.flatten(0, 1), positions.flatten(0, 1), attend_to_the_row).view(2, 3, 4, 24)
    together = backbone(x.flatten(1, 2), positions.flatten(1), attend_to_the_row, block_rows=4).view(2, 3, 4, 24)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    for wrong in (None, 6, 2):  # P24: one block of all rows, and other lengths
        leaked = backbone(x.flatten(1, 2), positions.flatten(1), attend_to_the_row, block_rows=wrong)
        assert (leaked.view(2, 3, 4, 24) - apart).abs().max() > 1e-2
    with pytest.raises(ShapeError, match="a multiple of 5"):
        backbone(x.flatten(1, 2), positions.flatten(1), attend_to_the_row, block_rows=5)


def test_the_context_is_not_convolved() -> None:
    backbone, plain = make_backbone(), DrafterBackbone(drafter_contract())
    shared = {name: tensor for name, tensor in backbone.state_dict().items() if "_conv." not in name}
    plain.load_state_dict(shared)
    features, positions = torch.randn(5, 24), torch.arange(5)
    for (k, v), (plain_k, plain_v) in zip(
        backbone.context_kv(features, positions), plain.context_kv(features, positions), strict=True
    ):
        assert torch.equal(k, plain_k) and torch.equal(v, plain_v)
