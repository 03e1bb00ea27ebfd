"""Which attention a target uses over whole sequences, by the arithmetic of its linears.

B rows, T tokens of a row, L tokens of one sequence, N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from paceline.models.attends import WholeSequence
from paceline.models.layers import Attend
from paceline.models.targets.dense import DenseTarget
from paceline.ops.attention import attention_row_invariant


class RowInvariantSequences:
    """Causal attention over complete sequences in which a token's bits follow from its own sequence alone.

    Neither the width of the padded row, nor its neighbours, nor its place among packed sequences makes a difference;
    a fused kernel promises nothing of the kind. Slow: every sequence is cut into tiles of eight query rows.

    Args:
        documents_BT: int, which sequence of its row a token belongs to, -1 in padding; None takes every row for one.
    """

    def __init__(self, documents_BT: Tensor | None = None) -> None:
        self._documents = None if documents_BT is None else documents_BT.tolist()

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend within each sequence; padding gets zeros, and `layer` makes no difference."""
        assert sink_N is None, "targets have no attention sinks"
        mixed = torch.zeros_like(q_BTNH)
        for row in range(q_BTNH.shape[0]):
            for start, end in self._spans(row, q_BTNH.shape[1]):
                q, k, v = (rows[row, start:end].transpose(0, 1) for rows in (q_BTNH, k_BTMH, v_BTMH))
                visible = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).tril()
                mixed[row, start:end] = attention_row_invariant(q, k, v, visible).transpose(0, 1)
        return mixed

    def _spans(self, row: int, length: int) -> list[tuple[int, int]]:
        return [(0, length)] if self._documents is None else document_spans(self._documents[row])


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


def sequence_attend(model: DenseTarget, documents_BT: Tensor | None = None) -> Attend:
    """Attention for whole sequences that matches the arithmetic of a target's linears.

    Args:
        model: whose linear mode decides.
        documents_BT: see `RowInvariantSequences`.
    """
    if model.lm_head.mode == "row_invariant":
        return RowInvariantSequences(documents_BT)
    return WholeSequence(documents_BT)
