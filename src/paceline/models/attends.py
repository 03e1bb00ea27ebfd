"""Attention without a cache: whole sequences, and drafter blocks over the context they were cut from.

B requests or rows, S context tokens, A blocks per row, Q rows per block, N query heads, M key/value heads, H head size;
X width of a latent row and K channels of a recurrent state's key, in hybrid targets.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.hybrid import DeltaProjections, DeltaWeights, LatentHeads, convolve
from paceline.ops.attention import attention, causal_attention
from paceline.ops.delta_attention import delta_attention
from paceline.ops.multi_head_latent_attention import explicit_latent_attention


def document_visibility(documents_BT: Tensor) -> Tensor:
    """Causal attention in rows of several documents: bool [B, T, T], true where a row may see a key.

    Args:
        documents_BT: int, -1 in padding; a padding row sees itself alone, so that no row is empty.
    """
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    same = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    earlier = (index_T.unsqueeze(1) >= index_T) & (documents_BT >= 0).unsqueeze(2)
    return (same & earlier) | (index_T.unsqueeze(1) == index_T)


def document_spans(documents: list[int]) -> list[tuple[int, int]]:
    """Where the sequences of one row lie, as (start, end), from the number that each of its tokens carries.

    Args:
        documents: which sequence a token belongs to; -1 in padding, which is no sequence.
    """
    spans, start = [], 0
    for document, run in itertools.groupby(documents):
        end = start + sum(1 for _ in run)
        if document >= 0:
            spans.append((start, end))
        start = end
    return spans


class WholeSequence:
    """Causal attention over complete, right-padded sequences: feature capture and parity tests.

    Of hybrid targets, latent rows are expanded into keys and values, and recurrences start from zero in every sequence
    and run in chunks.

    Args:
        documents_BT: int, which sequence of its row a token belongs to, -1 in padding, where rows hold several; None
            takes every row for one.
    """

    def __init__(self, documents_BT: Tensor | None = None) -> None:
        self._documents_BT = documents_BT
        self._visible = None if documents_BT is None else document_visibility(documents_BT).unsqueeze(1)

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend within each sequence; `layer` makes no difference."""
        assert sink_N is None, "targets have no attention sinks"
        q, k, v = (rows.transpose(1, 2) for rows in (q_BTNH, k_BTMH, v_BTMH))
        mixed = causal_attention(q, k, v) if self._visible is None else attention(q, k, v, visible=self._visible)
        return mixed.transpose(1, 2)

    def latent(self, layer: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        """Attend within each sequence; `layer` makes no difference."""
        return explicit_latent_attention(q_BTNQ, rows_BTX, heads.key_NPR, heads.value_NVR, visible=self._visible)

    def delta(self, layer: int, rows: DeltaProjections, weights: DeltaWeights) -> Tensor:
        """Run each sequence from an empty state; `layer` makes no difference."""
        if self._documents_BT is None:
            return delta_attention(convolve(rows, weights), weights.gate, None, form="chunked")[0]
        answers_BTNK = torch.zeros_like(rows.forget_BTNK)
        for row, documents in enumerate(self._documents_BT.tolist()):
            for start, end in document_spans(documents):
                inputs = convolve(rows_of(rows, row, start, end), weights)
                answers_BTNK[row, start:end] = delta_attention(inputs, weights.gate, None, form="chunked")[0][0]
        return answers_BTNK


def rows_of(rows: DeltaProjections, row: int, start: int, end: int) -> DeltaProjections:
    """One sequence of a padded row, as a batch of one."""
    return DeltaProjections(*(part[row : row + 1, start:end] for part in rows))


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
