"""Attention without a cache: whole sequences, and drafter blocks over the context they were cut from.

B requests or rows, S context tokens, A blocks per row, Q rows per block, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ops.attention import attention, causal_attention


def document_visibility(documents_BT: Tensor) -> Tensor:
    """Causal attention in rows of several documents: bool [B, T, T], true where a row may see a key.

    Args:
        documents_BT: int, -1 in padding; a padding row sees itself alone, so that no row is empty.
    """
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    same = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    earlier = (index_T.unsqueeze(1) >= index_T) & (documents_BT >= 0).unsqueeze(2)
    return (same & earlier) | (index_T.unsqueeze(1) == index_T)


class WholeSequence:
    """Causal attention over complete, right-padded sequences: feature capture and parity tests.

    Args:
        documents_BT: int, which sequence of its row a token belongs to, -1 in padding, where rows hold several; None
            takes every row for one.
    """

    def __init__(self, documents_BT: Tensor | None = None) -> None:
        self._visible = None if documents_BT is None else document_visibility(documents_BT).unsqueeze(1)

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend within each sequence; `layer` makes no difference."""
        assert sink_N is None, "targets have no attention sinks"
        q, k, v = (rows.transpose(1, 2) for rows in (q_BTNH, k_BTMH, v_BTMH))
        mixed = causal_attention(q, k, v) if self._visible is None else attention(q, k, v, visible=self._visible)
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
