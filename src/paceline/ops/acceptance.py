"""The arithmetic of losslessness: when a draft is kept, and what is left to draw from where one is not.

    standard  keep x while u < p(x) / q(x); after a refusal draw from max(p - q, 0)
    block     pi_0 = 1, pi_i = min(pi_i-1 * p(x_i) / q(x_i), 1)
              Z_i = sum over y of max(pi_i * p(y) - q(y), 0), h_i = Z_i / (Z_i + 1 - pi_i); of the last, h_d = pi_d
              keep the drafts up to the largest i with u_i < h_i, whatever lies before it; then draw from
              max(pi_i * p - q, 0), or from p where all were kept
    match     draw y from p on every row with the target's own noise; keep x while x = y; emit the first y that differs
    coupled   the same; the drafter draws with the target's noise, too, so x and y agree nearly as often as p and q do

p, q and the sum over y of step i are those behind the drafts x_1..x_i. All four leave the output's distribution alone.
In `block` q is needed on its candidates only: Z = pi * p(no candidate) + sum over candidates of max(pi * p - q, 0).

Source: standard is algorithm 2 of arXiv 2302.01318, in log space; block is arXiv 2403.10444. B requests, K drafts,
C candidates of the drafter, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from paceline.ops import noise
from paceline.ops.dispatch import kernel, tl
from paceline.ops.sample_tokens import NO_TOKEN

VerifyMethod = Literal["standard", "block", "match", "coupled"]
VERIFY_METHODS: tuple[VerifyMethod, ...] = get_args(VerifyMethod)
_LOSSLESS: dict[VerifyMethod, bool] = dict.fromkeys(VERIFY_METHODS, True)  # by proof; a lossy method would say False


def is_lossless(method: VerifyMethod) -> bool:
    """Tell whether the output of a method follows the target's distribution exactly.

    Args:
        method: of verification.
    """
    return _LOSSLESS[method]


def reads_q(method: VerifyMethod) -> bool:
    """Tell whether a method needs the distribution that drafts were drawn from; the others judge by equality alone."""
    return method in ("standard", "block")


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
        log_p: float, log-probabilities of the target, or of its share pi * p.
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
        log_q_BC: float32; -inf for padding. With ln(q / pi) in its place the weights are those of max(pi * p - q, 0).
    """
    log_p_BV = logits_BV - torch.logsumexp(logits_BV, dim=-1, keepdim=True)
    ids_BC = candidate_ids_BC.clamp(min=0)
    weights_BC = residual_log_weights(log_p_BV.gather(1, ids_BC), log_q_BC)
    # A residual weight never exceeds ln p, so with amin a padding lane (its weight is ln p) can't undo a real one.
    return log_p_BV.scatter_reduce(1, ids_BC, weights_BC, "amin")


def block_log_ratios(log_p_BK: Tensor, log_q_BK: Tensor) -> Tensor:
    """Give ln pi_1..pi_K, the share of the target's mass that the drafts up to each one carry.

    Args:
        log_p_BK: float, the target's log-probabilities of the drafts.
        log_q_BK: float, the drafter's; a draft with -inf could not have been drawn, and ends the block with pi = 0.
    """
    log_pi_B, log_pis = torch.zeros_like(log_p_BK[:, :1]), []
    ratio_BK = torch.where(log_q_BK > -torch.inf, log_p_BK - log_q_BK, -torch.inf)
    for k in range(log_p_BK.shape[1]):
        log_pi_B = (log_pi_B + ratio_BK[:, k : k + 1]).clamp(max=0.0)
        log_pis.append(log_pi_B)
    return torch.cat(log_pis, dim=1) if log_pis else torch.zeros_like(log_p_BK)


def residual_mass(log_pi: Tensor, outside: Tensor, log_p_C: Tensor, log_q_C: Tensor) -> Tensor:
    """Give Z = sum over the vocabulary of max(pi * p - q, 0) from the drafter's candidates alone.

    Args:
        log_pi: float, ln pi behind the draft before this row; any leading dimensions.
        outside: float, the target's mass on ids that are no candidates.
        log_p_C: float, the target's log-probabilities of the candidates, -inf for padding; one more dimension.
        log_q_C: float, the drafter's, -inf for padding.
    """
    inside = residual_log_weights(log_p_C + log_pi.unsqueeze(-1), log_q_C).exp().sum(dim=-1)
    return log_pi.exp() * outside + inside


def block_threshold(log_pi: Tensor, mass: Tensor) -> Tensor:
    """Give h = Z / (Z + 1 - pi), 1 where nothing at all is left.

    Args:
        log_pi: float, ln pi.
        mass: float, Z of the row after the draft.
    """
    total = mass - torch.expm1(log_pi)
    return torch.where(total > 0, mass / total, torch.ones_like(total))


def count_leading(keeps_BK: Tensor) -> Tensor:
    """Count the drafts before the first that is not kept, int64 [B]."""
    return keeps_BK.long().cumprod(dim=1).sum(dim=1)


def count_to_last(passes_BK: Tensor) -> Tensor:
    """Count the drafts up to the last that passes, those in between that do not included, int64 [B]."""
    num_drafts = passes_BK.shape[1]
    if num_drafts == 0:
        return passes_BK.new_zeros(passes_BK.shape[0], dtype=torch.int64)
    index_K = torch.arange(1, num_drafts + 1, device=passes_BK.device)
    return torch.where(passes_BK, index_K, 0).amax(dim=1)


class CandidateRows(NamedTuple):
    """The drafter's support at every position: padding and ids of probability 0 are -1 with -inf."""

    ids_BKC: Tensor
    log_q_BKC: Tensor


class GivenCandidates(NamedTuple):
    """The drafter's support as it came, for kernels, which see to padding and ids of probability 0 by themselves.

    Attributes:
        ids_BKC: int64; -1 is padding.
        log_q_BKC: float32; None where each id has q = 1, as in one-hot drafts.
    """

    ids_BKC: Tensor
    log_q_BKC: Tensor | None


def candidate_rows(draft_ids_BK: Tensor, candidate_ids_BKC: Tensor | None, log_q_BKC: Tensor | None) -> CandidateRows:
    """Bring one-hot and full proposals to one form: a one-hot draft is its only candidate, with q = 1.

    Args:
        draft_ids_BK: int64, -1 where there is no draft.
        candidate_ids_BKC: int64, or None for one-hot.
        log_q_BKC: float, or None for one-hot.
    """
    if candidate_ids_BKC is None or log_q_BKC is None:
        candidate_ids_BKC = draft_ids_BK.unsqueeze(2)
        log_q_BKC = torch.zeros(candidate_ids_BKC.shape, device=draft_ids_BK.device)
    is_nothing_BKC = (candidate_ids_BKC < 0) | (log_q_BKC == -torch.inf)
    ids_BKC = candidate_ids_BKC.masked_fill(is_nothing_BKC, NO_TOKEN)
    return CandidateRows(ids_BKC, log_q_BKC.float().masked_fill(is_nothing_BKC, -torch.inf))


def log_q_of_drafts(draft_ids_BK: Tensor, candidate_ids_BKC: Tensor | None, log_q_BKC: Tensor | None) -> Tensor:
    """Look the drafts up among their candidates: float32 [B, K], -inf for what is not there, 0 for one-hot drafts."""
    if candidate_ids_BKC is None or log_q_BKC is None:
        return torch.zeros(draft_ids_BK.shape, device=draft_ids_BK.device)
    is_draft_BKC = candidate_ids_BKC.eq(draft_ids_BK.unsqueeze(2))
    # A NaN q counts as impossible too: the draft is refused and counted.
    usable_BKC = is_draft_BKC & ~log_q_BKC.isnan()
    return log_q_BKC.float().masked_fill(~usable_BKC, -torch.inf).amax(dim=-1)


def log_acceptance_uniforms(seed_B: Tensor, step_B: Tensor, anchor_position_B: Tensor, num_drafts: int) -> Tensor:
    """Draw ln u of every draft, float32 [B, K], keyed by the position before it and fresh in every step."""
    position_BK = anchor_position_B.unsqueeze(1) + torch.arange(num_drafts, device=seed_B.device)
    seed_B1 = noise.mix_step(seed_B, step_B).unsqueeze(1)
    word_BK = noise.hash32(seed_B1, position_BK, torch.zeros_like(position_BK), noise.ACCEPT)
    return noise.uniform_from_hash(word_BK).log()


class RowsBehind(NamedTuple):
    """What `block` has to know of the row behind each draft, the one that scores the next.

    Attributes:
        outside_BK: float, the target's mass on ids that are no candidates.
        log_p_BKC: float, its log-probabilities of the candidates, -inf for padding.
        log_q_BKC: float, the drafter's. Entries of the last draft of a block are not read.
    """

    outside_BK: Tensor
    log_p_BKC: Tensor
    log_q_BKC: Tensor


def count_by_ratio(
    is_judged_BK: Tensor, log_p_BK: Tensor, log_q_BK: Tensor, log_u_BK: Tensor, behind: RowsBehind | None
) -> tuple[Tensor, Tensor]:
    """Count the drafts that `standard` or `block` keeps.

    Args:
        is_judged_BK: bool, there is a draft and its row is sound; the first that is not ends the block.
        log_p_BK: float, the target's log-probabilities of the drafts.
        log_q_BK: float, the drafter's.
        log_u_BK: float, logs of the acceptance uniforms.
        behind: rows behind the drafts for `block`; None for `standard`.

    Returns:
        accepted_B: int64.
        log_pi_B: float, what the residual at the stop row takes off ln q: ln pi there; 0 for `standard`.
    """
    if behind is None:
        accepted_B = count_leading(accepts_draft(log_p_BK, log_q_BK, log_u_BK) & is_judged_BK)
        return accepted_B, torch.zeros_like(accepted_B, dtype=log_p_BK.dtype)
    is_judged_BK = is_judged_BK.long().cumprod(dim=1).bool()
    is_last_BK = ~torch.nn.functional.pad(is_judged_BK, (0, 1), value=False)[:, 1:]
    log_pi_BK = block_log_ratios(log_p_BK, log_q_BK)
    log_h_BK = block_threshold(log_pi_BK, residual_mass(log_pi_BK, *behind)).log()
    passes_BK = log_u_BK < torch.where(is_last_BK, log_pi_BK, log_h_BK)
    accepted_B = count_to_last(passes_BK & is_judged_BK)
    log_pi_BL = torch.nn.functional.pad(log_pi_BK, (1, 0))
    return accepted_B, at_row(log_pi_BL, accepted_B)


def at_row(values: Tensor, row_B: Tensor) -> Tensor:
    """Pick each request's entry along dimension 1, with all that it holds.

    Args:
        values: [B, rows, ...].
        row_B: int64.
    """
    index = row_B.view(-1, 1, *[1] * (values.dim() - 2)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, index).squeeze(1)


@kernel
def _expm1(x: tl.tensor) -> tl.tensor:
    """exp(x) - 1 for x < 0 without a library's expm1: (e - 1) * x / ln e has the rounding of e in both parts."""
    e = tl.exp(x)
    is_between = (e > 0.0) & (e < 1.0)
    return tl.where(e == 1.0, x, tl.where(is_between, (e - 1.0) * (x / tl.log(tl.where(is_between, e, 0.5))), -1.0))


@kernel
def residual_weights(log_p: tl.tensor, log_q: tl.tensor) -> tl.tensor:
    """In a kernel: `residual_log_weights`."""
    is_left = log_q < log_p
    gap = tl.where(is_left, tl.where(is_left, log_q, 0.0) - tl.where(is_left, log_p, 0.0), -1.0)
    return tl.where(is_left, log_p + tl.log(-_expm1(gap)), float("-inf"))


@kernel
def log_threshold(log_pi: tl.tensor, outside: tl.tensor, log_p: tl.tensor, log_q: tl.tensor) -> tl.tensor:
    """In a kernel: ln `block_threshold` of the `residual_mass`, from the candidates' lanes."""
    mass = tl.exp(log_pi) * outside + tl.sum(tl.exp(residual_weights(log_p + log_pi, log_q)), axis=0)
    total = mass + tl.where(log_pi < 0.0, -_expm1(log_pi), 0.0)
    h = tl.where(total > 0.0, mass / tl.where(total > 0.0, total, 1.0), 1.0)
    return tl.where(h > 0.0, tl.log(tl.where(h > 0.0, h, 1.0)), float("-inf"))
