"""A decoder layer as few launches on a GPU: what `DecoderLayer` and `ConvolvedLayer` compute, rounded less often.

With few rows a layer is five launches: heads, attention, output and residual, gates, down and residual. With more rows
products are bound by arithmetic and left to the library, and what lies between two of them is one launch. Which form
runs follows from the number of rows alone. Attention must let the layer store keys and values (`PagedAttend`).

On a CPU the operations' definitions run in the same order, for tests.

B requests, T tokens, D width, R = B * T rows, P pairs of channels that are turned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.add_norm import add_norm
from paceline.ops.gated_activation import Activation, gated_activation
from paceline.ops.linear_gated import linear_gated
from paceline.ops.linear_residual import linear_residual, linear_residual_scaled
from paceline.ops.paged_attention import PagedAttend
from paceline.ops.place_heads import place_heads
from paceline.ops.project_heads import Cells, HeadForm, project_heads
from paceline.ops.scale_rows import scale_rows
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
    layers: Sequence[FusedLayer],
    x_BTD: Tensor,
    turns_R2P: Tensor,
    attend: PagedAttend,
    *,
    is_neox_style: bool = True,
    first_layer: int = 0,
    observe: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Return the residual stream after layers that follow each other, a new tensor.

    Args:
        layers: at least one; what a layer leaves behind is prepared for the norm of the next.
        x_BTD: the stream before.
        turns_R2P: float32, rows of the position table for all B * T rows.
        attend: attention of the rows.
        is_neox_style: the pairing of turned channels.
        first_layer: the number of the first layer there.
        observe: called with 1 and the stream after the first layer, 2 after the second; reading changes nothing.
    """
    B, T, D = x_BTD.shape
    run = _run_few if layers[0].most_rows >= B * T else _run_many
    shared = _Pass(turns_R2P, attend, (B, T), is_neox_style, first_layer)
    for index, after_RD in enumerate(run(layers, x_BTD.reshape(B * T, D), shared)):
        x_BTD = after_RD.view(B, T, D)
        if observe is not None:
            observe(index + 1, x_BTD)
    return x_BTD


class _Pass(NamedTuple):
    """What all layers of a pass share."""

    turns_R2P: Tensor
    attend: PagedAttend
    shape: tuple[int, int]
    is_neox_style: bool
    first_layer: int

    def form(self, layer: FusedLayer) -> HeadForm:
        return HeadForm(layer.num_heads, layer.eps, self.is_neox_style, layer.value_scale)

    def cells(self, index: int) -> Cells:
        return Cells(*self.attend.cells(self.first_layer + index))

    def mixed(self, index: int, q_RNH: Tensor, layer: FusedLayer) -> Tensor:
        """[R, N * H]: attention once keys and values are stored."""
        q_BTNH = q_RNH.unflatten(0, self.shape)
        return self.attend.stored(self.first_layer + index, q_BTNH, sink_N=layer.sink_N).flatten(2).flatten(0, 1)


def _run_few(layers: Sequence[FusedLayer], x_RD: Tensor, shared: _Pass) -> Iterator[Tensor]:
    """Each product in one launch with what surrounds it; the stream after every layer."""
    rows = scale_rows(x_RD, layers[0].input_gain_D)
    for index, layer in enumerate(layers):
        counters = layer.counters
        q_RNH = project_heads(
            rows.scaled_TD,
            rows.squares_TS,
            layer.qkv,
            shared.turns_R2P,
            shared.cells(index),
            shared.form(layer),
            bias_X=layer.qkv_bias,
            qk_gains=layer.qk_gains,
            counters=counters,
        )
        y_RX = shared.mixed(index, q_RNH, layer)
        rows = linear_residual_scaled(
            y_RX, layer.o, rows.x_TD, layer.mlp_gain_D, bias_O=layer.o_bias, counters=counters
        )
        y_RI = linear_gated(
            rows.scaled_TD,
            rows.squares_TS,
            layer.gate_up,
            eps=layer.eps,
            bias_X=layer.gate_up_bias,
            counters=counters,
        )
        if index + 1 < len(layers):
            next_gain_D = layers[index + 1].input_gain_D
            rows = linear_residual_scaled(
                y_RI, layer.down, rows.x_TD, next_gain_D, bias_O=layer.down_bias, counters=counters
            )
            yield rows.x_TD
        else:
            yield linear_residual(y_RI, layer.down, rows.x_TD, bias_O=layer.down_bias, counters=counters)


def _run_many(layers: Sequence[FusedLayer], x_RD: Tensor, shared: _Pass) -> Iterator[Tensor]:
    """The library's products, and one launch between two of them; the stream after every layer."""
    _, y_RD = add_norm(x_RD, None, layers[0].input_gain_D, eps=layers[0].eps)
    for index, layer in enumerate(layers):
        qkv_RX = functional.linear(y_RD, layer.qkv, layer.qkv_bias)
        cells, form = shared.cells(index), shared.form(layer)
        q_RNH = place_heads(qkv_RX, shared.turns_R2P, cells, form, qk_gains=layer.qk_gains)
        y_RD = functional.linear(shared.mixed(index, q_RNH, layer), layer.o, layer.o_bias)
        x_RD, y_RD = add_norm(x_RD, y_RD, layer.mlp_gain_D, eps=layer.eps)
        gate_RI, up_RI = functional.linear(y_RD, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        y_RD = functional.linear(gated_activation(gate_RI, up_RI, _SILU), layer.down, layer.down_bias)
        if index + 1 < len(layers):
            x_RD, y_RD = add_norm(x_RD, y_RD, layers[index + 1].input_gain_D, eps=layers[index + 1].eps)
        else:
            x_RD = x_RD + y_RD
        yield x_RD


def _detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()
