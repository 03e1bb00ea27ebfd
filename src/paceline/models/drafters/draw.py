"""Choosing ids of rows that do not look at each other: the best one, or an exact draw from the best few.

B requests, K rows, V scored ids, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models.drafters.proposal import MAX_CANDIDATES, DraftSampling, Proposal
from paceline.models.drafters.vocabulary import DraftVocabulary
from paceline.ops.largest_ids import largest_ids
from paceline.ops.top_k_tokens import top_k_tokens


def draw_rows(
    scores_BKV: Tensor,
    sampling: DraftSampling,
    vocabulary: DraftVocabulary,
    *,
    first: int = 0,
    draft_ids_BKV: Tensor | None = None,
) -> Proposal:
    """Choose one id per row; "probabilistic" draws from softmax(scores / temperature) over the best candidates.

    Args:
        scores_BKV: any float dtype; -inf for what cannot be drafted.
        sampling: method, temperature and noise keys.
        vocabulary: gives target ids.
        first: which draft of the block the first row is, from 0; the noise is keyed by it.
        draft_ids_BKV: int64 draft ids that the scores belong to, ascending; by default column v is id v.
    Returns:
        Target ids and, for "probabilistic", the best candidates, at most `MAX_CANDIDATES`, with their exact q.
    """
    # Equal scores go to the lowest id, as in the target's own argmax.
    if sampling.method == "greedy":
        best_BK1 = largest_ids(scores_BKV).unsqueeze(-1)
        return Proposal(_target_ids(best_BK1, draft_ids_BKV, vocabulary).squeeze(-1))
    values_BKC, columns_BKC = top_k_tokens(scores_BKV, min(MAX_CANDIDATES, scores_BKV.shape[-1]))
    ids_BKC = _target_ids(columns_BKC, draft_ids_BKV, vocabulary)
    drawn_BK, log_q_BKC = sampling.draw(values_BKC, ids_BKC, first=first)
    return Proposal(drawn_BK, ids_BKC, log_q_BKC)


def join_rows(rows: Sequence[Proposal]) -> Proposal:
    """One proposal of K drafts out of K proposals of one, as a walk draws them."""
    ids_BK = torch.cat([row.ids_BK for row in rows], dim=1)
    candidates = [row.candidate_ids_BKC for row in rows if row.candidate_ids_BKC is not None]
    log_q = [row.log_q_BKC for row in rows if row.log_q_BKC is not None]
    return Proposal(ids_BK, torch.cat(candidates, dim=1), torch.cat(log_q, dim=1)) if log_q else Proposal(ids_BK)


def _target_ids(columns: Tensor, draft_ids_BKV: Tensor | None, vocabulary: DraftVocabulary) -> Tensor:
    return vocabulary.to_target_ids(columns if draft_ids_BKV is None else draft_ids_BKV.gather(-1, columns))
