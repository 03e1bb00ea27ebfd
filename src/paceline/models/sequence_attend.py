"""Which attention a target uses over whole sequences, by the arithmetic of its linears.

B rows, T tokens of a row, N query heads, M key/value heads, H head size; X width of a latent row and R of its latent
part, K channels of a recurrent state's key, in hybrid targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.attends import WholeSequence, document_spans, rows_of
from paceline.models.hybrid import DeltaProjections, DeltaWeights, HybridAttend, LatentHeads, convolve
from paceline.models.targets.target import Target
from paceline.ops.attention import RowTiles, attention_of_tiles, row_tiles
from paceline.ops.delta_attention import delta_attention
from paceline.ops.multi_head_latent_attention import absorbed_latent_attention


class RowInvariantSequences:
    """Causal attention over complete sequences in which a token's bits follow from its own sequence alone.

    Neither the width of the padded row, nor its neighbours, nor its place among packed sequences makes a difference;
    a fused kernel promises nothing of the kind. Slow: every sequence is cut into tiles of eight query rows.

    Args:
        documents_BT: int, which sequence of its row a token belongs to, -1 in padding; None takes every row for one.
    """

    def __init__(self, documents_BT: Tensor | None = None) -> None:
        self._documents = None if documents_BT is None else documents_BT.tolist()
        self._tiles: dict[tuple[int, int], RowTiles] = {}  # of every layer, by length and query heads per key head

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend within each sequence; padding gets zeros, and `layer` makes no difference."""
        assert sink_N is None, "targets have no attention sinks"
        mixed = torch.zeros_like(q_BTNH)
        for row in range(q_BTNH.shape[0]):
            for start, end in self._spans(row, q_BTNH.shape[1]):
                q, k, v = (rows[row, start:end].transpose(0, 1) for rows in (q_BTNH, k_BTMH, v_BTMH))
                tiles = self._causal_tiles(end - start, q_BTNH.shape[2] // k_BTMH.shape[2], q)
                mixed[row, start:end] = attention_of_tiles(q, k, v, tiles).transpose(0, 1)
        return mixed

    def latent(self, layer: int, q_BTNQ: Tensor, rows_BTX: Tensor, heads: LatentHeads) -> Tensor:
        """Attend within each sequence, absorbed, as over a cache; padding gets zeros."""
        absorbed_BTNX = heads.absorb(q_BTNQ)
        mixed_BTNR = absorbed_BTNX.new_zeros(*absorbed_BTNX.shape[:-1], heads.latent_size)
        for row in range(q_BTNQ.shape[0]):
            for start, end in self._spans(row, q_BTNQ.shape[1]):
                visible = torch.ones(end - start, end - start, dtype=torch.bool, device=q_BTNQ.device).tril()
                mixed_BTNR[row : row + 1, start:end] = absorbed_latent_attention(
                    absorbed_BTNX[row : row + 1, start:end],
                    rows_BTX[row : row + 1, start:end],
                    visible=visible[None, None],
                    value_size=heads.latent_size,
                    scale=heads.scale,
                    mode="row_invariant",
                )
        return heads.expand(mixed_BTNR)

    def delta(self, layer: int, rows: DeltaProjections, weights: DeltaWeights) -> Tensor:
        """Run each sequence from an empty state, row by row; padding gets zeros."""
        answers_BTNK = torch.zeros_like(rows.forget_BTNK)
        for row in range(rows.rows_BTC.shape[0]):
            for start, end in self._spans(row, rows.rows_BTC.shape[1]):
                inputs = convolve(rows_of(rows, row, start, end), weights)
                answers_BTNK[row, start:end] = delta_attention(inputs, weights.gate, None, form="recurrent")[0][0]
        return answers_BTNK

    def _causal_tiles(self, length: int, num_copies: int, q: Tensor) -> RowTiles:
        tiles = self._tiles.get((length, num_copies))
        if tiles is None:
            visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            tiles = self._tiles[length, num_copies] = row_tiles(visible, num_copies, q.dtype)
        return tiles

    def _spans(self, row: int, length: int) -> list[tuple[int, int]]:
        return [(0, length)] if self._documents is None else document_spans(self._documents[row])


def sequence_attend(model: Target, documents_BT: Tensor | None = None) -> HybridAttend:
    """Attention for whole sequences that matches the arithmetic of a target's linears.

    Args:
        model: whose linear mode decides.
        documents_BT: see `RowInvariantSequences`.
    """
    if model.lm_head.mode == "row_invariant":
        return RowInvariantSequences(documents_BT)
    return WholeSequence(documents_BT)
