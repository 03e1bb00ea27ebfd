"""Attention without a cache: whole sequences, and drafter blocks over the context they were cut from.

B requests or rows, S context tokens, A blocks per row, Q rows per block, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ops.attention import attention, causal_attention


class WholeSequence:
    """Causal attention over complete, right-padded sequences: feature capture and parity tests."""

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend within each row; `layer` makes no difference."""
        assert sink_N is None, "targets have no attention sinks"
        mixed = causal_attention(q_BTNH.transpose(1, 2), k_BTMH.transpose(1, 2), v_BTMH.transpose(1, 2))
        return mixed.transpose(1, 2)


@dataclass(frozen=True)
class BlocksOverContext:
    """Drafter blocks of known sequences, all at once: keys are the context followed by every block's own rows.

    Attributes:
        context: per layer, keys and values of the context, each [B, S, M, H].
        visible: per layer, bool [B, A * Q, S + A * Q]; layers may share one tensor.
    """

    context: list[tuple[Tensor, Tensor]]
    visible: list[Tensor]

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend from the A * Q slots of each row."""
        context_k, context_v = self.context[layer]
        k = torch.cat((context_k, k_BTMH), dim=1).transpose(1, 2)
        v = torch.cat((context_v, v_BTMH), dim=1).transpose(1, 2)
        mixed = attention(q_BTNH.transpose(1, 2), k, v, visible=self.visible[layer].unsqueeze(1), sink_N=sink_N)
        return mixed.transpose(1, 2)
