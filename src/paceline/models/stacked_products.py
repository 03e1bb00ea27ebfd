"""Products of the same rows as one: a launch costs more than many of them take, and one long weight reads faster.

T rows, D width, S outputs of all products and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.models.layers import Linear

_MULTIPLE = 16  # of outputs: rows of the result then begin where wide loads may begin


class StackedProducts(NamedTuple):
    """Weights that lie end to end.

    Attributes:
        weight_SD: all of them, then zeros.
        sizes: outputs of each, and of the padding.
    """

    weight_SD: Tensor
    sizes: tuple[int, ...]

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Each product's part of the result, a view of one tensor; x is [..., D]."""
        return functional.linear(x_TD, self.weight_SD).split_with_sizes(self.sizes, -1)[:-1]


def stack_products(linears: Sequence[Linear]) -> StackedProducts:
    """Lay the weights of products of the same rows end to end; each weight becomes a part of the stack.

    Args:
        linears: without bias, of one width and dtype. Whoever moves them afterwards stacks them anew.
    """
    assert all(linear.bias is None for linear in linears), "a stack of biases is nobody's"
    weights = [linear.weight.detach() for linear in linears]
    padding = -sum(weight.shape[0] for weight in weights) % _MULTIPLE
    weight_SD = torch.cat([*weights, weights[0].new_zeros(padding, weights[0].shape[1])])
    sizes = (*(weight.shape[0] for weight in weights), padding)
    for linear, part in zip(linears, weight_SD.split_with_sizes(sizes), strict=False):
        linear.weight.data = part
    return StackedProducts(weight_SD, sizes)
