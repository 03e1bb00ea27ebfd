"""The k best ids of each row of a vocabulary-wide score table, exactly. R rows, V vocabulary, G groups, C = k.

The k best values lie in the k groups of ids whose own best values are largest: a value outside of them is beaten by
k others. So one pass reads the table for the groups' maxima, and the selection proper sees k groups instead of V ids.
Among equal values the lowest ids come first; which of several equal values at the border is left out is not defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 64  # ids per group: about sqrt(V / k) for the vocabularies and k in use


def top_k_tokens_reference(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A stable descending sort, cut at k."""
    values, ids = scores_RV.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


def top_k_tokens(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k largest scores of every row.

    Args:
        scores_RV: [..., V], any float dtype, without NaN.
        k: at most V.
    Returns:
        values [..., k] descending and int64 ids [..., k], equal values by ascending id.
    """
    V = scores_RV.shape[-1]
    assert 1 <= k <= V, f"{k} of {V} ids were asked for"
    num_groups = V // _GROUP
    if num_groups <= 2 * k or V % _GROUP:
        values, ids = scores_RV.topk(k, dim=-1)
        return _by_value_then_id(values, ids)
    grouped = scores_RV.unflatten(-1, (num_groups, _GROUP))
    groups = grouped.amax(dim=-1).topk(k, dim=-1).indices
    ids = (groups.unsqueeze(-1) * _GROUP + torch.arange(_GROUP, device=groups.device)).flatten(-2)
    values, best = scores_RV.gather(-1, ids).topk(k, dim=-1)
    return _by_value_then_id(values, ids.gather(-1, best))


def _by_value_then_id(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)
