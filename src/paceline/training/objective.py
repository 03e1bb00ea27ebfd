"""The objective on one batch: score every draft that counts. B rows, S tokens, A blocks, K drafts of a block, D width.

How a family comes from features to the states that are scored is its own matter (`draft_blocks` here, `eagle3.py`);
what a family adds to the loss of those states is too (`selector.py`, `dspark.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.attends import BlocksOverContext
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.table import Drafter
from paceline.ops.linear_cross_entropy import LowRankBias, linear_cross_entropy
from paceline.training.anchors import Blocks, block_visibility
from paceline.training.dspark import confidence_loss, markov_codes
from paceline.training.flex_attend import FlexBlocks, FlexBlocksOverContext
from paceline.training.position_weighting import adaptive_weights, label_cross_entropy
from paceline.training.selector import SelectorRows, selector_loss


@dataclass(frozen=True)
class Objective:
    """Weights of the loss terms and of the positions in a block.

    Attributes:
        kl: weight of KL(target || drafter).
        ce: weight of cross-entropy to the data's own token.
        gamma: decay of draft k, exp(-(k-1)/gamma); None weighs all drafts alike.
        chunk_rows: rows whose logits exist at the same time.
        compiled: fuse the loss with torch.compile.
        selector: weight of a DFlash2 selector's loss, which mixes kl, ce and l1 as the drafter's own does.
        l1: weight of sum |p - q|, twice the share of drafts that sampling would refuse.
        confidence: weight of a DSpark confidence head's loss, which trains that head alone.
        is_adaptive: weigh drafts by how far the drafter gets instead, by `position_weighting.py`; gamma then weighs
            the confidence alone.
    """

    kl: float
    ce: float
    gamma: float | None
    chunk_rows: int
    compiled: bool = False
    selector: float = 1.0
    l1: float = 0.0
    confidence: float = 1.0
    is_adaptive: bool = False

    def denominators(self, block_size: int) -> Tensor:
        """float32 [Q]: what a draft that counts adds to the number that a step divides its loss by.

        Adaptive weights move with the drafter, so drafts are counted instead.
        """
        return position_weights(block_size, None if self.is_adaptive else self.gamma)


class Features(NamedTuple):
    """What the frozen target contributes to a batch. B rows, S tokens, D width."""

    taps: Sequence[Tensor]  # each [B, S, D]
    hidden_BSD: Tensor  # after the final norm


class Scores(NamedTuple):
    """Sums of one batch; means are taken by whoever pools batches. Row 0 of a block, the anchor, is never counted."""

    loss_sum: Tensor  # float32, differentiable: weighted sum over rows that count
    weight_sum: Tensor  # float32, what the loss is to be divided by
    correct_Q: Tensor  # int64, rows whose best id (a selector's choice, where there is one) was right, by block row
    counted_Q: Tensor  # int64


class DraftRows(NamedTuple):
    """The drafts that count, of all blocks, one after another. R rows, D width."""

    hidden_RD: Tensor  # states that the head reads, in the head's dtype
    teacher_RD: Tensor  # the target's states that predict the same tokens
    labels_R: Tensor  # int64
    previous_R: Tensor  # int64, the token before each label; the anchor for a block's first draft
    weights_R: Tensor  # float32 position weights
    place: tuple[Tensor, Tensor, Tensor]  # conversation, block and draft of each row, the first draft being 0


def position_weights(block_size: int, gamma: float | None) -> Tensor:
    """float32 [Q]: 0 for the anchor, then exp(-(k-1)/gamma) for draft k."""
    weights = [0.0] + [1.0 if gamma is None else math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    return torch.tensor(weights, dtype=torch.float32)


def draft_blocks(
    drafter: BlockDrafter,
    taps: Sequence[Tensor],
    block_embeddings: Tensor,
    blocks: Blocks,
    flex: FlexBlocks | None = None,
) -> Tensor:
    """Run a block drafter on all blocks of a batch at once, exactly as it will be served.

    Args:
        drafter: to be trained or scored.
        taps: each [B, S, D], of the whole conversations.
        block_embeddings: [B, A, Q, D], what `drafter.embed` makes of [anchor, mask, ...]; with the layout
            anchor_sampling one row less than `blocks` has.
        blocks: positions and anchors; in packed rows, also where conversations lie.
        flex: attend by flex attention; None takes dense masks.
    Returns:
        [B, A, Q, D] after the drafter's final norm.
    """
    B, A, Q = block_embeddings.shape[:3]
    S = taps[0].shape[1]
    contract = drafter.contract
    features = drafter.backbone.context_features(taps)
    packing = blocks.packing
    positions_BS = torch.arange(S, device=features.device).expand(B, S) if packing is None else packing.positions_BS
    context = drafter.backbone.context_kv(features, positions_BS)
    documents_BS = None if packing is None else packing.documents_BS
    kinds = list(zip(contract.layer_windows, contract.layer_causal, strict=True))
    attend: BlocksOverContext | FlexBlocksOverContext
    if flex is None:
        masks = {
            kind: block_visibility(blocks.anchors_BA, Q, S, window=kind[0], causal=kind[1], documents_BS=documents_BS)
            for kind in dict.fromkeys(kinds)
        }
        attend = BlocksOverContext(context, [masks[kind] for kind in kinds])
    else:
        attend = flex.over_context(context, kinds, blocks.anchors_BA, Q, documents_BS)
    rows = block_embeddings.to(features.dtype).flatten(1, 2)
    last = drafter.backbone.position_table.shape[0] - 1
    positions_BR = blocks.positions_BAQ[..., :Q].flatten(1).clamp(max=last)
    hidden: Tensor = drafter.backbone(rows, positions_BR, attend, block_rows=Q)
    return hidden.view(B, A, Q, -1)


def only_drafted(blocks: Blocks, drafter: Drafter) -> Blocks:
    """The same blocks without the rows whose label a drafter of few ids cannot draft."""
    target_ids_V = drafter.vocabulary.target_ids_V
    if target_ids_V is None:
        return blocks
    draft_ids = _draft_ids(target_ids_V, drafter.contract.target_vocab_size)
    return replace(blocks, counts_BAQ=blocks.counts_BAQ & (draft_ids[blocks.labels_BAQ] >= 0))


def score_drafts(
    drafter: Drafter, hidden_BAKD: Tensor, features: Features, blocks: Blocks, head_VD: Tensor, objective: Objective
) -> Scores:
    """Loss sums of a batch.

    The teacher of draft k is the target's state one position before it, which is what predicts that token.

    Args:
        drafter: its heads take part, if it has any.
        hidden_BAKD: the state behind every draft.
        features: of the target.
        blocks: labels and marks; `only_drafted` for a drafter of few ids.
        head_VD: the target's head.
        objective: weights.
    """
    contract, vocabulary = drafter.contract, drafter.vocabulary
    assert contract.output_multiplier == 1.0 and not contract.final_logit_softcapping, "the loss takes raw head logits"
    rows = _rows(hidden_BAKD.to(head_VD.dtype), features, blocks, objective)
    labels_R, student_head_VD, teacher_head_VD = rows.labels_R, head_VD, head_VD
    if vocabulary.lm_head is not None:
        student_head_VD = vocabulary.lm_head.weight.to(head_VD.dtype)
    if vocabulary.target_ids_V is not None:
        teacher_head_VD = head_VD[vocabulary.target_ids_V]
        labels_R = _draft_ids(vocabulary.target_ids_V, contract.target_vocab_size)[labels_R]
    confidence_head = drafter.confidence_head if isinstance(drafter, DSparkDrafter) else None
    bias, weights_R = _markov_bias(drafter, hidden_BAKD, blocks, rows), rows.weights_R
    if objective.is_adaptive:
        losses_R = label_cross_entropy(
            rows.hidden_RD, labels_R, student_head_VD, bias=bias, chunk_rows=objective.chunk_rows
        )
        weights_R = _adaptive_weights(losses_R, rows, blocks)
    found = linear_cross_entropy(
        rows.hidden_RD,
        rows.teacher_RD,
        labels_R,
        weights_R,
        student_head_VD,
        kl=objective.kl,
        ce=objective.ce,
        l1=objective.l1,
        bias=bias,
        teacher_head_VD=teacher_head_VD,
        chunk_rows=objective.chunk_rows,
        num_candidates=drafter.num_candidates if isinstance(drafter, DFlash2Drafter) else 0,
        wants_acceptance=confidence_head is not None,
        compiled=objective.compiled,
    )
    loss, correct_R = found.loss, found.correct_R
    if isinstance(drafter, DFlash2Drafter):
        chosen = SelectorRows(
            rows.hidden_RD,
            rows.teacher_RD,
            rows.labels_R,
            rows.previous_R,
            found.candidates_RC,
            weights_R,
            found.teacher_log_sum_R,
        )
        kl, ce, l1 = objective.kl, objective.ce, objective.l1
        selected, correct_R = selector_loss(drafter.candidate_selector, chosen, head_VD, kl=kl, ce=ce, l1=l1)
        loss = loss + objective.selector * selected
    if isinstance(drafter, DSparkDrafter) and confidence_head is not None:
        embedding_RK = drafter.markov_head.markov_w1(rows.previous_R) if drafter.markov_head is not None else None
        foreseen = confidence_loss(confidence_head, rows.hidden_RD, embedding_RK, found.acceptance_R, rows.weights_R)
        loss = loss + objective.confidence * foreseen
    Q = blocks.positions_BAQ.shape[-1]
    block_row_R = rows.place[2] + 1
    counted_Q = torch.bincount(block_row_R, minlength=Q)
    correct_Q = torch.bincount(block_row_R, weights=correct_R.double(), minlength=Q).long()
    # A batch without a single row still runs a backward that touches the drafter: + 0 * hidden.
    weight_sum = objective.denominators(Q).to(hidden_BAKD.device)[block_row_R].sum()
    return Scores(loss + 0.0 * hidden_BAKD.float().sum(), weight_sum, correct_Q, counted_Q)


def _rows(hidden_BAKD: Tensor, features: Features, blocks: Blocks, objective: Objective) -> DraftRows:
    """Gather the drafts that count; the head is asked for no others."""
    conversation, block, draft = blocks.counts_BAQ[..., 1:].nonzero(as_tuple=True)
    place = (conversation, block, draft)
    before_R = blocks.anchors_BA[conversation, block] + draft  # index of the token before the label
    weights_Q = position_weights(blocks.positions_BAQ.shape[-1], objective.gamma).to(hidden_BAKD.device)
    return DraftRows(
        hidden_RD=hidden_BAKD[place],
        teacher_RD=features.hidden_BSD[conversation, before_R],
        labels_R=blocks.labels_BAQ[conversation, block, draft + 1],
        previous_R=blocks.labels_BAQ[conversation, block, draft],
        weights_R=weights_Q[draft + 1],
        place=place,
    )


def _adaptive_weights(losses_R: Tensor, rows: DraftRows, blocks: Blocks) -> Tensor:
    """Weights of the rows, each block's from its own losses."""
    counts_BAK = blocks.counts_BAQ[..., 1:]
    losses_BAK = torch.zeros(counts_BAK.shape, dtype=torch.float32, device=losses_R.device)
    losses_BAK[rows.place] = losses_R
    return adaptive_weights(losses_BAK, counts_BAK)[rows.place]


def _markov_bias(drafter: Drafter, hidden_BAKD: Tensor, blocks: Blocks, rows: DraftRows) -> LowRankBias | None:
    """What a Markov head adds to the logits of the rows, each knowing the token that really came before it."""
    if not isinstance(drafter, DSparkDrafter) or drafter.markov_head is None:
        return None
    codes_BAKR = markov_codes(drafter.markov_head, blocks.labels_BAQ[..., :-1], hidden_BAKD)
    return LowRankBias(codes_BAKR[rows.place].to(rows.hidden_RD.dtype), drafter.markov_head.markov_w2.weight)


def _draft_ids(target_ids_V: Tensor, target_vocab_size: int) -> Tensor:
    """int64 [target vocabulary]: the draft id of every target id, -1 where it has none."""
    draft_ids = target_ids_V.new_full((target_vocab_size,), -1)
    draft_ids[target_ids_V] = torch.arange(len(target_ids_V), device=target_ids_V.device)
    return draft_ids
