"""Repetition, frequency and presence penalties with the history of each row of a block.

    seen   token stands in the prompt or the output        count   how often it stands in the output
    z > 0:  z / repetition  if seen, else z                z <= 0:  z * repetition  if seen, else z
    z - frequency * count, then  - presence  if count > 0

Row i of a block sees the output up to the anchor and the drafts 0..i-1: what plain decoding would have seen there.

Nearly all tokens of a row are not among its drafts, so the penalties are first taken as if there were no drafts, and
then again, from the values before them, at the few drafted ids. Both times the same arithmetic runs on the same counts
that plain decoding would have, so the bits are the same, too.

B requests, K drafts, L = K + 1 rows, V vocabulary.

Source: arXiv 1909.05858, section 4.1 (repetition, in its form for logits of either sign); frequency and presence as in
the public chat-completion interface.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.token_masks import column_blocks


class PenaltyRows(NamedTuple):
    """What the penalties of each request need.

    Attributes:
        prompt_mask_BV: bool, tokens of the prompt.
        output_counts_BV: int32, how often each token was emitted, the anchor included.
        repetition_B: float32 > 0; 1 is neutral.
        frequency_B: float32; 0 is neutral.
        presence_B: float32; 0 is neutral.
    """

    prompt_mask_BV: Tensor
    output_counts_BV: Tensor
    repetition_B: Tensor
    frequency_B: Tensor
    presence_B: Tensor


def apply_penalties_(z_BLV: Tensor, draft_ids_BK: Tensor, rows: PenaltyRows) -> Tensor:
    """Penalise, in place, what was said before.

    Args:
        z_BLV: float32 logits after bias and masks.
        draft_ids_BK: int64; -1 where there is no draft, which adds nothing to a history.
        rows: histories up to the anchor, and strengths.

    Returns:
        `z_BLV`.
    """
    # A missing draft becomes id 0, whose value is then worked out a second time. Every entry gets the value that is
    # right for its id in its row, whether or not that draft stands before the row: equal ids write equal values.
    ids_BK = draft_ids_BK.clamp(min=0)
    ids_BLK = ids_BK.unsqueeze(1).expand(-1, z_BLV.shape[1], -1)
    drafted_BLK = z_BLV.gather(2, ids_BLK)
    for columns in column_blocks(z_BLV):
        prompt_mask_B1V = rows.prompt_mask_BV[:, columns].unsqueeze(1)
        _penalise_(z_BLV[..., columns], prompt_mask_B1V, rows.output_counts_BV[:, columns].unsqueeze(1), rows)
    if draft_ids_BK.shape[1] == 0:
        return z_BLV
    counts_BLK = rows.output_counts_BV.gather(1, ids_BK).unsqueeze(1) + _counts_in_block(draft_ids_BK, ids_BK)
    prompt_mask_B1K = rows.prompt_mask_BV.gather(1, ids_BK).unsqueeze(1)
    return z_BLV.scatter_(2, ids_BLK, _penalise_(drafted_BLK, prompt_mask_B1K, counts_BLK, rows))


def _counts_in_block(draft_ids_BK: Tensor, ids_BK: Tensor) -> Tensor:
    """Count, for each row i, how often each of `ids_BK` is among the drafts 0..i-1; int32 [B, L, K]."""
    is_same_BKK = draft_ids_BK.unsqueeze(2) == ids_BK.unsqueeze(1)  # [:, earlier draft, id]
    counts_BKK = is_same_BKK.cumsum(dim=1, dtype=torch.int32)
    return torch.nn.functional.pad(counts_BKK, (0, 0, 1, 0))


def _penalise_(z_BLV: Tensor, prompt_mask_BLV: Tensor, counts_BLV: Tensor, rows: PenaltyRows) -> Tensor:
    """Penalise logits of any set of tokens, in place; masks and counts broadcast over the rows of a block."""
    repetition_B11 = rows.repetition_B.view(-1, 1, 1)
    is_seen_BLV = prompt_mask_BLV | (counts_BLV > 0)
    # For a repetition of 1 or more, z / r where z > 0 and z * r elsewhere is the smaller of the two; for one below 1
    # it is the larger, which is the smaller under a change of sign. Sign changes are exact, and choosing by the sign
    # of random logits would take a CPU eight times as long.
    sign_B11 = (repetition_B11 >= 1).float() * 2 - 1
    ratio_BLV = torch.where(is_seen_BLV, repetition_B11, 1.0).mul_(sign_B11)
    quotient_BLV = z_BLV / ratio_BLV
    torch.minimum(z_BLV.mul_(ratio_BLV), quotient_BLV, out=z_BLV).mul_(sign_B11)
    # A strength of -0.0 is neutral, too: subtracting 0.0 changes no bit, subtracting -0.0 would.
    z_BLV.sub_(counts_BLV * (rows.frequency_B + 0.0).view(-1, 1, 1))
    return z_BLV.sub_(counts_BLV.clamp(max=1) * (rows.presence_B + 0.0).view(-1, 1, 1))
