"""Each row's own token, where the output head is shared out: the best id, or the best after noise.

The noise of an id is a hash of seed, position and the id itself, so a draw does not depend on which rank holds the id
or on how many there are; softmax(z / T) is drawn from by the largest z / T plus Gumbel noise, which needs no sum over
the vocabulary. One message of 8 bytes per row and rank decides, in an order of values and then ids.

R rows, I ids of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.distributed.mesh import TensorGroup
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
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    all_greedy: bool,
) -> Tensor:
    """Choose one id of the whole vocabulary per row; a collective call of the last stage.

    Args:
        logits_RI: of this rank's ids, any float dtype.
        shard: which ids these are; one run of them.
        tensor: the ranks of the stage.
        temperature_R: float32; below 1e-5 a row is greedy.
        seed_R: int64.
        position_R: int64, of the row.
        all_greedy: no row samples.
    Returns:
        int64 [R], on every rank the same; -1 where any rank's logits hold NaN or +inf, or all are -inf.
    """
    scores_RI = logits_RI
    if not all_greedy:
        none_R = torch.zeros_like(seed_R)
        processed_RI = process_logits(
            logits_RI,
            temperature_R=temperature_R,
            top_k_R=none_R,
            top_p_R=torch.ones_like(temperature_R),
            min_p_R=torch.zeros_like(temperature_R),
            max_top_k=0,
            any_top_p=False,
            any_min_p=False,
        )
        ids_I = torch.arange(shard.ranges[0].first_id, shard.ranges[0].end_id, device=logits_RI.device)
        noise_RI = gumbel_from_hash(hash32(seed_R.unsqueeze(1), position_R.unsqueeze(1), ids_I, TARGET))
        scores_RI = processed_RI.float() + noise_RI.masked_fill(rows_are_greedy(temperature_R).unsqueeze(1), 0.0)
    # A rank whose numbers say nothing outbids the others, so that no rank takes the row for sound.
    is_void_R = row_is_bad(scores_RI) & ~(scores_RI.amax(-1) == -torch.inf)
    scores_RI = torch.where(is_void_R.unsqueeze(1), torch.inf, scores_RI)
    best_R1, ids_R1 = sharded_top_k(scores_RI, 1, shard, transform=_AS_THEY_ARE, group=tensor.group)
    return ids_R1[:, 0].masked_fill(~best_R1[:, 0].isfinite(), NO_TOKEN)
