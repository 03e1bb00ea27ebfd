"""Fused layers of which other processes have the rest: every sublayer's output is summed before anybody reads it.

    few rows     heads, attention, product, sum, stream and norm, gates, product, sum, stream and norm
    more         the same, with the library's products and one launch between two of them

What the end of a product prepares for the next norm elsewhere has to wait here: a part of the stream has no norm. So
the launch behind each sum adds to the stream and norms it. R rows, D width, I width of a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.add_norm import add_norm
from paceline.ops.gated_activation import Activation, gated_activation
from paceline.ops.linear_gated import linear_gated
from paceline.ops.linear_residual import linear_rows
from paceline.ops.place_heads import place_heads
from paceline.ops.project_heads import project_heads

if TYPE_CHECKING:
    from paceline.models.fused_layer import FusedLayer, Pass

_SILU: Final = Activation("silu")


def run_summed(layers: Sequence[FusedLayer], x_RD: Tensor, shared: Pass) -> Iterator[Tensor]:
    """The stream after every layer, each a new tensor.

    Args:
        layers: shares, all of one size.
        x_RD: the stream before, whole.
        shared: of the pass.
    """
    is_few = layers[0].most_rows >= x_RD.shape[0]
    _, y_RD = add_norm(x_RD, None, layers[0].input_gain_D, eps=layers[0].eps)
    for index, layer in enumerate(layers):
        y_RI = shared.mixed(index, _heads(layer, y_RD, index, shared, is_few=is_few), layer)
        counters = shared.counters(layer) if is_few else None
        z_RD = _output(layer, y_RI, layer.o, layer.o_bias, counters)
        x_RD, y_RD = add_norm(x_RD, z_RD, layer.mlp_gain_D, eps=layer.eps)
        z_RD = _output(layer, _gated(layer, y_RD, counters), layer.down, layer.down_bias, counters)
        if index + 1 < len(layers):
            following = layers[index + 1]
            x_RD, y_RD = add_norm(x_RD, z_RD, following.input_gain_D, eps=following.eps)
        else:
            x_RD = x_RD + z_RD
        yield x_RD


def _heads(layer: FusedLayer, y_RD: Tensor, index: int, shared: Pass, *, is_few: bool) -> Tensor:
    cells, form = shared.cells(index), shared.form(layer)
    if not is_few:
        qkv_RX = functional.linear(y_RD, layer.qkv, layer.qkv_bias)
        return place_heads(qkv_RX, shared.turns_R2P, cells, form, qk_gains=layer.qk_gains)
    return project_heads(
        y_RD,
        None,
        layer.qkv,
        shared.turns_R2P,
        cells,
        form,
        bias_X=layer.qkv_bias,
        qk_gains=layer.qk_gains,
        counters=shared.counters(layer),
    )


def _gated(layer: FusedLayer, y_RD: Tensor, counters: Tensor | None) -> Tensor:
    if counters is not None:
        return linear_gated(y_RD, None, layer.gate_up, eps=layer.eps, bias_X=layer.gate_up_bias, counters=counters)
    gate_RI, up_RI = functional.linear(y_RD, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return gated_activation(gate_RI, up_RI, _SILU)


def _output(
    layer: FusedLayer, y_RI: Tensor, weight_DI: Tensor, bias_D: Tensor | None, counters: Tensor | None
) -> Tensor:
    """A sublayer's output, whole: the parts' sum, and then the bias; few rows have counters."""
    assert layer.total is not None, "shares of layers"
    if counters is not None:
        partial_RD = linear_rows(y_RI, weight_DI, counters=counters)
    else:
        partial_RD = functional.linear(y_RI, weight_DI)
    total_RD = layer.total(partial_RD)
    return total_RD if bias_D is None else total_RD + bias_D
