"""Each row's own token, where the output head is shared out: the best id, or the best after noise.

The noise of an id is a hash of seed, position and the id itself, so a draw does not depend on which rank holds the id
or on how many there are; softmax(z / T) is drawn from by the largest z / T plus Gumbel noise, which needs no sum over
the vocabulary. One message of 8 bytes per row and rank decides, in an order of values and then ids. What top-k, top-p
and min-p remove depends on the whole row; the ranks find their thresholds together (`ops/sharded_truncation.py`).

R rows, I ids of a rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.distributed.mesh import TensorGroup
from paceline.engine.slots import SamplingRows
from paceline.ops.largest_ids import largest_ids
from paceline.ops.noise import TARGET, gumbel_from_hash, hash32
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.sharded_top_k import VocabularyShard
from paceline.ops.sharded_truncation import process_sharded_logits
from paceline.ops.target_distribution import rows_are_greedy


@dataclass(frozen=True)
class Truncation:
    """What the rows of a pass may have, so that what nobody asked for costs no message; too much is never wrong.

    Attributes:
        max_top_k: the largest; 0 for none.
        any_top_p: some row has top_p below 1.
        any_min_p: some row has min_p above 0.
    """

    max_top_k: int = 0
    any_top_p: bool = False
    any_min_p: bool = False


NOT_TRUNCATED = Truncation()


def choose_ids(
    logits_RI: Tensor,
    shard: VocabularyShard,
    tensor: TensorGroup,
    *,
    sampling: SamplingRows,
    position_R: Tensor,
    all_greedy: bool,
    vocab_size: int,
    truncation: Truncation = NOT_TRUNCATED,
) -> tuple[Tensor, Tensor]:
    """Choose one id of the whole vocabulary per row; a collective call of the last stage.

    Args:
        logits_RI: of this rank's ids, any float dtype.
        shard: which ids these are; one run of them.
        tensor: the ranks of the stage.
        sampling: settings of every row; a temperature below 1e-5 is greedy.
        position_R: int64, of the row.
        all_greedy: no row samples.
        vocab_size: V.
        truncation: what some row may have.
    Returns:
        int64 ids [R] and their float32 scores [R], noise included, on every rank the same. Where any rank's logits hold
        NaN or +inf, the id is -1 and the score +inf; where all are -inf, -1 and that.
    """
    scores_RI = logits_RI
    if not all_greedy:
        (ids,) = shard.ranges
        processed_RI = process_sharded_logits(
            logits_RI,
            vocab_size=vocab_size,
            temperature_R=sampling.temperature_B,
            top_k_R=sampling.top_k_B,
            top_p_R=sampling.top_p_B,
            min_p_R=sampling.min_p_B,
            max_top_k=truncation.max_top_k,
            any_top_p=truncation.any_top_p,
            any_min_p=truncation.any_min_p,
            group=tensor.group,
        )
        ids_I = torch.arange(ids.first_id, ids.end_id, device=logits_RI.device)
        noise_RI = gumbel_from_hash(hash32(sampling.seed_B.unsqueeze(1), position_R.unsqueeze(1), ids_I, TARGET))
        is_greedy_R1 = rows_are_greedy(sampling.temperature_B).unsqueeze(1)
        scores_RI = processed_RI.float() + noise_RI.masked_fill(is_greedy_R1, 0.0)
    best_R, ids_R = _best_of_all(scores_RI, shard, tensor)
    return ids_R.masked_fill(~best_R.isfinite(), NO_TOKEN), best_R


def _best_of_all(scores_RI: Tensor, shard: VocabularyShard, tensor: TensorGroup) -> tuple[Tensor, Tensor]:
    """The best score and its id, of equal ones the lowest: ranks hold ids in their own order, so the first rank's."""
    (ids,) = shard.ranges
    best_R = scores_RI.amax(dim=-1).float()
    # A rank whose numbers say nothing outbids the others, so that no rank takes the row for sound.
    best_R = torch.where(best_R.isnan(), torch.inf, best_R)
    ids_R = largest_ids(scores_RI) + ids.first_id
    if tensor.size == 1:
        return best_R, ids_R
    message_NR2 = torch.stack(tensor.gathered(torch.stack((best_R.view(torch.int32), ids_R.int()), dim=1)))
    best_NR, ids_NR = message_NR2[..., 0].contiguous().view(torch.float32), message_NR2[..., 1].long()
    best_R = best_NR.amax(dim=0)
    is_best_NR = best_NR == best_R
    first_1R = is_best_NR.int().argmax(dim=0, keepdim=True)
    return best_R, ids_NR.gather(0, first_1R).squeeze(0)


def gathered_scores(scores: Tensor, vocab_size: int, tensor: TensorGroup) -> Tensor:
    """Scores of all ranks' ids, [..., I] to [..., V].

    Args:
        scores: of this rank's ids, which are one run; the last rank may have fewer than the others.
        vocab_size: V.
        tensor: the ranks.
    """
    if tensor.size == 1:
        return scores
    width = -(-vocab_size // tensor.size)
    parts = tensor.gathered(functional.pad(scores, (0, width - scores.shape[-1])))
    return torch.cat(parts, dim=-1)[..., :vocab_size]
