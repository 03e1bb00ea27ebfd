"""A decoder layer through the native operations: one call where attention is native as well, else some six.

What it computes is what `DecoderLayer` and `ConvolvedLayer` compute, rounded less often.

B requests, T tokens, D width, U convolution taps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from paceline.ops.native.attention import InLayer
from paceline.ops.native.layer import LayerCall, NativeConvolution
from paceline.ops.native.rows import NativeWeight, convolve, linear, norm, turn_heads_

if TYPE_CHECKING:
    from paceline.models.layers import Attend, GatedMLP, RMSNorm, RotaryRows, SelfAttention


class NativeLayer(NamedTuple):
    """Sizes and weights of a layer, in the order in which they are used.

    Attributes:
        whole: all of it in one call.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    input_gain_D: Tensor
    qkv: NativeWeight
    qk_gains: tuple[Tensor, Tensor] | None
    o: NativeWeight
    mlp_gain_D: Tensor
    gate_up: NativeWeight
    down: NativeWeight
    whole: LayerCall
    attention_convolution: NativeConvolution | None = None
    mlp_convolution: NativeConvolution | None = None


def native_layer(
    input_norm: RMSNorm,
    attention: SelfAttention,
    mlp_norm: RMSNorm,
    mlp: GatedMLP,
    convolutions: tuple[NativeConvolution, NativeConvolution] | None = None,
) -> NativeLayer | None:
    """The parts of a layer in one tuple; None where one is not native, or has what this form leaves out.

    Args:
        input_norm: before attention.
        attention: one that is neither shared nor scaled.
        mlp_norm: before the MLP.
        mlp: a gated one.
        convolutions: around attention and around the MLP; None without them.
    """
    qkv, o = attention.qkv_proj.native, attention.o_proj.native
    gate_up, down = mlp.native_gate_up, mlp.down_proj.native
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    if attention.attention_sink_bias is not None or attention.value_scale != 1.0:
        return None
    qk_gains = None
    if attention.q_norm is not None and attention.k_norm is not None:
        qk_gains = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    gains = input_norm.weight.detach(), mlp_norm.weight.detach()
    whole = LayerCall(
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        gains=gains,
        qk_gains=qk_gains,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        eps=input_norm.eps,
        convolutions=convolutions,
    )
    around_attention, around_mlp = convolutions or (None, None)
    return NativeLayer(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        eps=input_norm.eps,
        input_gain_D=gains[0],
        qkv=qkv,
        qk_gains=qk_gains,
        o=o,
        mlp_gain_D=gains[1],
        gate_up=gate_up,
        down=down,
        whole=whole,
        attention_convolution=around_attention,
        mlp_convolution=around_mlp,
    )


def run_native(
    native: NativeLayer, x_BTD: Tensor, rows: RotaryRows, attend: Attend, layer: int, offset_R: Tensor | None = None
) -> Tensor:
    """Return the residual stream after a layer.

    Arguments are those of `DecoderLayer`, and for a layer with convolutions those of `ConvolvedLayer`; channels are
    turned in halves.
    """
    if isinstance(attend, InLayer):
        return native.whole(x_BTD, rows, attend, layer, offset_R)
    eps = native.eps
    by_kind = (native.num_heads, native.num_kv_heads, native.num_kv_heads)
    around_attention, around_mlp = native.attention_convolution, native.mlp_convolution

    if around_attention is None:
        delta = None
        qkv = linear(x_BTD, native.qkv, gain_I=native.input_gain_D, eps=eps)
    else:
        y, delta = _opened(x_BTD, native.input_gain_D, eps, around_attention, offset_R)
        qkv = linear(y, native.qkv)
    turn_heads_(
        qkv,
        rows,
        num_heads=native.num_heads,
        num_kv_heads=native.num_kv_heads,
        head_size=native.head_size,
        gains=native.qk_gains,
        eps=eps,
    )
    q, k, v = qkv.view(*qkv.shape[:2], -1, native.head_size).split_with_sizes(by_kind, -2)
    y = attend(layer, q, k, v).flatten(-2)
    if around_attention is None or delta is None:
        x_BTD = linear(y, native.o, residual_TO=x_BTD)
    else:
        x_BTD = _closed(linear(y, native.o), delta, around_attention, offset_R, x_BTD)

    if around_mlp is None:
        y = linear(x_BTD, native.gate_up, gain_I=native.mlp_gain_D, eps=eps)
        return linear(y, native.down, residual_TO=x_BTD)
    y, delta = _opened(x_BTD, native.mlp_gain_D, eps, around_mlp, offset_R)
    y = linear(linear(y, native.gate_up), native.down)
    return _closed(y, delta, around_mlp, offset_R, x_BTD)


def _opened(
    x_BTD: Tensor, gain_D: Tensor, eps: float, convolution: NativeConvolution, offset_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A sublayer's input, normed and convolved, and what its rows add to all taps."""
    y = norm(x_BTD, gain_D, eps=eps)
    delta = linear(y, convolution.projection)
    num_taps = convolution.base_UD.shape[0] // 2
    return convolve(y, convolution.base_UD, delta, first_tap=0, num_taps=num_taps, offset_T=offset_R), delta


def _closed(
    y_BTD: Tensor, delta: Tensor, convolution: NativeConvolution, offset_R: Tensor | None, x_BTD: Tensor
) -> Tensor:
    """A sublayer's output, convolved and added to the stream."""
    num_taps = convolution.base_UD.shape[0] // 2
    base_UD = convolution.base_UD
    return convolve(y_BTD, base_UD, delta, first_tap=num_taps, num_taps=num_taps, offset_T=offset_R, residual_TD=x_BTD)
