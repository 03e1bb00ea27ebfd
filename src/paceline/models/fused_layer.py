"""A decoder layer as few launches on a GPU: what `DecoderLayer` and `ConvolvedLayer` compute, rounded less often.

With few rows a layer is five launches: heads, attention, output and residual, gates, down and residual. With more rows
products are bound by arithmetic and left to the library, which adds to the stream in the two that end a sublayer; what
lies between two products is one launch. Which form runs follows from the number of rows alone. Attention must let the
layer store keys and values (`PagedAttend`).

On a CPU the operations' definitions run in the same order, for tests.

B requests, T tokens, D width, R = B * T rows, P pairs of channels that are turned, U convolution taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.models.summed_layer import run_summed
from paceline.ops.add_norm import add_norm
from paceline.ops.convolved_residual import convolved_residual
from paceline.ops.gated_activation import Activation, gated_activation
from paceline.ops.gated_product import gated_product, takes_one_launch
from paceline.ops.grouped_convolution import grouped_convolution
from paceline.ops.heads import Cells, HeadForm
from paceline.ops.linear_gated import linear_gated
from paceline.ops.linear_residual import linear_residual, linear_residual_scaled, linear_rows
from paceline.ops.paged_attention import PagedAttend
from paceline.ops.place_heads import place_heads
from paceline.ops.project_heads import project_heads
from paceline.ops.scale_rows import scale_rows
from paceline.ops.skinny_launch import new_counters
from paceline.ops.skinny_product import ScaledRows
from paceline.ops.skinny_tile import LARGEST_ROWS

if TYPE_CHECKING:
    from paceline.models.layers import GatedMLP, RMSNorm, SelfAttention

_SILU: Final = Activation("silu")
_SMALL_BYTES: Final = 16_000_000  # of the gate and up projections
_ROWS_OF_LARGE: Final = 16


class FusedConvolution(NamedTuple):
    """Both sides of a `GroupedConvolution`.

    Attributes:
        projection: gives what a row adds to the taps of both.
        opening_UD: the taps before the sublayer.
        closing_UD: the taps behind it.
    """

    projection: Tensor
    opening_UD: Tensor
    closing_UD: Tensor


class FusedLayer(NamedTuple):
    """Sizes and weights of a layer, in the order in which they are used: the modules' own, nothing is copied.

    Attributes:
        most_rows: up to here each product and what surrounds it are one launch (`most_fused_rows`).
        counters: of launches whose programs share outputs, where a pass has none of its own (`PagedAttend.counters`).
        attention_convolution: around attention; either both sublayers have one or none has.
        mlp_convolution: around the MLP.
        total: where a layer is shared out, what makes a whole of this part's output of a sublayer, before its bias.
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
    attention_convolution: FusedConvolution | None = None
    mlp_convolution: FusedConvolution | None = None
    total: Callable[[Tensor], Tensor] | None = None


def most_fused_rows(gate_up: Tensor) -> int:
    """Up to how many rows a layer with this weight is faster in five launches than with the library's products.

    Measured (`benchmarks/gpu_layers --operations stack`): layers of the 135M shape up to 64, of the 8B shape up to 16.
    """
    return LARGEST_ROWS if gate_up.numel() * gate_up.element_size() <= _SMALL_BYTES else _ROWS_OF_LARGE


def fuse(input_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP) -> FusedLayer | None:
    """The parts of a layer in one tuple; None where heads have an odd size, or a weight is no plain block of memory."""
    weights = (part.weight for part in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj))
    if attention.head_size % 2 or not all(weight.is_contiguous() for weight in weights):
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
        most_rows=most_fused_rows(mlp.gate_up_proj.weight),
    )


def run_fused(
    layers: Sequence[FusedLayer],
    x_BTD: Tensor,
    turns_R2P: Tensor,
    attend: PagedAttend,
    *,
    is_neox_style: bool = True,
    first_layer: int = 0,
    offset_R: Tensor | None = None,
    observe: Callable[[int, Tensor], None] | None = None,
    is_kept: Callable[[int], bool] | None = None,
    prepared: ScaledRows | None = None,
) -> Tensor:
    """Return the residual stream after layers that follow each other, a new tensor.

    Args:
        layers: at least one; what a layer leaves behind is prepared for the norm of the next.
        x_BTD: the stream before.
        turns_R2P: float32, rows of the position table for all B * T rows.
        attend: attention of the rows.
        is_neox_style: the pairing of turned channels.
        first_layer: the number of the first layer there.
        offset_R: int64, each row's index in its own block, for convolutions; None where each [B] row is one.
        observe: called with 1 and the stream after the first layer, 2 after the second; reading changes nothing.
        is_kept: whether what `observe` is told with this number will be read after it returned; all of them, if it is
            not said. Other streams are overwritten by the layer behind.
        prepared: the stream before, prepared for the first norm, if somebody did that already.
    """
    B, T, D = x_BTD.shape
    run = _run_few if layers[0].most_rows >= B * T else _run_many
    if layers[0].total is not None:
        run = run_summed
    if layers[0].attention_convolution is not None:
        run = _run_convolved
        if offset_R is None:
            offset_R = torch.arange(T, device=x_BTD.device).repeat(B)
    kept = frozenset[int]() if observe is None else frozenset(filter(is_kept or bool, range(1, len(layers) + 1)))
    shared = Pass(turns_R2P, attend, (B, T), is_neox_style, first_layer, offset_R, prepared, kept)
    for index, after_RD in enumerate(run(layers, x_BTD.reshape(B * T, D), shared)):
        x_BTD = after_RD.view(B, T, D)
        if observe is not None:
            observe(index + 1, x_BTD)
    return x_BTD


class Pass(NamedTuple):
    """What all layers of a pass share."""

    turns_R2P: Tensor
    attend: PagedAttend
    shape: tuple[int, int]
    is_neox_style: bool
    first_layer: int
    offset_R: Tensor | None
    prepared: ScaledRows | None
    kept: frozenset[int]

    def form(self, layer: FusedLayer) -> HeadForm:
        return HeadForm(layer.num_heads, layer.eps, self.is_neox_style, layer.value_scale)

    def counters(self, layer: FusedLayer) -> Tensor:
        """Zeros for launches whose programs share outputs."""
        own = self.attend.counters
        return layer.counters if own is None else own

    def cells(self, index: int) -> Cells:
        return Cells(*self.attend.cells(self.first_layer + index))

    def mixed(self, index: int, q_RNH: Tensor, layer: FusedLayer) -> Tensor:
        """[R, N * H]: attention once keys and values are stored."""
        q_BTNH = q_RNH.unflatten(0, self.shape)
        return self.attend.stored(self.first_layer + index, q_BTNH, sink_N=layer.sink_N).flatten(2).flatten(0, 1)


def _run_few(layers: Sequence[FusedLayer], x_RD: Tensor, shared: Pass) -> Iterator[Tensor]:
    """Each product in one launch with what surrounds it; the stream after every layer."""
    rows = shared.prepared or scale_rows(x_RD, layers[0].input_gain_D)
    for index, layer in enumerate(layers):
        counters = shared.counters(layer)
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


def _run_many(layers: Sequence[FusedLayer], x_RD: Tensor, shared: Pass) -> Iterator[Tensor]:
    """The library's products, and one launch between two of them; the stream after every layer.

    The stream is one tensor, which the products of a layer add to where it lies. So the first norm copies what was
    handed in, and the norm behind a layer what somebody keeps.
    """
    x_RD, y_RD = add_norm(x_RD, None, layers[0].input_gain_D, eps=layers[0].eps, copies=True)
    for index, layer in enumerate(layers):
        qkv_RX = functional.linear(y_RD, layer.qkv, layer.qkv_bias)
        cells, form = shared.cells(index), shared.form(layer)
        q_RNH = place_heads(qkv_RX, shared.turns_R2P, cells, form, qk_gains=layer.qk_gains)
        _add_product(x_RD, shared.mixed(index, q_RNH, layer), layer.o, layer.o_bias)
        _, y_RD = add_norm(x_RD, None, layer.mlp_gain_D, eps=layer.eps)
        _add_product(x_RD, _activated(y_RD, layer), layer.down, layer.down_bias)
        after_RD = x_RD
        if index + 1 < len(layers):
            following = layers[index + 1]
            copies = index + 1 in shared.kept
            x_RD, y_RD = add_norm(x_RD, None, following.input_gain_D, eps=following.eps, copies=copies)
        yield after_RD


def _activated(y_RD: Tensor, layer: FusedLayer) -> Tensor:
    if layer.gate_up_bias is None and takes_one_launch(y_RD, layer.gate_up):
        return gated_product(y_RD, layer.gate_up)
    gate_RI, up_RI = functional.linear(y_RD, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return gated_activation(gate_RI, up_RI, _SILU)


def _add_product(x_RD: Tensor, y_RI: Tensor, weight_DI: Tensor, bias_D: Tensor | None) -> None:
    """Add a product to the stream in place; without a bias the sum is rounded once, and costs no pass of its own."""
    if bias_D is None:
        x_RD.addmm_(y_RI, weight_DI.t())
    else:
        x_RD.add_(functional.linear(y_RI, weight_DI, bias_D))


def _run_convolved(layers: Sequence[FusedLayer], x_RD: Tensor, shared: Pass) -> Iterator[Tensor]:
    """Layers with convolutions around both sublayers, which need the normed rows themselves."""
    is_few = layers[0].most_rows >= x_RD.shape[0]
    _, y_RD = add_norm(x_RD, None, layers[0].input_gain_D, eps=layers[0].eps)
    for index, layer in enumerate(layers):
        eps, counters = layer.eps, shared.counters(layer)
        around, form, cells = layer.attention_convolution, shared.form(layer), shared.cells(index)
        product = partial(_product, is_few=is_few, counters=counters)
        y_RD, close = _opened(y_RD, around, shared.offset_R, product)
        if is_few:
            q_RNH = project_heads(
                y_RD,
                None,
                layer.qkv,
                shared.turns_R2P,
                cells,
                form,
                bias_X=layer.qkv_bias,
                qk_gains=layer.qk_gains,
                counters=counters,
            )
        else:
            qkv_RX = functional.linear(y_RD, layer.qkv, layer.qkv_bias)
            q_RNH = place_heads(qkv_RX, shared.turns_R2P, cells, form, qk_gains=layer.qk_gains)
        y_RD = product(shared.mixed(index, q_RNH, layer), layer.o, layer.o_bias)
        x_RD, y_RD = close(y_RD, x_RD, layer.mlp_gain_D, eps=eps)
        y_RD, close = _opened(y_RD, layer.mlp_convolution, shared.offset_R, product)
        if is_few:
            y_RI = linear_gated(y_RD, None, layer.gate_up, eps=eps, bias_X=layer.gate_up_bias, counters=counters)
        else:
            y_RI = _activated(y_RD, layer)
        y_RD = product(y_RI, layer.down, layer.down_bias)
        following = layers[index + 1] if index + 1 < len(layers) else None
        x_RD, y_RD = close(y_RD, x_RD, None if following is None else following.input_gain_D, eps=eps)
        yield x_RD


def _product(x_RI: Tensor, weight: Tensor, bias: Tensor | None, *, is_few: bool, counters: Tensor) -> Tensor:
    if is_few:
        return linear_rows(x_RI, weight, bias_O=bias, counters=counters)
    return functional.linear(x_RI, weight, bias)


def _opened(
    y_RD: Tensor, around: FusedConvolution | None, offset_R: Tensor | None, product: Callable[..., Tensor]
) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor]]]:
    """A sublayer's normed input, convolved; and what convolves its output and adds it to the stream."""
    assert around is not None and offset_R is not None, "both sublayers have a convolution"
    num_taps = around.opening_UD.shape[0]
    delta_R2UG = product(y_RD, around.projection, None).unflatten(-1, (2, num_taps, -1))
    opening_RUG, closing_RUG = delta_R2UG.unbind(1)
    opened_RD = grouped_convolution(y_RD, around.opening_UD, opening_RUG, offset_R)

    def close(z_RD: Tensor, x_RD: Tensor, gain_D: Tensor | None, *, eps: float) -> tuple[Tensor, Tensor]:
        return convolved_residual(z_RD, around.closing_UD, closing_RUG, offset_R, x_RD, gain_D, eps=eps)

    return opened_RD, close


def _detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()
