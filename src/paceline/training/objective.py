"""The objective on one batch: draft every block, score the rows that count. B rows, A blocks, Q rows a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.attends import BlocksOverContext
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.ops.linear_cross_entropy import linear_cross_entropy
from paceline.training.anchors import Blocks, block_visibility
from paceline.training.selector import SelectorRows, selector_loss


@dataclass(frozen=True)
class Objective:
    """Weights of the loss terms and of the positions in a block.

    Attributes:
        kl: weight of KL(target || drafter).
        ce: weight of cross-entropy to the data's own token.
        selector: weight of a DFlash2 selector's loss, which mixes kl and ce as the drafter's own does.
        gamma: decay of row k, exp(-(k-1)/gamma); None weighs all rows alike.
        chunk_rows: rows whose logits exist at the same time.
        compiled: fuse the loss with torch.compile.
    """

    kl: float
    ce: float
    gamma: float | None
    chunk_rows: int
    compiled: bool = False
    selector: float = 1.0


class Features(NamedTuple):
    """What the frozen target contributes to a batch. B rows, S tokens, D width."""

    taps: Sequence[Tensor]  # each [B, S, D]
    hidden_BSD: Tensor  # after the final norm


class Scores(NamedTuple):
    """Sums of one batch; means are taken by whoever pools batches."""

    loss_sum: Tensor  # float32, differentiable: weighted sum over rows that count
    weight_sum: Tensor  # float32
    correct_Q: Tensor  # int64, rows whose best id (a selector's choice, where there is one) was right, by block row
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
    positions_BR = blocks.positions_BAQ.flatten(1).clamp(max=last)
    hidden: Tensor = drafter.backbone(rows, positions_BR, attend, block_rows=Q)
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
    labels_R = blocks.labels_BAQ[row, block, slot]
    hidden_RD = hidden[row, block, slot].to(head_VD.dtype)
    loss, correct_R, candidates_RC = linear_cross_entropy(
        hidden_RD,
        teacher_RD,
        labels_R,
        weights_R,
        head_VD,
        kl=objective.kl,
        ce=objective.ce,
        chunk_rows=objective.chunk_rows,
        num_candidates=drafter.num_candidates if isinstance(drafter, DFlash2Drafter) else 0,
        compiled=objective.compiled,
    )
    if isinstance(drafter, DFlash2Drafter):
        predecessors_R = blocks.labels_BAQ[row, block, slot - 1]  # row 0 is labelled with the anchor itself
        rows = SelectorRows(hidden_RD, teacher_RD, labels_R, predecessors_R, candidates_RC, weights_R)
        kl, ce = objective.kl, objective.ce
        selected, correct_R = selector_loss(drafter.candidate_selector, rows, head_VD, kl=kl, ce=ce)
        loss = loss + objective.selector * selected
    counted_Q = torch.bincount(slot, minlength=Q)
    correct_Q = torch.bincount(slot, weights=correct_R.double(), minlength=Q).long()
    # A batch without a single row still runs a backward that touches the drafter: + 0 * hidden.
    return Scores(loss + 0.0 * hidden.float().sum(), weights_R.sum(), correct_Q, counted_Q)
