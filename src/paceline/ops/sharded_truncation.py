"""min-p, top-k and top-p over a vocabulary that is split over ranks, without gathering logits.

    min-p    the largest logit of all ranks sets the floor                                   one number per row
    top-k    the k best of every rank are merged; the k-th best is the threshold             k numbers per row and rank
    top-p    the threshold is found digit by digit in base 256: every rank counts and weighs its ids by the next eight
             bits of their logits, the ranks add these up, and the bin is taken in which the nucleus ends. Ids equal to
             the threshold are kept from the lowest one on, as many as the mass takes     4 times 512 numbers per row

min-p and top-k remove what `process_logits` removes, exactly. top-p adds the same probabilities in another order: it
may differ by an id where the mass before it equals p to the last bits. All ranks find the same, over the same bits.

R rows, I ids of a rank, V vocabulary, N ranks, C = k.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.target_distribution import process_logits, rows_are_greedy

_BITS = 8
_NUM_BINS = 1 << _BITS


def process_sharded_logits(
    logits_RI: Tensor,
    *,
    vocab_size: int,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    max_top_k: int,
    any_top_p: bool,
    any_min_p: bool,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """`process_logits` for this rank's ids; a collective call.

    Args:
        logits_RI: any float dtype; one run of ids, and ranks hold theirs in their own order.
        vocab_size: V.
        temperature_R: this and the settings after it as for `process_logits`.
        top_k_R: int64.
        top_p_R: float.
        min_p_R: float.
        max_top_k: the largest entry of `top_k_R`, or more; 0 if no row has one.
        any_top_p: some row may have top_p below 1.
        any_min_p: some row may have min_p above 0.
        group: the ranks; None for a single one.
    Returns:
        float32 [R, I], -inf where a token was removed; rows with NaN or +inf on any rank say nothing.
    """
    is_alone = group is None
    z_RI = process_logits(
        logits_RI,
        temperature_R=temperature_R,
        top_k_R=top_k_R,
        top_p_R=top_p_R,
        min_p_R=min_p_R,
        max_top_k=max_top_k if is_alone else 0,
        any_top_p=any_top_p and is_alone,
        any_min_p=any_min_p and is_alone,
    )
    if group is None:
        return z_RI
    is_greedy_R = rows_are_greedy(temperature_R)
    if any_min_p:
        best_R = _gathered(z_RI.amax(dim=-1), group).amax(dim=0)
        floor_R = best_R + min_p_R.float().masked_fill(is_greedy_R, 0.0).log()  # ln 0 = -inf removes nothing
        z_RI = z_RI.masked_fill(z_RI < floor_R.unsqueeze(1), -torch.inf)
    if max_top_k > 0:
        z_RI = _apply_top_k(z_RI, top_k_R.masked_fill(is_greedy_R, 0), min(max_top_k, vocab_size), vocab_size, group)
    if any_top_p:
        z_RI = _apply_top_p(z_RI, top_p_R.float().masked_fill(is_greedy_R, 1.0), group)
    return z_RI


def _apply_top_k(z_RI: Tensor, top_k_R: Tensor, width: int, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    own_RC = torch.topk(z_RI, min(width, z_RI.shape[1]), dim=-1).values
    own_RC = functional.pad(own_RC, (0, width - own_RC.shape[1]), value=-torch.inf)
    largest_RC = torch.topk(_gathered(own_RC, group).transpose(0, 1).flatten(1), width, dim=-1).values
    threshold_R = largest_RC.gather(1, (top_k_R - 1).clamp(0, width - 1).unsqueeze(1)).squeeze(1)
    threshold_R = threshold_R.masked_fill((top_k_R <= 0) | (top_k_R >= vocab_size), -torch.inf)
    return z_RI.masked_fill(z_RI < threshold_R.unsqueeze(1), -torch.inf)


def _apply_top_p(z_RI: Tensor, top_p_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    log_sum_R = torch.logsumexp(_gathered(torch.logsumexp(z_RI, dim=-1), group), dim=0)
    probability_RI = (z_RI - log_sum_R.unsqueeze(1)).exp()
    keys_RI = _ordered_bits(z_RI)
    ones_RI = torch.ones_like(probability_RI)
    prefix_R, before_R = torch.zeros_like(keys_RI[:, 0]), torch.zeros_like(log_sum_R)
    for shift in range(32 - _BITS, -1, -_BITS):
        is_open_RI = keys_RI >> (shift + _BITS) == prefix_R.unsqueeze(1)
        bins_RI = (keys_RI >> shift) & (_NUM_BINS - 1)
        # what is not open goes to a bin that nobody looks at
        bins_RI = bins_RI.masked_fill(~is_open_RI, _NUM_BINS)
        found_2RJ = probability_RI.new_zeros(2, z_RI.shape[0], _NUM_BINS + 1)
        found_2RJ[0].scatter_add_(1, bins_RI, probability_RI)
        found_2RJ[1].scatter_add_(1, bins_RI, ones_RI)
        mass_RJ, count_RJ = _summed(found_2RJ[..., :_NUM_BINS].contiguous(), group).unbind(0)
        # mass of everything above a bin, from the highest bin down
        above_RJ = before_R.unsqueeze(1) + mass_RJ.flip(1).cumsum(1).flip(1) - mass_RJ
        reaches_RJ = (count_RJ > 0) & ((above_RJ < top_p_R.unsqueeze(1)) | _is_highest(count_RJ))
        chosen_R1 = reaches_RJ.int().argmax(dim=1, keepdim=True)  # the lowest bin that the nucleus reaches
        before_R = above_RJ.gather(1, chosen_R1).squeeze(1)
        prefix_R = (prefix_R << _BITS) | chosen_R1.squeeze(1)
    is_tie_RI = keys_RI == prefix_R.unsqueeze(1)
    tie_R = torch.where(is_tie_RI, probability_RI, 0.0).amax(dim=1)
    tie_R = _gathered(tie_R, group).amax(dim=0)
    num_kept_R = ((top_p_R - before_R) / tie_R).ceil().clamp(min=1.0)
    counts_NR = _gathered(is_tie_RI.sum(dim=1), group)
    order_RI = is_tie_RI.cumsum(dim=1) + counts_NR[: dist.get_rank(group)].sum(dim=0).unsqueeze(
        1
    )  # 1 for the first of all ranks
    is_kept_RI = (keys_RI > prefix_R.unsqueeze(1)) | (is_tie_RI & (order_RI <= num_kept_R.unsqueeze(1)))
    # A row with NaN or +inf has no nucleus: what is wrong with it has to be seen behind this, too.
    cuts_R = (top_p_R < 1.0) & log_sum_R.isfinite()
    return z_RI.masked_fill(~is_kept_RI & cuts_R.unsqueeze(1), -torch.inf)


def _is_highest(count_RJ: Tensor) -> Tensor:
    """Whether a bin is a row's highest that is not empty: the first token is always kept."""
    return count_RJ.flip(1).cumsum(1).flip(1) == count_RJ


def _ordered_bits(values: Tensor) -> Tensor:
    """int64 in [0, 2^32), in the order of float32 numbers; both zeros are one."""
    bits = (values + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, ~bits & 0xFFFF_FFFF, bits | 0x8000_0000)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What every rank has, stacked in their order."""
    parts = own.new_empty(dist.get_world_size(group), *own.shape)
    dist.all_gather(list(parts.unbind(0)), own.contiguous(), group=group)
    return parts


def _summed(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(own, group=group)
    return own
