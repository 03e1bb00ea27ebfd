"""A decoder layer as few launches on a GPU: what `DecoderLayer` and `ConvolvedLayer` compute, rounded less often.

With few rows a layer is five launches: heads, attention, output and residual, gates, down and residual. With more rows
products are bound by arithmetic and left to the library, and what lies between two of them is one launch. Which form
runs follows from the number of rows alone. Attention must let the layer store keys and values (`PagedAttend`).

On a CPU the operations' definitions run in the same order, for tests.

B requests, T tokens, D width, R = B * T rows, P pairs of channels that are turned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.add_norm import add_norm
from paceline.ops.gated_activation import Activation, gated_activation
from paceline.ops.linear_gated import linear_gated
from paceline.ops.linear_residual import linear_residual
from paceline.ops.paged_attention import PagedAttend
from paceline.ops.place_heads import place_heads
from paceline.ops.project_heads import Cells, HeadForm, project_heads
from paceline.ops.skinny_product import LARGEST_ROWS, new_counters

if TYPE_CHECKING:
    from paceline.models.layers import GatedMLP, RMSNorm, SelfAttention

_SILU: Final = Activation("silu")


class FusedLayer(NamedTuple):
    """Sizes and weights of a layer, in the order in which they are used: the modules' own, nothing is copied.

    Attributes:
        most_rows: up to here each product and what surrounds it are one launch.
        counters: of launches whose programs share outputs.
    """

    num_heads: int
    eps: float
    value_scale: float
    input_gain_D: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_gains: tuple[Tensor, Tensor] | None
    sink_N: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_gain_D: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    counters: Tensor
    most_rows: int = LARGEST_ROWS


def fuse(input_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP) -> FusedLayer | None:
    """The parts of a layer in one tuple; None where heads have an odd size, which leaves no pairs of channels."""
    if attention.head_size % 2:
        return None
    qk_gains = None
    if attention.q_norm is not None and attention.k_norm is not None:
        qk_gains = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    sink = attention.attention_sink_bias
    return FusedLayer(
        num_heads=attention.num_heads,
        eps=input_norm.eps,
        value_scale=attention.value_scale,
        input_gain_D=input_norm.weight.detach(),
        qkv=attention.qkv_proj.weight.detach(),
        qkv_bias=_detached(attention.qkv_proj.bias),
        qk_gains=qk_gains,
        sink_N=_detached(sink),
        o=attention.o_proj.weight.detach(),
        o_bias=_detached(attention.o_proj.bias),
        mlp_gain_D=mlp_norm.weight.detach(),
        gate_up=mlp.gate_up_proj.weight.detach(),
        gate_up_bias=_detached(mlp.gate_up_proj.bias),
        down=mlp.down_proj.weight.detach(),
        down_bias=_detached(mlp.down_proj.bias),
        counters=new_counters(input_norm.weight.device),
    )


def run_fused(
    fused: FusedLayer, x_BTD: Tensor, turns_R2P: Tensor, attend: PagedAttend, layer: int, *, is_neox_style: bool
) -> Tensor:
    """Return the residual stream after a layer, a new tensor.

    Args:
        fused: the layer.
        x_BTD: the stream before.
        turns_R2P: float32, rows of the position table for all B * T rows.
        attend: attention of the rows.
        layer: its number there.
        is_neox_style: the pairing of turned channels.
    """
    B, T, D = x_BTD.shape
    x_RD = x_BTD.reshape(B * T, D)
    form = HeadForm(fused.num_heads, fused.eps, is_neox_style, fused.value_scale)
    run = _run_few if fused.most_rows >= B * T else _run_many
    return run(fused, x_RD, turns_R2P, attend, layer, form, (B, T)).view(B, T, D)


def _run_few(
    fused: FusedLayer,
    x_RD: Tensor,
    turns_R2P: Tensor,
    attend: PagedAttend,
    layer: int,
    form: HeadForm,
    shape: tuple[int, int],
) -> Tensor:
    """Each product in one launch with what surrounds it."""
    counters, eps = fused.counters, fused.eps
    q_RNH = project_heads(
        x_RD,
        fused.qkv,
        fused.input_gain_D,
        turns_R2P,
        Cells(*attend.cells(layer)),
        form,
        bias_X=fused.qkv_bias,
        qk_gains=fused.qk_gains,
        counters=counters,
    )
    y_RX = attend.stored(layer, q_RNH.unflatten(0, shape), sink_N=fused.sink_N).flatten(2).flatten(0, 1)
    x_RD = linear_residual(y_RX, fused.o, x_RD, bias_O=fused.o_bias, counters=counters)
    y_RI = linear_gated(x_RD, fused.gate_up, fused.mlp_gain_D, eps=eps, bias_X=fused.gate_up_bias, counters=counters)
    return linear_residual(y_RI, fused.down, x_RD, bias_O=fused.down_bias, counters=counters)


def _run_many(
    fused: FusedLayer,
    x_RD: Tensor,
    turns_R2P: Tensor,
    attend: PagedAttend,
    layer: int,
    form: HeadForm,
    shape: tuple[int, int],
) -> Tensor:
    """The library's products, and one launch between two of them."""
    _, y_RD = add_norm(x_RD, None, fused.input_gain_D, eps=fused.eps)
    qkv_RX = functional.linear(y_RD, fused.qkv, fused.qkv_bias)
    q_RNH = place_heads(qkv_RX, turns_R2P, Cells(*attend.cells(layer)), form, qk_gains=fused.qk_gains)
    y_RX = attend.stored(layer, q_RNH.unflatten(0, shape), sink_N=fused.sink_N).flatten(2).flatten(0, 1)
    y_RD = functional.linear(y_RX, fused.o, fused.o_bias)
    x_RD, y_RD = add_norm(x_RD, y_RD, fused.mlp_gain_D, eps=fused.eps)
    gate_RI, up_RI = functional.linear(y_RD, fused.gate_up, fused.gate_up_bias).chunk(2, dim=-1)
    return x_RD + functional.linear(gated_activation(gate_RI, up_RI, _SILU), fused.down, fused.down_bias)


def _detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()
