"""Drawing one id per row from a row's best candidates, and the distribution that it was drawn from.

    ln q[c] = log_softmax(score[c] / T)                       T = 1 for greedy requests
    drawn   = candidate of argmax over c of ln q[c] + gumbel[c]; the first candidate for greedy requests

Noise is keyed by the position before the token, the request's step and the token id (`noise`), so it does not matter
where a candidate stands. B requests, K rows, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.noise import candidate_gumbel_reference, gumbel_of_token, key_of_draft


def candidate_log_q_reference(scores_BKC: Tensor, temperature_B: Tensor) -> Tensor:
    """The definition; arguments as for `candidate_log_q`."""
    divisor_B = torch.where(temperature_B > 0, temperature_B, torch.ones_like(temperature_B))
    return (scores_BKC.float() / divisor_B[:, None, None]).log_softmax(dim=-1)


def draw_candidates_reference(
    scores_BKC: Tensor,
    ids_BKC: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    step_B: Tensor | None,
    position_B: Tensor,
    first: int,
    domain: int,
) -> tuple[Tensor, Tensor]:
    """The definition; arguments as for `draw_candidates`."""
    log_q_BKC = candidate_log_q_reference(scores_BKC, temperature_B)
    noisy_BKC = log_q_BKC + candidate_gumbel_reference(seed_B, step_B, position_B, ids_BKC, first, domain)
    noisy_BKC = noisy_BKC.masked_fill(noisy_BKC.isnan(), -torch.inf)
    drawn_BK = ids_BKC.gather(-1, noisy_BKC.argmax(dim=-1, keepdim=True)).squeeze(-1)
    return torch.where(temperature_B[:, None] > 0, drawn_BK, ids_BKC[..., 0]), log_q_BKC


@kernel
def _log_q_of_row(scores: tl.tensor, is_lane: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    divisor = tl.where(temperature > 0, temperature, 1.0)
    tempered = tl.where(is_lane, tl.div_rn(scores, divisor), float("-inf"))
    shifted = tempered - tl.max(tl.where(tempered == tempered, tempered, float("-inf")), axis=0)
    return shifted - tl.log(tl.sum(tl.where(is_lane, tl.exp(shifted), 0.0), axis=0))


@kernel
def _candidate_log_q_kernel(
    scores_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    num_drafts: tl.tensor,
    num_candidates: tl.tensor,
    CANDIDATES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CANDIDATES)
    is_lane = lane < num_candidates
    at = row * num_candidates + lane
    temperature = tl.load(temperature_ptr + row // num_drafts).to(tl.float32)
    scores = tl.load(scores_ptr + at, mask=is_lane, other=0.0).to(tl.float32)
    tl.store(log_q_ptr + at, _log_q_of_row(scores, is_lane, temperature), mask=is_lane)


@kernel
def _draw_candidates_kernel(
    scores_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    step_ptr: tl.tensor,
    position_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    num_drafts: tl.tensor,
    first: tl.tensor,
    num_candidates: tl.tensor,
    HAS_STEP: tl.constexpr,
    DOMAIN: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    request, k = row // num_drafts, row % num_drafts
    lane = tl.arange(0, CANDIDATES)
    is_lane = lane < num_candidates
    at = row * num_candidates + lane
    temperature = tl.load(temperature_ptr + request).to(tl.float32)
    ids = tl.load(ids_ptr + at, mask=is_lane, other=0)
    log_q = _log_q_of_row(tl.load(scores_ptr + at, mask=is_lane, other=0.0).to(tl.float32), is_lane, temperature)
    tl.store(log_q_ptr + at, log_q, mask=is_lane)
    state = key_of_draft(seed_ptr, step_ptr, position_ptr, request, first, k, HAS_STEP, DOMAIN)
    noisy = log_q + gumbel_of_token(state, ids)
    noisy = tl.where(is_lane & (noisy == noisy), noisy, float("-inf"))
    is_best = is_lane & (noisy == tl.max(noisy, axis=0))
    chosen = tl.min(tl.where(is_best, lane, CANDIDATES), axis=0)
    chosen = tl.where(temperature > 0, chosen, 0)
    tl.store(drawn_ptr + row, tl.sum(tl.where(lane == chosen, ids, 0), axis=0))


def candidate_log_q_triton(scores_BKC: Tensor, temperature_B: Tensor) -> Tensor:
    """Launch one program per row."""
    num_requests, num_drafts, num_candidates = scores_BKC.shape
    log_q_BKC = torch.empty(scores_BKC.shape, dtype=torch.float32, device=scores_BKC.device)
    with torch.cuda.device_of(scores_BKC):
        _candidate_log_q_kernel[(num_requests * num_drafts,)](
            scores_BKC.contiguous(),
            temperature_B.contiguous(),
            log_q_BKC,
            num_drafts,
            num_candidates,
            CANDIDATES=triton.next_power_of_2(num_candidates),
            num_warps=1,
        )
    return log_q_BKC


def draw_candidates_triton(
    scores_BKC: Tensor,
    ids_BKC: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    step_B: Tensor | None,
    position_B: Tensor,
    first: int,
    domain: int,
) -> tuple[Tensor, Tensor]:
    """Launch one program per row."""
    num_requests, num_drafts, num_candidates = scores_BKC.shape
    log_q_BKC = torch.empty(scores_BKC.shape, dtype=torch.float32, device=scores_BKC.device)
    drawn_BK = ids_BKC.new_empty(num_requests, num_drafts)
    with torch.cuda.device_of(scores_BKC):
        _draw_candidates_kernel[(num_requests * num_drafts,)](
            scores_BKC.contiguous(),
            ids_BKC.contiguous(),
            temperature_B.contiguous(),
            seed_B.contiguous(),
            seed_B if step_B is None else step_B.contiguous(),
            position_B.contiguous(),
            drawn_BK,
            log_q_BKC,
            num_drafts,
            first,
            num_candidates,
            HAS_STEP=step_B is not None,
            DOMAIN=domain,
            CANDIDATES=triton.next_power_of_2(num_candidates),
            num_warps=1,
        )
    return drawn_BK, log_q_BKC


def candidate_log_q(scores_BKC: Tensor, temperature_B: Tensor) -> Tensor:
    """Give the log-probabilities of rows' candidates at their requests' temperatures, float32 [B, K, C].

    Args:
        scores_BKC: any float dtype.
        temperature_B: float32; at 0 or below the scores are taken as they are.
    """
    run = choose("candidate_log_q", scores_BKC, candidate_log_q_reference, candidate_log_q_triton)
    return run(scores_BKC, temperature_B)


def draw_candidates(
    scores_BKC: Tensor,
    ids_BKC: Tensor,
    *,
    temperature_B: Tensor,
    seed_B: Tensor,
    step_B: Tensor | None,
    position_B: Tensor,
    first: int = 0,
    domain: int,
) -> tuple[Tensor, Tensor]:
    """Draw one candidate per row.

    Args:
        scores_BKC: any float dtype, descending: the first candidate is a greedy request's choice.
        ids_BKC: int64 target ids.
        temperature_B: float32; at 0 or below a request is greedy.
        seed_B: int64.
        step_B: int64, mixed into the seeds; None leaves them alone.
        position_B: int64, the position before that of draft 0.
        first: which draft of the block the first of these K rows is, from 0.
        domain: of the noise.

    Returns:
        Drawn ids, int64 [B, K], and the log-probabilities that they were drawn with, float32 [B, K, C].
    """
    run = choose("draw_candidates", scores_BKC, draw_candidates_reference, draw_candidates_triton)
    return run(scores_BKC, ids_BKC, temperature_B, seed_B, step_B, position_B, first, domain)
