"""Weights of the drafts of a block that follow how far the drafter gets (D-PACE), instead of a fixed decay.

A draft is of use only where all drafts before it were right. A fixed decay guesses how often that is; here it is read
off the drafter's own probability of each label. With c that probability, smoothed to s = (1 - alpha) c + alpha, a block
gets through draft k with P_k = s_1 ... s_k, and draft k weighs what depends on it: P_k + P_(k+1) + ...

Weights reach the number of drafts, so the sum that is minimised is divided by the number of drafts that count, over all
parts and ranks of a step, and never by their weights: these move with the drafter, and a loss could then fall because
they rose.

B conversations, A blocks, K drafts, D width, R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.linear_cross_entropy import LowRankBias


@torch.no_grad()
def adaptive_weights(cross_entropy_BAK: Tensor, counts_BAK: Tensor, *, alpha: float = 0.5) -> Tensor:
    """What each draft weighs; no gradient flows through it.

    Args:
        cross_entropy_BAK: float, -log of the drafter's probability of each label, as `label_cross_entropy` gives it. A
            divergence from the target is something else: its exponential is no probability.
        counts_BAK: bool, drafts with a label to learn. Whether a label is among a selector's candidates plays no part.
        alpha: least share of a block that is taken to get through a draft, in [0, 1]; 1 is a weight of 1 per later
            draft, however good the drafter is.
    Returns:
        float32 [B, A, K], 0 where nothing counts.
    """
    smoothed_BAK = (1 - alpha) * torch.exp(-cross_entropy_BAK.float()) + alpha
    reach_BAK = torch.where(counts_BAK, smoothed_BAK, 1.0).cumprod(dim=-1)
    reach_BAK = torch.where(counts_BAK, reach_BAK, 0.0)
    from_here_BAK = reach_BAK.flip(-1).cumsum(dim=-1).flip(-1)
    return torch.where(counts_BAK, from_here_BAK, 0.0)


@torch.no_grad()
def label_cross_entropy(
    hidden_RD: Tensor, labels_R: Tensor, head_VD: Tensor, *, bias: LowRankBias | None, chunk_rows: int
) -> Tensor:
    """-log of the drafter's probability of each label, without gradient and without keeping the logits.

    Args:
        hidden_RD: states that the head reads, in its dtype.
        labels_R: int64, ids that the head scores.
        head_VD: the drafter's head.
        bias: what is added to its logits, a Markov head's.
        chunk_rows: rows whose logits exist at the same time.
    Returns:
        float32 [R].
    """
    losses = [hidden_RD.new_zeros(0, dtype=torch.float32)]
    for start in range(0, len(labels_R), chunk_rows):
        rows = slice(start, start + chunk_rows)
        logits_RV = (hidden_RD[rows] @ head_VD.T).float()
        if bias is not None:
            logits_RV = logits_RV + (bias.code_RK[rows] @ bias.table_VK.to(head_VD.dtype).T).float()
        losses.append(torch.nn.functional.cross_entropy(logits_RV, labels_R[rows], reduction="none"))
    return torch.cat(losses)
