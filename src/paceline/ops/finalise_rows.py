"""The verdict of methods that judge each row by itself, for all rows of a request at once: part of `finalise_block`.

Only `block` has to walk: whether it keeps a draft depends on those before it. For greedy, standard, match and coupled
the kept drafts are those before the first row that refuses, so rows are joined, judged and searched in parallel, and
the draw at the row that stopped is picked out of what was loaded already. One program waits for memory three times, not
for every row. Where noise is made for the stop row alone (`stop_row.py`), the kernel runs twice: it finds that row, and
later it draws.

B requests, K drafts, L = K + 1 rows, C candidates, V vocabulary, S tiles of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.acceptance import GivenCandidates
from paceline.ops.dispatch import kernel, tl, triton
from paceline.ops.noise import gumbel_of_token, key_state, uniform_of_token
from paceline.ops.stop_row import RowMasses, StopNoise
from paceline.ops.target_distribution import LOWEST_TEMPERATURE, tempered
from paceline.ops.verdict_parts import load_candidates, noisiest_id, residual_of_stop, verdict_launch
from paceline.ops.vocab_statistics import VocabStatistics, join_best, lowest_id

_FEW_NUMBERS = 2048  # of one statistic, for four warps


@kernel
def _at(values: tl.tensor, is_row: tl.tensor) -> tl.tensor:
    """The entry of the one row that is marked, along axis 0."""
    return tl.sum(tl.where(is_row, values, 0), axis=0)


@kernel
def _finalise_rows_kernel(
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    mass_ptr: tl.tensor,
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
    num_stop_tiles: tl.tensor,
    num_candidates: tl.tensor,
    vocab_size: tl.tensor,
    NUM_ROWS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    LOWEST: tl.constexpr,
    IS_TEMPERED: tl.constexpr,
    READS_Q: tl.constexpr,
    IS_DRAW: tl.constexpr,
    HAS_LOG_Q: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    ACCEPT: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STOP_TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + request)
    is_greedy = (temperature < GREEDY_BELOW) | ALL_GREEDY
    row = tl.arange(0, ROWS)
    flat = request * NUM_ROWS + row
    tile = tl.arange(0, TILES)
    at = flat[:, None] * num_tiles + tile[None, :]
    is_tile = (row[:, None] < NUM_ROWS) & (tile[None, :] < num_tiles)

    best, row_best, is_finite, fault = join_best(best_ptr, at, is_tile, 1)
    best_ids = tl.load(best_id_ptr + at, mask=is_tile, other=0)
    best_id = lowest_id(is_tile & (best == row_best[:, None]), best_ids, 1)
    row_noisy, noisy_id = row_best, best_id
    if (not ALL_GREEDY) and (IS_DRAW and STOP_TILES == 0):
        noisy = tl.load(noisy_ptr + at, mask=is_tile, other=float("-inf"))
        row_noisy = tl.max(noisy, axis=1)
        noisy_ids = tl.load(noisy_id_ptr + at, mask=is_tile, other=0)
        noisy_id = lowest_id(is_tile & (noisy == row_noisy[:, None]), noisy_ids, 1)

    has_draft = row < NUM_ROWS - 1
    draft = tl.load(draft_ptr + request * (NUM_ROWS - 1) + row, mask=has_draft, other=-1)
    is_judged = (draft >= 0) & (fault == 0)
    keeps = is_judged & (draft == tl.where(is_greedy, best_id, noisy_id))
    seed, position = tl.load(seed_ptr + request), tl.load(anchor_position_ptr + request)
    num_zero_q, log_mass = 0, row_best
    if READS_Q:
        row_best = tl.where(is_finite, row_best, 0.0)
        scale = tl.where(best < float("inf"), tl.exp(tl.minimum(best - row_best[:, None], 0.0)), 0.0)
        mass = tl.sum(tl.load(mass_ptr + at, mask=is_tile, other=0.0) * scale, axis=1)
        log_mass = row_best + tl.log(tl.where(fault == 0, mass, 1.0))
        lane = tl.arange(0, CANDIDATES)
        is_lane = has_draft[:, None] & (lane[None, :] < num_candidates)
        lane_at = (request * (NUM_ROWS - 1) + row[:, None]) * num_candidates + lane[None, :]
        ids, log_q = load_candidates(candidate_ptr, log_q_ptr, lane_at, is_lane, HAS_LOG_Q)
        is_read = (ids >= 0) & (fault == 0)[:, None]
        logits_at = logits_ptr + flat[:, None] * vocab_size + ids
        logits = tl.load(logits_at, mask=is_read, other=float("-inf")).to(tl.float32)
        drafted = tl.load(logits_ptr + flat * vocab_size + draft, mask=is_judged, other=0.0).to(tl.float32)
        if not IS_TEMPERED:
            logits = tempered(logits, temperature, GREEDY_BELOW, LOWEST)
            drafted = tempered(drafted, temperature, GREEDY_BELOW, LOWEST)

        is_drafted = (ids == draft[:, None]) & (ids >= 0) & (log_q == log_q)
        draft_log_q = tl.max(tl.where(is_drafted, log_q, float("-inf")), axis=1)
        is_possible = draft_log_q > float("-inf")
        is_counted = (draft >= 0) & (draft_log_q == float("-inf")) & (not is_greedy)
        num_zero_q = tl.sum(is_counted.to(tl.int32), axis=0)
        state = key_state(seed ^ (tl.load(step_ptr + request) << 32), position + row, ACCEPT)
        log_u = tl.log(uniform_of_token(state, 0))
        passes = is_judged & is_possible & (drafted - log_mass > log_u + draft_log_q)
        keeps = tl.where(is_greedy, keeps, passes)

    accepted = tl.min(tl.where(keeps, NUM_ROWS - 1, tl.minimum(row, NUM_ROWS - 1)), axis=0)
    tl.store(verdict_ptr + request, accepted)
    if IS_DRAW:
        is_stop = row == accepted
        stop_fault = _at(fault, is_stop)
        stop_noisy, own_id = _at(row_noisy, is_stop), _at(noisy_id, is_stop)
        if STOP_TILES > 0:
            stop_tile = tl.arange(0, STOP_TILES)
            stop_at, is_tile_of_stop = request * num_stop_tiles + stop_tile, stop_tile < num_stop_tiles
            noisy_of_stop = tl.load(noisy_ptr + stop_at, mask=is_tile_of_stop, other=float("-inf"))
            ids_of_stop = tl.load(noisy_id_ptr + stop_at, mask=is_tile_of_stop, other=0)
            stop_noisy = tl.max(noisy_of_stop, axis=0)
            own_id = lowest_id(is_tile_of_stop & (noisy_of_stop == stop_noisy), ids_of_stop, 0)
        bonus_id = tl.where(is_greedy, _at(best_id, is_stop), own_id)
        if READS_Q:
            ids, log_q, logits = _at(ids, is_stop[:, None]), _at(log_q, is_stop[:, None]), _at(logits, is_stop[:, None])
            stop_mass = _at(log_mass, is_stop)
            gumbel = gumbel_of_token(key_state(seed, position + accepted, 0), ids)
            residual, is_left = residual_of_stop(logits - stop_mass, log_q, stop_mass, stop_noisy)
            is_refusal = _at(tl.where(draft >= 0, 1, 0), is_stop) > 0
            weights = tl.where(is_refusal & is_left, residual, logits) + gumbel
            drawn_id = noisiest_id(ids, weights, stop_noisy, own_id)
            bonus_id = tl.where(is_greedy, bonus_id, drawn_id)
        tl.store(verdict_ptr + num_requests + request, tl.where(stop_fault == 0, bonus_id, -1))
        tl.store(verdict_ptr + 2 * num_requests + request, stop_fault)
        tl.store(verdict_ptr + 3 * num_requests + request, num_zero_q)


def finalise_rows_triton(
    tiles: VocabStatistics | RowMasses,
    draft_ids_BK: Tensor,
    processed_BLV: Tensor,
    candidates: GivenCandidates,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    step_B: Tensor,
    *,
    judges_by_ratio: bool,
    all_greedy: bool = False,
    is_tempered: bool = True,
    stop_noise: StopNoise | None = None,
) -> Tensor:
    """Launch one program per request; int64 [4, B], the parts of a `Verdict`.

    Args:
        tiles: statistics of the rows, made with the same candidates; masses alone, for `standard`, draw with noise of
            the stop rows, and without that only the kept drafts are counted, and the other parts mean nothing.
        draft_ids_BK: int64, -1 ends a block.
        processed_BLV: float logits that the statistics are of.
        candidates: the drafter's support at each position; none where rows are judged by equality.
        temperature_B: float; below 1e-5 greedy.
        seed_B: int64.
        anchor_position_B: int64.
        step_B: int64.
        judges_by_ratio: `standard`; else drafts are compared with the rows' own draws.
        all_greedy: every request is greedy, whatever the temperatures say.
        is_tempered: nothing of the logits is left to be divided.
        stop_noise: of the rows that stopped.
    """
    num_requests, num_rows, vocab_size = processed_BLV.shape
    has_masses_alone = isinstance(tiles, RowMasses)
    assert judges_by_ratio or not has_masses_alone, "draws of every row need noise of every row"
    noisy, noisy_ids = tiles.best_BLS, tiles.best_ids_BLS
    if isinstance(tiles, VocabStatistics):
        noisy, noisy_ids = tiles.noisy_BLS, tiles.noisy_ids_BLS
    elif stop_noise is not None:
        noisy, noisy_ids = stop_noise
    num_stop_tiles = 0 if stop_noise is None else stop_noise.noisy_BS.shape[1]
    num_tiles = tiles.best_BLS.shape[2]
    rows, tile_lanes = triton.next_power_of_2(num_rows), triton.next_power_of_2(num_tiles)
    settings = (temperature_B, seed_B, anchor_position_B, step_B)
    launch = verdict_launch(draft_ids_BK, processed_BLV, candidates, *settings, tiles.best_BLS, all_greedy=all_greedy)
    with torch.cuda.device_of(processed_BLV):
        _finalise_rows_kernel[(num_requests,)](
            tiles.best_BLS.contiguous(),
            tiles.best_ids_BLS.contiguous(),
            tiles.mass_BLS.contiguous(),
            noisy.contiguous(),
            noisy_ids.contiguous(),
            *launch.operands,
            num_requests,
            num_tiles,
            num_stop_tiles,
            candidates.ids_BKC.shape[2],
            vocab_size,
            LOWEST=LOWEST_TEMPERATURE,
            IS_TEMPERED=is_tempered,
            READS_Q=judges_by_ratio,
            IS_DRAW=stop_noise is not None or not has_masses_alone,
            ROWS=rows,
            TILES=tile_lanes,
            STOP_TILES=0 if stop_noise is None else triton.next_power_of_2(num_stop_tiles),
            **launch.constants,
            num_warps=4 if rows * tile_lanes <= _FEW_NUMBERS else 8,
        )
    return launch.verdict
