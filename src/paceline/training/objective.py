"""The DFlash objective on one batch: draft every block, score the rows that count. B rows, A blocks, Q rows a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.attends import BlocksOverContext
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.ops.linear_cross_entropy import linear_cross_entropy
from paceline.training.anchors import Blocks, block_visibility


@dataclass(frozen=True)
class Objective:
    """Weights of the loss terms and of the positions in a block.

    Attributes:
        kl: weight of KL(target || drafter).
        ce: weight of cross-entropy to the data's own token.
        gamma: decay of row k, exp(-(k-1)/gamma); None weighs all rows alike.
        chunk_rows: rows whose logits exist at the same time.
        compiled: fuse the loss with torch.compile.
    """

    kl: float
    ce: float
    gamma: float | None
    chunk_rows: int
    compiled: bool = False


class Features(NamedTuple):
    """What the frozen target contributes to a batch. B rows, S tokens, D width."""

    taps: Sequence[Tensor]  # each [B, S, D]
    hidden_BSD: Tensor  # after the final norm


class Scores(NamedTuple):
    """Sums of one batch; means are taken by whoever pools batches."""

    loss_sum: Tensor  # float32, differentiable: weighted sum over rows that count
    weight_sum: Tensor  # float32
    correct_Q: Tensor  # int64, rows whose best id was right, by row of the block
    counted_Q: Tensor  # int64


def position_weights(block_size: int, gamma: float | None) -> Tensor:
    """float32 [Q]: 0 for the anchor, then exp(-(k-1)/gamma)."""
    weights = [0.0] + [1.0 if gamma is None else math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    return torch.tensor(weights, dtype=torch.float32)


def draft_blocks(drafter: BlockDrafter, taps: Sequence[Tensor], block_embeddings: Tensor, blocks: Blocks) -> Tensor:
    """Run the drafter on all blocks of a batch at once, exactly as it will be served.

    Args:
        drafter: to be trained or scored.
        taps: each [B, S, D], of the whole conversations.
        block_embeddings: [B, A, Q, D], what `drafter.embed` makes of [anchor, mask, ...].
        blocks: positions and anchors.
    Returns:
        [B, A, Q, D] after the drafter's final norm.
    """
    B, A, Q = blocks.positions_BAQ.shape
    S = taps[0].shape[1]
    contract = drafter.contract
    assert contract.output_multiplier == 1.0 and not contract.final_logit_softcapping, "the loss takes raw head logits"
    features = drafter.backbone.context_features(taps)
    context = drafter.backbone.context_kv(features, torch.arange(S, device=features.device).expand(B, S))
    kinds = list(zip(contract.layer_windows, contract.layer_causal, strict=True))
    masks = {
        kind: block_visibility(blocks.anchors_BA, Q, S, window=kind[0], causal=kind[1]) for kind in dict.fromkeys(kinds)
    }
    attend = BlocksOverContext(context, [masks[kind] for kind in kinds])
    rows = block_embeddings.to(features.dtype).flatten(1, 2)
    last = drafter.backbone.position_table.shape[0] - 1
    hidden: Tensor = drafter.backbone(rows, blocks.positions_BAQ.flatten(1).clamp(max=last), attend)
    return hidden.view(B, A, Q, -1)


def score_blocks(
    drafter: BlockDrafter,
    features: Features,
    block_embeddings: Tensor,
    blocks: Blocks,
    head_VD: Tensor,
    objective: Objective,
) -> Scores:
    """Loss sums of a batch.

    The teacher of row k is the target's state one position before it, which is what predicts that row's token.
    """
    Q = blocks.positions_BAQ.shape[-1]
    hidden = draft_blocks(drafter, features.taps, block_embeddings, blocks)
    weights_Q = position_weights(Q, objective.gamma).to(hidden.device)
    row, block, slot = blocks.counts_BAQ.nonzero(as_tuple=True)
    weights_R = weights_Q[slot]
    teacher_RD = features.hidden_BSD[row, blocks.positions_BAQ[row, block, slot] - 1] if objective.kl else None
    loss, correct_R = linear_cross_entropy(
        hidden[row, block, slot].to(head_VD.dtype),
        teacher_RD,
        blocks.labels_BAQ[row, block, slot],
        weights_R,
        head_VD,
        kl=objective.kl,
        ce=objective.ce,
        chunk_rows=objective.chunk_rows,
        compiled=objective.compiled,
    )
    counted_Q = torch.bincount(slot, minlength=Q)
    correct_Q = torch.bincount(slot, weights=correct_R.double(), minlength=Q).long()
    # A batch without a single row still runs a backward that touches the drafter: + 0 * hidden.
    return Scores(loss + 0.0 * hidden.float().sum(), weights_R.sum(), correct_Q, counted_Q)
