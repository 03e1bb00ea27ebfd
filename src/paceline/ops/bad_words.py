"""Bad words: a token is forbidden where it would complete one. B requests, K drafts, L = K + 1, V vocabulary.

A word of M tokens w[0..M-1] masks w[M-1] in every row whose history ends with w[0..M-2]; a word of one token is always
masked. Row i's history is the request's tokens up to the anchor, then drafts 0..i-1.

X words of a request, of up to M tokens; H recent tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.token_masks import forbid_ids_

_NO_TOKEN = -1


class BadWordRows(NamedTuple):
    """Words that each request must not complete.

    Attributes:
        recent_ids_BH: int64, the last H tokens of prompt and output, the anchor last; -1 in front where there are
            fewer. H is at least M - 1, else longer words go unseen.
        words_BXM: int64, each word right-aligned with -1 in front; all -1 is no word.
    """

    recent_ids_BH: Tensor
    words_BXM: Tensor


def mask_bad_words_(z_BLV: Tensor, draft_ids_BK: Tensor, rows: BadWordRows) -> Tensor:
    """Forbid, in place, the last token of each word whose first tokens end a row's history.

    Args:
        z_BLV: float32.
        draft_ids_BK: int64; -1 where there is no draft, which adds nothing to a history.
        rows: recent tokens and words.

    Returns:
        `z_BLV`.
    """
    words_B1XM = rows.words_BXM.unsqueeze(1)
    beginning_B1XM, last_B1X = words_B1XM[..., :-1], words_B1XM[..., -1]
    ending_BL1M = _last_tokens(rows.recent_ids_BH, draft_ids_BK, beginning_B1XM.shape[-1]).unsqueeze(2)
    is_complete_BLX = ((beginning_B1XM == ending_BL1M) | (beginning_B1XM == _NO_TOKEN)).all(dim=-1)
    return forbid_ids_(z_BLV, last_B1X.expand_as(is_complete_BLX), is_complete_BLX)


def _last_tokens(recent_ids_BH: Tensor, draft_ids_BK: Tensor, width: int) -> Tensor:
    """Give the last `width` tokens of every row's history, -1 in front; int64 [B, L, width]."""
    num_recent = recent_ids_BH.shape[1]
    num_drafts = draft_ids_BK.shape[1]
    # Drafts move up over missing ones, which all land in a column behind the block that no row reads.
    is_draft_BK = draft_ids_BK >= 0
    num_before_BK = is_draft_BK.cumsum(dim=1)
    slot_BK = (num_before_BK - 1).masked_fill(~is_draft_BK, num_drafts)
    drafts_BL = torch.full_like(torch.nn.functional.pad(draft_ids_BK, (0, 1)), _NO_TOKEN)
    drafts_BL.scatter_(1, slot_BK, draft_ids_BK)
    history_BH = torch.cat((torch.nn.functional.pad(recent_ids_BH, (width, 0), value=_NO_TOKEN), drafts_BL), dim=1)

    num_before_BL = torch.nn.functional.pad(num_before_BK, (1, 0))
    first_BL = num_recent + num_before_BL
    columns_BLM = first_BL.unsqueeze(2) + torch.arange(width, device=draft_ids_BK.device)
    return history_BH.gather(1, columns_BLM.flatten(1)).view(columns_BLM.shape)
