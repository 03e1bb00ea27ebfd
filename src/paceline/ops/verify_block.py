"""Judge a draft block against the target: how many drafts are kept, and which token the target adds.

    greedy    accept draft x iff x is the row's argmax; then emit the stop row's argmax
    sampled   accept iff ln p(x) > ln u + ln q(x); after a refusal emit one draw of max(p - q, 0), normalised;
              after K acceptances one draw of p
    one-hot   the same with q = 1 at x: accept iff u < p(x); the residual is p without x

Row i of a request whose anchor stands at position n sits at n + i and predicts position n + i + 1; row K predicts the
bonus. Every draw is keyed by the position before its token, n + i. B requests, K drafts, L = K + 1, C candidates of
the drafter, V vocabulary.

The emitted tokens follow the target's distribution exactly, for any drafter, as long as q is what the draft was really
drawn from and the three noise domains stay apart (see `noise`). One-hot judging is exact for any draft at all. Noise
and residual are made for the one stop row of each request, not for all rows. Nothing here reads a tensor value on the
host, so the whole op can sit in a CUDA graph.

Source: arXiv 2302.01318, algorithm 2; the residual is taken in log space.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import noise
from paceline.ops.sample_tokens import NO_TOKEN, pick_largest
from paceline.ops.target_distribution import rows_are_greedy


@dataclass(frozen=True)
class VerifiedBlock:
    """What verification decided, one entry per request.

    Attributes:
        accepted_B: int64 in [0, K], drafts kept, bonus excluded.
        bonus_ids_B: int64, the target's own token after them; -1 where `bad_B`.
        bad_B: bool, the row after the kept drafts holds NaN or +inf or nothing at all; the kept drafts are sound.
        num_zero_q_B: int64, drafts that their own q says were impossible; refused, and a sign of a broken drafter.
    """

    accepted_B: Tensor
    bonus_ids_B: Tensor
    bad_B: Tensor
    num_zero_q_B: Tensor


def accepts_draft(log_p: Tensor, log_q: Tensor, log_u: Tensor) -> Tensor:
    """Tell whether a draft is kept: u < p/q, strictly, so that p = 0 is refused even for u = 0.

    Args:
        log_p: float, the target's log-probability of the draft.
        log_q: float, the drafter's.
        log_u: float, log of a uniform in (0, 1).
    """
    return (log_p > log_u + log_q) & (log_q > -torch.inf)


def residual_log_weights(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Give ln max(p - q, 0), without the cancellation of a subtraction.

    Args:
        log_p: float, normalised log-probabilities of the target.
        log_q: float, of the drafter; -inf where it cannot draft.

    Returns:
        Unnormalised log-weights; -inf where q >= p, and where both are 0.
    """
    # ln(1 - e^d) through expm1 keeps its digits for p close to q. Where d is NaN (-inf minus -inf) q < p is false.
    return torch.where(log_q < log_p, log_p + torch.log(-torch.expm1(log_q - log_p)), -torch.inf)


def one_hot_residual(logits_BV: Tensor, draft_ids_B: Tensor) -> Tensor:
    """Give the log-weights of p without the refused draft.

    Args:
        logits_BV: float processed logits of the refusing row.
        draft_ids_B: int64 refused drafts, in [0, V).
    """
    return logits_BV.scatter(1, draft_ids_B.unsqueeze(1), -torch.inf)


def candidate_residual(logits_BV: Tensor, candidate_ids_BC: Tensor, log_q_BC: Tensor) -> Tensor:
    """Give ln max(p - q, 0) over the vocabulary for a q that lives on a few candidates.

    Args:
        logits_BV: float32 processed logits of the refusing row.
        candidate_ids_BC: int64 ids in [0, V); padding is -1.
        log_q_BC: float32; -inf for padding.
    """
    log_p_BV = logits_BV - torch.logsumexp(logits_BV, dim=-1, keepdim=True)
    ids_BC = candidate_ids_BC.clamp(min=0)
    weights_BC = residual_log_weights(log_p_BV.gather(1, ids_BC), log_q_BC)
    # A residual weight never exceeds ln p, so with amin a padding lane (its weight is ln p) can't undo a real one.
    return log_p_BV.scatter_reduce(1, ids_BC, weights_BC, "amin")


def verify_block(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    *,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
    candidate_ids_BKC: Tensor | None = None,
    log_q_BKC: Tensor | None = None,
    all_greedy: bool = False,
) -> VerifiedBlock:
    """Count each request's accepted drafts and draw the target's own token after them.

    Args:
        draft_ids_BK: int64 proposals, the anchor is not among them; -1 ends a request's block early.
        processed_BLV: float logits from `process_logits` (raw for greedy rows); row i scores draft i, row K the bonus.
        temperature_B: float; below 1e-5 the request is greedy. It is not applied again.
        seed_B: int64 request seeds.
        anchor_position_B: int64 absolute position of the anchor.
        step_B: int64 step counter of the request, the one its drafts were drawn with.
        candidate_ids_BKC: int64 ids that the drafter could have drawn at each position, unique, padded with -1. None
            together with `log_q_BKC` judges every draft as one-hot.
        log_q_BKC: float32 log-probabilities they were drawn with; ids outside have q = 0. A one-hot row among others
            is one candidate with 0 and the rest -inf.
        all_greedy: every request is greedy (the host knows); costs one argmax over the logits.

    Returns:
        A VerifiedBlock of device tensors.

    Raises:
        ShapeError: logits without one row more than drafts, or candidates that do not match them.
    """
    _check_shapes(draft_ids_BK, processed_BLV, candidate_ids_BKC, log_q_BKC)
    best_BL, argmax_ids_BL = processed_BLV.max(dim=-1)
    is_sound_BL = best_BL.isfinite()
    agrees_BK = draft_ids_BK.eq(argmax_ids_BL[:, :-1])
    if all_greedy:
        accepted_B, bad_B = _count_accepted(agrees_BK, is_sound_BL)
        bonus_ids_B = _at_stop(argmax_ids_BL, accepted_B).masked_fill(bad_B, NO_TOKEN)
        return VerifiedBlock(accepted_B, bonus_ids_B, bad_B, torch.zeros_like(accepted_B))

    is_greedy_B = rows_are_greedy(temperature_B)
    is_draft_BK = draft_ids_BK >= 0
    log_p_BK = _log_p_of_drafts(draft_ids_BK, processed_BLV[:, :-1])
    log_q_BK = _log_q_of_drafts(draft_ids_BK, candidate_ids_BKC, log_q_BKC)
    log_u_BK = _log_acceptance_uniforms(seed_B, step_B, anchor_position_B, draft_ids_BK.shape[1])
    keeps_BK = accepts_draft(log_p_BK, log_q_BK, log_u_BK) & is_draft_BK
    keeps_BK = torch.where(is_greedy_B.unsqueeze(1), agrees_BK, keeps_BK)
    accepted_B, bad_B = _count_accepted(keeps_BK, is_sound_BL)
    drawn_ids_B = _draw_at_stop_row(
        draft_ids_BK, processed_BLV, accepted_B, seed_B, anchor_position_B, candidate_ids_BKC, log_q_BKC
    )
    bonus_ids_B = torch.where(is_greedy_B, _at_stop(argmax_ids_BL, accepted_B), drawn_ids_B)
    is_impossible_BK = (log_q_BK == -torch.inf) & is_draft_BK & ~is_greedy_B.unsqueeze(1)
    return VerifiedBlock(
        accepted_B, bonus_ids_B.masked_fill(bad_B, NO_TOKEN), bad_B, is_impossible_BK.long().sum(dim=1)
    )


def _at_stop(values_BL: Tensor, accepted_B: Tensor) -> Tensor:
    return values_BL.gather(1, accepted_B.unsqueeze(1)).squeeze(1)


def _count_accepted(keeps_BK: Tensor, is_sound_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Count drafts up to the first refusal; an unsound row refuses, and is bad if it is the one that stopped."""
    accepted_B = (keeps_BK & is_sound_BL[:, :-1]).long().cumprod(dim=1).sum(dim=1)  # ones end at the first refusal
    return accepted_B, ~_at_stop(is_sound_BL, accepted_B)


def _log_acceptance_uniforms(seed_B: Tensor, step_B: Tensor, anchor_position_B: Tensor, num_drafts: int) -> Tensor:
    position_BK = anchor_position_B.unsqueeze(1) + torch.arange(num_drafts, device=seed_B.device)
    seed_B1 = noise.mix_step(seed_B, step_B).unsqueeze(1)
    word_BK = noise.hash32(seed_B1, position_BK, torch.zeros_like(position_BK), noise.ACCEPT)
    return noise.uniform_from_hash(word_BK).log()


def _log_p_of_drafts(draft_ids_BK: Tensor, processed_BKV: Tensor) -> Tensor:
    logits_BKV = processed_BKV.float()
    drafted_BK = logits_BKV.gather(2, draft_ids_BK.clamp(min=0).unsqueeze(2)).squeeze(2)
    return drafted_BK - torch.logsumexp(logits_BKV, dim=-1)


def _log_q_of_drafts(draft_ids_BK: Tensor, candidate_ids_BKC: Tensor | None, log_q_BKC: Tensor | None) -> Tensor:
    if candidate_ids_BKC is None or log_q_BKC is None:
        return torch.zeros(draft_ids_BK.shape, device=draft_ids_BK.device)
    is_draft_BKC = candidate_ids_BKC.eq(draft_ids_BK.unsqueeze(2))
    # A NaN q counts as impossible too: the draft is refused and counted.
    usable_BKC = is_draft_BKC & ~log_q_BKC.isnan()
    return log_q_BKC.float().masked_fill(~usable_BKC, -torch.inf).amax(dim=-1)


def _draw_at_stop_row(
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    accepted_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    candidate_ids_BKC: Tensor | None,
    log_q_BKC: Tensor | None,
) -> Tensor:
    """Draw from the residual where a draft was refused, from p where the block or the proposals ended."""
    num_requests, num_rows, vocab_size = processed_BLV.shape
    row_index_B11 = accepted_B.view(-1, 1, 1)
    logits_BV = processed_BLV.gather(1, row_index_B11.expand(-1, 1, vocab_size)).squeeze(1).float()
    # The bonus row has no draft to refuse, exactly like a placeholder.
    no_draft_B1 = draft_ids_BK.new_full((num_requests, 1), NO_TOKEN)
    refused_B = _at_stop(torch.cat([draft_ids_BK, no_draft_B1], dim=1), accepted_B)
    weights_BV = logits_BV
    if num_rows > 1:
        if candidate_ids_BKC is None or log_q_BKC is None:
            residual_BV = one_hot_residual(logits_BV, refused_B.clamp(min=0))
        else:
            draft_index_B1C = row_index_B11.clamp(max=num_rows - 2).expand(-1, 1, candidate_ids_BKC.shape[2])
            residual_BV = candidate_residual(
                logits_BV,
                candidate_ids_BKC.gather(1, draft_index_B1C).squeeze(1),
                log_q_BKC.gather(1, draft_index_B1C).squeeze(1).float(),
            )
        # Rounding can refuse although p equals q and nothing is left over; p itself is then the right draw.
        has_residual_B = (refused_B >= 0) & (residual_BV.amax(dim=-1) > -torch.inf)
        weights_BV = torch.where(has_residual_B.unsqueeze(1), residual_BV, logits_BV)
    return pick_largest(
        weights_BV + noise.gumbel_noise(seed_B, anchor_position_B + accepted_B, vocab_size, domain=noise.TARGET)
    )


def _check_shapes(
    draft_ids_BK: Tensor, processed_BLV: Tensor, candidate_ids_BKC: Tensor | None, log_q_BKC: Tensor | None
) -> None:
    num_requests, num_drafts = draft_ids_BK.shape
    if processed_BLV.dim() != 3 or processed_BLV.shape[:2] != (num_requests, num_drafts + 1):
        expected = f"[{num_requests}, {num_drafts + 1}, V]"
        raise ShapeError("processed logits", expected=expected, found=processed_BLV.shape)
    if (candidate_ids_BKC is None) != (log_q_BKC is None):
        given, missing = ("log_q", "candidate_ids") if candidate_ids_BKC is None else ("candidate_ids", "log_q")
        raise ValueError(f"{given} was given without {missing}; both describe q")
    if candidate_ids_BKC is not None and log_q_BKC is not None:
        if candidate_ids_BKC.dim() != 3 or candidate_ids_BKC.shape[:2] != (num_requests, num_drafts):
            expected = f"[{num_requests}, {num_drafts}, C]"
            raise ShapeError("candidate_ids", expected=expected, found=candidate_ids_BKC.shape)
        if log_q_BKC.shape != candidate_ids_BKC.shape:
            raise ShapeError("log_q", expected=candidate_ids_BKC.shape, found=log_q_BKC.shape)
