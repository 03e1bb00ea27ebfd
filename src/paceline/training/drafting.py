"""From a batch to the state behind every draft, whatever the family: what training scores and evaluation draws from.

B conversations, S tokens, A blocks, K drafts, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.drafters.draw import draw_rows
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.proposal import DraftSampling
from paceline.models.drafters.table import Drafter
from paceline.training.anchors import Blocks
from paceline.training.data import Batch
from paceline.training.eagle3 import draft_chains
from paceline.training.features import TargetFeatures
from paceline.training.flex_attend import FlexBlocks
from paceline.training.objective import Features, draft_blocks

_HEAD_ROWS = 8192  # rows of logits at a time


def states_after_labels(
    drafter: Drafter,
    target: TargetFeatures,
    features: Features,
    batch: Batch,
    blocks: Blocks,
    flex: FlexBlocks | None = None,
) -> Tensor:
    """The state behind every draft if all drafts before it were right, [B, A, K, D].

    Args:
        drafter: of any family.
        target: lends the embedding.
        features: of these conversations.
        batch: the conversations.
        blocks: anchors and labels, of one row more than the contract drafts.
        flex: as for `draft_blocks`; never of an EAGLE-3 drafter.
    """
    num_drafts = drafter.contract.num_draft_tokens
    if isinstance(drafter, Eagle3Drafter):
        assert flex is None, "an EAGLE-3 drafter attends by dense masks"
        labels_BAQ = blocks.labels_BAQ
        return draft_chains(
            drafter,
            target,
            features.taps,
            batch,
            blocks.anchors_BA,
            num_drafts,
            lambda k, out_BAD: labels_BAQ[:, :, k],
        )
    rows = drafter.embed(drafter.block_ids(blocks.labels_BAQ[:, :, 0], num_drafts), target)
    return drafter.predicted_rows(draft_blocks(drafter, features.taps, rows, blocks, flex))


def greedy_drafts(drafter: Drafter, target: TargetFeatures, features: Features, batch: Batch, blocks: Blocks) -> Tensor:
    """What the drafter would propose from every anchor, int64 [B, A, K], by the code that serves it.

    Arguments as for `states_after_labels`; an EAGLE-3 drafter reads its own drafts, not the labels.
    """
    dtype = target.head_VD.dtype
    if isinstance(drafter, Eagle3Drafter):
        drafts: list[Tensor] = []

        def draw(k: int, out_BAD: Tensor) -> Tensor:
            drafts.append(_best(drafter, target, out_BAD.to(dtype)))
            return drafts[-1]

        num_drafts = drafter.contract.num_draft_tokens
        states = draft_chains(drafter, target, features.taps, batch, blocks.anchors_BA, num_drafts, draw)
        draw(num_drafts, states[:, :, -1])
        return torch.stack(drafts, dim=2)
    hidden_BAKD = states_after_labels(drafter, target, features, batch, blocks).to(dtype)
    B, A, K = hidden_BAKD.shape[:3]
    num_blocks = max(1, _HEAD_ROWS // K)
    anchor_ids = blocks.labels_BAQ[:, :, 0].flatten()
    ids = []
    for hidden, some in zip(hidden_BAKD.flatten(0, 1).split(num_blocks), anchor_ids.split(num_blocks), strict=True):
        ids.append(drafter.propose(hidden, drafter.logits(hidden, target), some, _greedy(some)).ids_BK)
    return torch.cat(ids).view(B, A, K)


def _best(drafter: Eagle3Drafter, target: TargetFeatures, out_BAD: Tensor) -> Tensor:
    """The best id of every row, int64 [B, A]."""
    ids = []
    for out in out_BAD.flatten(0, 1).unsqueeze(1).split(_HEAD_ROWS):
        nobody = torch.zeros(len(out), dtype=torch.int64, device=out.device)
        ids.append(draw_rows(drafter.logits(out, target), _greedy(nobody), drafter.vocabulary).ids_BK)
    return torch.cat(ids).view(out_BAD.shape[:2])


def _greedy(like_B: Tensor) -> DraftSampling:
    nothing = torch.zeros_like(like_B)
    return DraftSampling("greedy", nothing.float(), nothing, nothing, nothing)
