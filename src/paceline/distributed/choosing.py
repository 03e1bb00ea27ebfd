"""Each row's own token, where the output head is shared out: the best id, or the best after noise.

The noise of an id is a hash of seed, position and the id itself, so a draw does not depend on which rank holds the id
or on how many there are; softmax(z / T) is drawn from by the largest z / T plus Gumbel noise, which needs no sum over
the vocabulary. One message of 8 bytes per row and rank decides, in an order of values and then ids. What top-k, top-p
and min-p remove depends on the whole row, so where a request asks for one of them all logits are gathered first.

R rows, I ids of a rank, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.distributed.mesh import TensorGroup
from paceline.engine.slots import SamplingRows
from paceline.ops.noise import TARGET, gumbel_from_hash, hash32
from paceline.ops.sample_tokens import NO_TOKEN, row_is_bad
from paceline.ops.sharded_top_k import LogitTransform, VocabularyShard, sharded_top_k
from paceline.ops.target_distribution import process_logits, rows_are_greedy

_AS_THEY_ARE = LogitTransform("softcap_then_scale")


def choose_ids(
    logits_RI: Tensor,
    shard: VocabularyShard,
    tensor: TensorGroup,
    *,
    sampling: SamplingRows,
    position_R: Tensor,
    all_greedy: bool,
    is_truncated: bool = False,
) -> Tensor:
    """Choose one id of the whole vocabulary per row; a collective call of the last stage.

    Args:
        logits_RI: of this rank's ids, any float dtype.
        shard: which ids these are; one run of them.
        tensor: the ranks of the stage.
        sampling: settings of every row; a temperature below 1e-5 is greedy.
        position_R: int64, of the row.
        all_greedy: no row samples.
        is_truncated: some row may have a top-k, top-p or min-p.
    Returns:
        int64 [R], on every rank the same; -1 where any rank's logits hold NaN or +inf, or all are -inf.
    """
    scores_RI = logits_RI
    if not all_greedy:
        (ids,) = shard.ranges
        whole_RV = _gathered(logits_RI, tensor) if is_truncated else logits_RI
        processed_RV = process_logits(
            whole_RV,
            temperature_R=sampling.temperature_B,
            top_k_R=sampling.top_k_B,
            top_p_R=sampling.top_p_B,
            min_p_R=sampling.min_p_B,
            max_top_k=None if is_truncated else 0,
            any_top_p=is_truncated,
            any_min_p=is_truncated,
        )
        processed_RI = processed_RV[:, ids.first_id : ids.end_id] if is_truncated else processed_RV
        ids_I = torch.arange(ids.first_id, ids.end_id, device=logits_RI.device)
        noise_RI = gumbel_from_hash(hash32(sampling.seed_B.unsqueeze(1), position_R.unsqueeze(1), ids_I, TARGET))
        is_greedy_R1 = rows_are_greedy(sampling.temperature_B).unsqueeze(1)
        scores_RI = processed_RI.float() + noise_RI.masked_fill(is_greedy_R1, 0.0)
    # A rank whose numbers say nothing outbids the others, so that no rank takes the row for sound.
    is_void_R = row_is_bad(scores_RI) & ~(scores_RI.amax(-1) == -torch.inf)
    scores_RI = torch.where(is_void_R.unsqueeze(1), torch.inf, scores_RI)
    best_R1, ids_R1 = sharded_top_k(scores_RI, 1, shard, transform=_AS_THEY_ARE, group=tensor.group)
    return ids_R1[:, 0].masked_fill(~best_R1[:, 0].isfinite(), NO_TOKEN)


def _gathered(logits_RI: Tensor, tensor: TensorGroup) -> Tensor:
    """The logits of all ranks, [R, V]; the last rank may have fewer than the others."""
    if tensor.size == 1:
        return logits_RI
    width = torch.tensor([logits_RI.shape[1]], device=logits_RI.device)
    widths = [int(one) for one in tensor.gathered(width)]
    padded_RI = functional.pad(logits_RI, (0, max(widths) - logits_RI.shape[1]))
    parts = tensor.gathered(padded_RI)
    return torch.cat([part[:, :own] for part, own in zip(parts, widths, strict=True)], dim=1)
