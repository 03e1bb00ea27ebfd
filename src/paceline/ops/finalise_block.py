"""From statistics of the rows to a verdict per request: walk over the drafts, then the draw at the row that stopped.

    walk   standard and block as in `acceptance`; match and coupled compare drafts with the rows' own draws
    draw   argmax over {best noisy id outside the candidates} and {ln max(p - q, 0) + lse + noise of every candidate},
           after a refusal; over the same ids with p in place of the residual where the drafts ended, or nothing is left

The normaliser lse puts both kinds on the scale of the logits, so their order is that of a draw over the vocabulary.
Only the candidates' own logits are read again. The kernel here walks, as `block` has to; other methods judge all rows
at once (`finalise_rows`). Both forms here follow `verify_block_reference` up to the rounding of a logarithm: only where
two noisy weights, or the two sides of an acceptance, lie within 1e-5 may a verdict differ.

B requests, K drafts, L = K + 1 rows, C candidates, V vocabulary, S tiles of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops import noise
from paceline.ops.acceptance import (
    CandidateRows,
    GivenCandidates,
    RowsBehind,
    VerifyMethod,
    at_row,
    count_by_ratio,
    count_leading,
    log_acceptance_uniforms,
    log_q_of_drafts,
    log_threshold,
    reads_q,
    residual_log_weights,
)
from paceline.ops.dispatch import kernel, tl, triton
from paceline.ops.finalise_rows import finalise_rows_triton
from paceline.ops.noise import gumbel_of_token, key_state, uniform_of_token
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.target_distribution import rows_are_greedy
from paceline.ops.verdict_parts import load_candidates, noisiest_id, residual_of_stop, verdict_launch
from paceline.ops.vocab_statistics import RowStatistics, VocabStatistics, join_row, join_tiles

SOUND, NOT_A_NUMBER, NOTHING_LEFT = 0, 1, 2
_NO_ID = torch.iinfo(torch.int64).max


class Verdict(NamedTuple):
    """Per request, all int64; see `verify_block.VerifiedBlock`."""

    accepted_B: Tensor
    bonus_ids_B: Tensor
    fault_B: Tensor
    num_zero_q_B: Tensor


def fault_of_rows(best: Tensor) -> Tensor:
    """Name what is wrong with rows, int64: SOUND, NOT_A_NUMBER (NaN or +inf) or NOTHING_LEFT (all -inf).

    Args:
        best: float, each row's largest logit, NaN if any is.
    """
    fault = torch.where(best == -torch.inf, NOTHING_LEFT, NOT_A_NUMBER)
    return fault.masked_fill(best.isfinite(), SOUND)


def finalise_block_reference(
    tiles: VocabStatistics,
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    candidates: CandidateRows,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
    method: VerifyMethod,
) -> Verdict:
    """The definition in torch; arguments as for `finalise_block_triton`."""
    rows = join_tiles(tiles)
    is_greedy_B = rows_are_greedy(temperature_B)
    fault_BL = fault_of_rows(rows.best_BL)
    is_draft_BK = draft_ids_BK >= 0
    is_judged_BK = is_draft_BK & (fault_BL[:, :-1] == SOUND)
    own_ids_BL = torch.where(is_greedy_B.unsqueeze(1), rows.best_ids_BL, rows.noisy_ids_BL)
    accepted_B = count_leading(draft_ids_BK.eq(own_ids_BL[:, :-1]) & is_judged_BK)
    bonus_ids_B, num_zero_q_B = at_row(own_ids_BL, accepted_B), torch.zeros_like(accepted_B)
    if reads_q(method):
        # One more row for the bonus, which has no candidates.
        ids_BLC = torch.nn.functional.pad(candidates.ids_BKC, (0, 0, 0, 1), value=NO_TOKEN)
        log_q_BLC = torch.nn.functional.pad(candidates.log_q_BKC, (0, 0, 0, 1), value=-torch.inf)
        logits_BLC = processed_BLV.gather(2, ids_BLC.clamp(min=0)).float().masked_fill(ids_BLC < 0, -torch.inf)
        drafted_BK = processed_BLV[:, :-1].gather(2, draft_ids_BK.clamp(min=0).unsqueeze(2)).squeeze(2).float()
        log_p_BLC, behind = logits_BLC - rows.log_mass_BL.unsqueeze(2), None
        if method == "block":
            behind = RowsBehind(rows.outside_BL[:, 1:], log_p_BLC[:, 1:], log_q_BLC[:, 1:])
        log_q_BK = log_q_of_drafts(draft_ids_BK, *candidates)
        log_u_BK = log_acceptance_uniforms(seed_B, step_B, anchor_position_B, draft_ids_BK.shape[1])
        log_p_BK = drafted_BK - rows.log_mass_BL[:, :-1]
        by_ratio_B, log_pi_B = count_by_ratio(is_judged_BK, log_p_BK, log_q_BK, log_u_BK, behind)
        ids_BC = at_row(ids_BLC, by_ratio_B)
        position_B = anchor_position_B + by_ratio_B
        drawn_ids_B = _draw_from_candidates(
            RowStatistics(*(at_row(values, by_ratio_B) for values in rows)),
            ids_BC,
            at_row(logits_BLC, by_ratio_B),
            at_row(log_q_BLC, by_ratio_B) - log_pi_B.unsqueeze(1),
            noise.gumbel_from_hash(noise.hash32(seed_B.unsqueeze(1), position_B.unsqueeze(1), ids_BC, noise.TARGET)),
            at_row(torch.nn.functional.pad(is_draft_BK, (0, 1), value=False), by_ratio_B),
        )
        accepted_B = torch.where(is_greedy_B, accepted_B, by_ratio_B)
        bonus_ids_B = torch.where(is_greedy_B, bonus_ids_B, drawn_ids_B)
        num_zero_q_B = ((log_q_BK == -torch.inf) & is_draft_BK).long().sum(dim=1).masked_fill(is_greedy_B, 0)
    fault_B = at_row(fault_BL, accepted_B)
    return Verdict(accepted_B, bonus_ids_B.masked_fill(fault_B != SOUND, NO_TOKEN), fault_B, num_zero_q_B)


def _draw_from_candidates(
    stop: RowStatistics, ids_BC: Tensor, logits_BC: Tensor, log_q_BC: Tensor, noise_BC: Tensor, is_refusal_B: Tensor
) -> Tensor:
    """Finish the draw at the stop rows: the noisy best outside the candidates against the candidates themselves."""
    log_mass_B1 = stop.log_mass_BL.unsqueeze(1)
    plain_BC = logits_BC + noise_BC
    residual_BC = residual_log_weights(logits_BC - log_mass_B1, log_q_BC) + log_mass_B1 + noise_BC
    is_left_B = (residual_BC > -torch.inf).any(dim=1) | (stop.noisy_BL > -torch.inf)
    # Rounding can refuse although p equals q and nothing is left over; p itself is then the right draw.
    noisy_BC = torch.where((is_refusal_B & is_left_B).unsqueeze(1), residual_BC, plain_BC)
    noisy_BM = torch.cat((stop.noisy_BL.unsqueeze(1), noisy_BC), dim=1)
    ids_BM = torch.cat((stop.noisy_ids_BL.unsqueeze(1), ids_BC), dim=1)
    is_best_BM = (noisy_BM == noisy_BM.amax(dim=1, keepdim=True)) & (noisy_BM > -torch.inf)
    return ids_BM.masked_fill(~is_best_BM, _NO_ID).amin(dim=1)


@kernel
def _read_candidates(
    candidate_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    request: tl.tensor,
    k: tl.tensor,
    is_sound: tl.tensor,
    vocab_size: tl.tensor,
    num_candidates: tl.tensor,
    NUM_ROWS: tl.constexpr,
    HAS_LOG_Q: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """Ids, ln q and logits of row k's candidates; nothing at the bonus row, no logits of an unsound one."""
    lane = tl.arange(0, CANDIDATES)
    at = (request * (NUM_ROWS - 1) + k) * num_candidates + lane
    is_lane = (lane < num_candidates) & (k < NUM_ROWS - 1)
    ids, log_q = load_candidates(candidate_ptr, log_q_ptr, at, is_lane, HAS_LOG_Q)
    logits_at = logits_ptr + (request * NUM_ROWS + k) * vocab_size + ids
    return ids, log_q, tl.load(logits_at, mask=(ids >= 0) & is_sound, other=float("-inf")).to(tl.float32)


@kernel
def _finalise_block_kernel(
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    outside_mass_ptr: tl.tensor,
    noisy_ptr: tl.tensor,
    noisy_id_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    anchor_position_ptr: tl.tensor,
    step_ptr: tl.tensor,
    verdict_ptr: tl.tensor,
    num_requests: tl.tensor,
    num_tiles: tl.tensor,
    num_candidates: tl.tensor,
    vocab_size: tl.tensor,
    NUM_ROWS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    HAS_LOG_Q: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    ACCEPT: tl.constexpr,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    by_ratio = (tl.load(temperature_ptr + request) >= GREEDY_BELOW) & (not ALL_GREEDY)
    seed, position = tl.load(seed_ptr + request), tl.load(anchor_position_ptr + request)
    mixed_seed = seed ^ (tl.load(step_ptr + request) << 32)
    accepted, is_open, num_zero_q = 0, 1, 0
    log_pi, stop_log_pi, log_u_before = 0.0, 0.0, 0.0
    for k in range(NUM_ROWS):  # the last row has no draft
        row = request * NUM_ROWS + k
        best_id, log_mass, outside, _noisy, noisy_id, fault = join_row(
            best_ptr, best_id_ptr, mass_ptr, outside_mass_ptr, noisy_ptr, noisy_id_ptr, row, num_tiles, TILES
        )
        has_row = k < NUM_ROWS - 1
        draft = tl.load(draft_ptr + request * (NUM_ROWS - 1) + k, mask=has_row, other=-1)
        is_judged = (draft >= 0) & (fault == 0)
        keeps = is_judged & (by_ratio | (draft == best_id))
        ids, log_q, logits = _read_candidates(
            candidate_ptr,
            log_q_ptr,
            logits_ptr,
            request,
            k,
            fault == 0,
            vocab_size,
            num_candidates,
            NUM_ROWS,
            HAS_LOG_Q,
            CANDIDATES,
        )
        is_drafted = (ids == draft) & (ids >= 0) & (log_q == log_q)
        draft_log_q = tl.max(tl.where(is_drafted, log_q, float("-inf")), axis=0)
        is_possible = draft_log_q > float("-inf")
        num_zero_q += (by_ratio & (draft >= 0) & (not is_possible)).to(tl.int32)
        log_p = tl.load(logits_ptr + row * vocab_size + draft, mask=is_judged, other=0.0).to(tl.float32) - log_mass
        log_ratio = tl.where(is_possible, log_p - tl.where(is_possible, draft_log_q, 0.0), float("-inf"))
        log_h = log_threshold(log_pi, outside, logits - log_mass, log_q)
        log_h = tl.where(is_judged, log_h, log_pi)
        passes = by_ratio & (is_open > 0) & (k > 0) & (log_u_before < log_h)
        accepted = tl.where(passes, k, accepted)
        stop_log_pi = tl.where(passes, log_pi, stop_log_pi)
        log_pi = tl.minimum(log_pi + log_ratio, 0.0)
        log_u_before = tl.log(uniform_of_token(key_state(mixed_seed, position + k, ACCEPT), 0))
        is_open = is_open & keeps.to(tl.int32)
        accepted += tl.where(by_ratio, 0, is_open)

    row = request * NUM_ROWS + accepted
    best_id, log_mass, outside, noisy, noisy_id, fault = join_row(
        best_ptr, best_id_ptr, mass_ptr, outside_mass_ptr, noisy_ptr, noisy_id_ptr, row, num_tiles, TILES
    )
    has_row = accepted < NUM_ROWS - 1
    draft = tl.load(draft_ptr + request * (NUM_ROWS - 1) + accepted, mask=has_row, other=-1)
    ids, log_q, logits = _read_candidates(
        candidate_ptr,
        log_q_ptr,
        logits_ptr,
        request,
        accepted,
        fault == 0,
        vocab_size,
        num_candidates,
        NUM_ROWS,
        HAS_LOG_Q,
        CANDIDATES,
    )
    gumbel = gumbel_of_token(key_state(seed, position + accepted, 0), ids)
    residual, is_left = residual_of_stop(logits - log_mass, log_q - stop_log_pi, log_mass, noisy)
    weights = tl.where((draft >= 0) & is_left, residual, logits) + gumbel
    drawn_id = noisiest_id(ids, weights, noisy, noisy_id)
    bonus_id = tl.where(by_ratio, drawn_id, best_id)
    tl.store(verdict_ptr + request, accepted)
    tl.store(verdict_ptr + num_requests + request, tl.where(fault == 0, bonus_id, -1))
    tl.store(verdict_ptr + 2 * num_requests + request, fault)
    tl.store(verdict_ptr + 3 * num_requests + request, num_zero_q)


def finalise_block_triton(
    tiles: VocabStatistics,
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    candidates: CandidateRows | GivenCandidates,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
    method: VerifyMethod,
    *,
    all_greedy: bool = False,
    is_tempered: bool = True,
) -> Verdict:
    """Launch one program per request.

    Args:
        tiles: statistics of the rows, made with the same candidates (none for match and coupled).
        draft_ids_BK: int64, -1 ends a block.
        processed_BLV: float logits that the statistics are of.
        candidates: the drafter's support at each position.
        temperature_B: float; below 1e-5 greedy.
        seed_B: int64.
        anchor_position_B: int64.
        step_B: int64.
        method: of verification.
        all_greedy: every request is greedy, whatever the temperatures say.
        is_tempered: nothing of the logits is left to be divided; has to be so for `block`.
    """
    settings = (temperature_B, seed_B, anchor_position_B, step_B)
    if method != "block":
        given = GivenCandidates(candidates.ids_BKC, candidates.log_q_BKC)
        return Verdict(
            *finalise_rows_triton(
                tiles,
                draft_ids_BK,
                processed_BLV,
                given,
                *settings,
                judges_by_ratio=reads_q(method),
                all_greedy=all_greedy,
                is_tempered=is_tempered,
            )
        )
    assert is_tempered, "`block` reads logits as they are"
    num_requests, _, vocab_size = processed_BLV.shape
    num_tiles = tiles.best_BLS.shape[2]
    launch = verdict_launch(draft_ids_BK, processed_BLV, candidates, *settings, tiles.best_BLS, all_greedy=all_greedy)
    with torch.cuda.device_of(processed_BLV):
        _finalise_block_kernel[(num_requests,)](
            *(values.contiguous() for values in tiles),
            *launch.operands,
            num_requests,
            num_tiles,
            candidates.ids_BKC.shape[2],
            vocab_size,
            TILES=triton.next_power_of_2(num_tiles),
            **launch.constants,
        )
    return Verdict(*launch.verdict)
