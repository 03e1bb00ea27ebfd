"""A decoder layer as one tuple and one function: what `DecoderLayer` and `ConvolvedLayer` compute, to the bit, once
their products are packed.

A decode step on a CPU streams all weights through the caches, so whatever is touched between two products comes from
far away each time. Modules within modules, their attributes and the frames of their calls took 5 % of a plain step.

B requests, T tokens, D width, R = B * T rows, U convolution taps, G groups of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.grouped_convolution import convolution_factors, convolve
from paceline.ops.linear import linear_packed
from paceline.ops.rms_norm import MirroredGain, rms_norm_mirrored
from paceline.ops.rotary import turn_heads

if TYPE_CHECKING:
    from paceline.models.layers import Attend, GatedMLP, RMSNorm, RotaryRows, SelfAttention


class FlatConvolution(NamedTuple):
    """Both sides of a `GroupedConvolution`.

    Attributes:
        projection: packed; gives what a row adds to the taps of both.
        base_UD: float32, the taps before the sublayer, then as many behind it.
    """

    projection: Tensor
    base_UD: Tensor


class FlatLayer(NamedTuple):
    """Sizes and weights of a layer, in the order in which they are used.

    Weights are packed. A norm before a product has two gains, the second for a lone row, which is filled up.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    eps: float
    input_gain: MirroredGain
    filling_input_gain: MirroredGain
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_gains: tuple[MirroredGain, MirroredGain] | None
    o: Tensor
    o_bias: Tensor | None
    mlp_gain: MirroredGain
    filling_mlp_gain: MirroredGain
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attention_convolution: FlatConvolution | None = None
    mlp_convolution: FlatConvolution | None = None


def flatten(input_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP) -> FlatLayer | None:
    """The parts of a layer in one tuple; None where one is not packed, or has what the flat form leaves out."""
    qkv, o = attention.qkv_proj.packed, attention.o_proj.packed
    gate_up, down = mlp.gate_up_proj.packed, mlp.down_proj.packed
    input_gains, mlp_gains = input_norm.gains, mlp_norm.gains
    if qkv is None or o is None or gate_up is None or down is None or input_gains is None or mlp_gains is None:
        return None
    if attention.attention_sink_bias is not None or attention.value_scale != 1.0:
        return None
    qk_gains = None
    if attention.q_norm is not None and attention.k_norm is not None:
        q_gains, k_gains = attention.q_norm.gains, attention.k_norm.gains
        if q_gains is None or k_gains is None:
            return None
        qk_gains = q_gains[0], k_gains[0]
    return FlatLayer(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        intermediate_size=mlp.intermediate_size,
        eps=input_norm.eps,
        input_gain=input_gains[0],
        filling_input_gain=input_gains[1],
        qkv=qkv,
        qkv_bias=attention.qkv_proj.bias,
        qk_gains=qk_gains,
        o=o,
        o_bias=attention.o_proj.bias,
        mlp_gain=mlp_gains[0],
        filling_mlp_gain=mlp_gains[1],
        gate_up=gate_up,
        gate_up_bias=mlp.gate_up_proj.bias,
        down=down,
        down_bias=mlp.down_proj.bias,
    )


def run_flat(
    flat: FlatLayer, x_BTD: Tensor, rows: RotaryRows, attend: Attend, layer: int, offset_R: Tensor | None = None
) -> Tensor:
    """Return the residual stream after a layer.

    Arguments are those of `DecoderLayer`, and for a layer with convolutions those of `ConvolvedLayer`; channels are
    turned in halves.
    """
    B, T, _ = x_BTD.shape
    eps, qk_gains = flat.eps, flat.qk_gains
    by_kind = (flat.num_heads, flat.num_kv_heads)
    around_attention, around_mlp = flat.attention_convolution, flat.mlp_convolution
    fills = B * T == 1 and around_attention is None  # a convolution would take copies for rows of the block
    closing: Sequence[Tensor] = ()

    y = rms_norm_mirrored(x_BTD, flat.filling_input_gain, eps=eps) if fills else _normed(x_BTD, flat.input_gain, eps)
    if around_attention is not None:
        opening, closing = _factors(around_attention, y)
        y = convolve(y, opening, offset_R)
    heads = linear_packed(y, flat.qkv, flat.qkv_bias).narrow(1, 0, T).view(B, T, -1, flat.head_size)
    qk, v = heads.split_with_sizes((by_kind[0] + by_kind[1], by_kind[1]), -2)
    if qk_gains is not None:
        q, k = qk.split_with_sizes(by_kind, -2)
        qk = torch.cat((_normed(q, qk_gains[0], eps), _normed(k, qk_gains[1], eps)), dim=-2)
    q, k = turn_heads(qk, rows).split_with_sizes(by_kind, -2)
    y = linear_packed(attend(layer, q, k, v).flatten(-2), flat.o, flat.o_bias)
    if around_attention is not None:
        y = convolve(y, closing, offset_R)
    x_BTD = x_BTD + y

    y = rms_norm_mirrored(x_BTD, flat.filling_mlp_gain, eps=eps) if fills else _normed(x_BTD, flat.mlp_gain, eps)
    if around_mlp is not None:
        opening, closing = _factors(around_mlp, y)
        y = convolve(y, opening, offset_R)
    gate, up = linear_packed(y, flat.gate_up, flat.gate_up_bias).split_with_sizes(2 * (flat.intermediate_size,), -1)
    y = linear_packed(functional.silu(gate) * up, flat.down, flat.down_bias).narrow(1, 0, T)
    if around_mlp is not None:
        y = convolve(y, closing, offset_R)
    return x_BTD + y


def _normed(rows: Tensor, gain: MirroredGain, eps: float) -> Tensor:
    return rms_norm_mirrored(rows.unsqueeze(-2), gain, eps=eps).select(-2, 0)


def _factors(convolution: FlatConvolution, x_BTD: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What rows are multiplied with before and behind a sublayer of this input."""
    projection, base_UD = convolution
    num_taps = base_UD.shape[0]
    delta_RUG = linear_packed(x_BTD, projection, None).view(x_BTD.shape[0] * x_BTD.shape[1], num_taps, -1)
    factors = convolution_factors(base_UD, delta_RUG)
    return factors[: num_taps // 2], factors[num_taps // 2 :]
