"""Statistics for verification by ratio where noise is wanted at one row of each request: the one that stops its block.

    masses   per tile of every row: the largest logit, its lowest id, the sum of exponentials
    noise    per tile of the stop row: the largest logit plus Gumbel noise among ids that are no candidates, and its
             lowest id

`vocab_statistics.py` makes noise for every row, which is most of its arithmetic, and draws at one. Here a verdict comes
in between (`finalise_rows.py`), and the logits may be those before temperature: they are divided where they are read.

B requests, K drafts, L = K + 1 rows, C candidates, V vocabulary, S tiles of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops import noise
from paceline.ops.dispatch import kernel, tl, triton
from paceline.ops.noise import gumbel_of_token, key_state
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.target_distribution import (
    GREEDY_BELOW,
    LOWEST_TEMPERATURE,
    rows_are_greedy,
    temper_logits_reference,
    tempered,
)
from paceline.ops.vocab_statistics import best_of_tile

MASS_TILE = 4096  # ids per program
NOISE_TILE = 2048


class RowMasses(NamedTuple):
    """Of every tile; ids are counted from the row's start.

    Attributes:
        best_BLS: float32; NaN where the tile holds one.
        best_ids_BLS: int64.
        mass_BLS: float32, sum of exp(logit - best).
    """

    best_BLS: Tensor
    best_ids_BLS: Tensor
    mass_BLS: Tensor


class StopNoise(NamedTuple):
    """Of every tile of the stop rows.

    Attributes:
        noisy_BS: float32, -inf where all ids are candidates, and for greedy requests.
        noisy_ids_BS: int64; meaningless where `noisy_BS` is -inf.
    """

    noisy_BS: Tensor
    noisy_ids_BS: Tensor


def row_masses_reference(logits_BLV: Tensor, temperature_B: Tensor, *, is_tempered: bool) -> RowMasses:
    """The definition; arguments as for `row_masses_triton`."""
    tempered_BLV = logits_BLV.float() if is_tempered else temper_logits_reference(logits_BLV, temperature_B)
    has_nan_BLS = _tiles(tempered_BLV, MASS_TILE).isnan().any(dim=-1)
    tiles_BLST = _tiles(tempered_BLV.masked_fill(tempered_BLV.isnan(), -torch.inf), MASS_TILE)
    best_BLS, best_ids_BLS = tiles_BLST.max(dim=-1)
    shift_BLS1 = best_BLS.masked_fill(~best_BLS.isfinite(), 0.0).unsqueeze(-1)
    first_S = torch.arange(best_BLS.shape[2], device=logits_BLV.device) * MASS_TILE
    mass_BLS = (tiles_BLST - shift_BLS1).clamp(max=0.0).exp().sum(dim=-1)
    return RowMasses(best_BLS.masked_fill(has_nan_BLS, torch.nan), best_ids_BLS + first_S, mass_BLS)


def stop_noise_reference(
    logits_BLV: Tensor,
    accepted_B: Tensor,
    candidate_ids_BKC: Tensor,
    log_q_BKC: Tensor | None,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    *,
    is_tempered: bool,
) -> StopNoise:
    """The definition; arguments as for `stop_noise_triton`."""
    num_requests, _, vocab_size = logits_BLV.shape
    tempered_BLV = logits_BLV.float() if is_tempered else temper_logits_reference(logits_BLV, temperature_B)
    stop_BV = tempered_BLV[torch.arange(num_requests, device=accepted_B.device), accepted_B]
    if log_q_BKC is not None:
        candidate_ids_BKC = candidate_ids_BKC.masked_fill(log_q_BKC == -torch.inf, NO_TOKEN)
    # One row more for the bonus, which has no candidates, and one column more for padding.
    ids_BLC = torch.nn.functional.pad(candidate_ids_BKC, (0, 0, 0, 1), value=NO_TOKEN)
    ids_BC = ids_BLC[torch.arange(num_requests, device=accepted_B.device), accepted_B]
    is_candidate_BW = torch.zeros(num_requests, vocab_size + 1, dtype=torch.bool, device=logits_BLV.device)
    is_candidate_BW.scatter_(1, ids_BC.masked_fill(ids_BC < 0, vocab_size), True)
    noise_BV = noise.gumbel_noise(seed_B, anchor_position_B + accepted_B, vocab_size, domain=noise.TARGET)
    is_left_out_BV = is_candidate_BW[:, :-1] | stop_BV.isnan() | rows_are_greedy(temperature_B).unsqueeze(1)
    noisy_BS, ids_BS = _tiles((stop_BV + noise_BV).masked_fill(is_left_out_BV, -torch.inf), NOISE_TILE).max(dim=-1)
    return StopNoise(noisy_BS, ids_BS + torch.arange(noisy_BS.shape[1], device=ids_BS.device) * NOISE_TILE)


def _tiles(values: Tensor, tile: int) -> Tensor:
    padding = -values.shape[-1] % tile
    padded = torch.nn.functional.pad(values, (0, padding), value=-torch.inf)
    return padded.view(*values.shape[:-1], -1, tile)


@kernel
def _row_masses_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    IS_TEMPERED: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    is_inside = ids < vocab_size
    logits = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + ids, mask=is_inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    if not IS_TEMPERED:
        logits = tempered(logits, tl.load(temperature_ptr + row // num_rows), GREEDY_BELOW, LOWEST)
    logits, best, has_nan = best_of_tile(logits)
    out = row * tl.num_programs(1) + tile
    tl.store(best_ptr + out, tl.where(has_nan > 0, float("nan"), best))
    tl.store(best_id_ptr + out, tl.min(tl.where(logits == best, ids, 0x7FFF_FFFF), axis=0).to(tl.int64))
    shift = tl.where((best > float("-inf")) & (best < float("inf")), best, 0.0)
    # The bound is for rows with +inf, whose sums say nothing.
    tl.store(mass_ptr + out, tl.sum(tl.exp(tl.minimum(logits - shift, 0.0)), axis=0))


@kernel
def _stop_noise_kernel(
    logits_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    anchor_position_ptr: tl.tensor,
    noisy_ptr: tl.tensor,
    noisy_id_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    NUM_CANDIDATES: tl.constexpr,
    HAS_LOG_Q: tl.constexpr,
    IS_TEMPERED: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    LOWEST: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    request, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out = request * tl.num_programs(1) + tile
    temperature = tl.load(temperature_ptr + request).to(tl.float32)
    if temperature >= GREEDY_BELOW:
        accepted = tl.load(accepted_ptr + request)
        ids = tile * TILE + tl.arange(0, TILE)
        is_outside = ids < vocab_size
        row = request * num_rows + accepted
        logits = tl.load(logits_ptr + row * vocab_size + ids, mask=is_outside, other=float("-inf")).to(tl.float32)
        if not IS_TEMPERED:
            logits = tempered(logits, temperature, GREEDY_BELOW, LOWEST)
        has_candidates = accepted < num_rows - 1  # the bonus row has none
        first = (request * (num_rows - 1) + accepted) * NUM_CANDIDATES
        for c in tl.static_range(NUM_CANDIDATES):
            candidate = tl.load(candidate_ptr + first + c, mask=has_candidates, other=-1).to(tl.int32)
            if HAS_LOG_Q:  # with q = 0 it is none
                log_q = tl.load(log_q_ptr + first + c, mask=has_candidates, other=0.0)
                candidate = tl.where(log_q == float("-inf"), -1, candidate)
            is_outside &= ids != candidate
        noisy = logits + gumbel_of_token(
            key_state(tl.load(seed_ptr + request), tl.load(anchor_position_ptr + request) + accepted, 0), ids
        )
        noisy = tl.where(is_outside & (noisy == noisy), noisy, float("-inf"))
        best = tl.max(noisy, axis=0)
        tl.store(noisy_ptr + out, best)
        tl.store(noisy_id_ptr + out, tl.min(tl.where(noisy == best, ids, 0x7FFF_FFFF), axis=0).to(tl.int64))
    else:
        tl.store(noisy_ptr + out, float("-inf"))
        tl.store(noisy_id_ptr + out, tl.zeros((), tl.int64))


def row_masses_triton(logits_BLV: Tensor, temperature_B: Tensor, *, is_tempered: bool) -> RowMasses:
    """Launch one program per row and tile.

    Args:
        logits_BLV: float, processed, or all of it but for temperature.
        temperature_B: float.
        is_tempered: nothing is left to be divided.
    """
    num_requests, num_rows, vocab_size = logits_BLV.shape
    shape, device = (num_requests, num_rows, triton.cdiv(vocab_size, MASS_TILE)), logits_BLV.device
    best_BLS, mass_BLS = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    best_ids_BLS = torch.empty(shape, dtype=torch.int64, device=device)
    with torch.cuda.device_of(logits_BLV):
        _row_masses_kernel[(num_requests * num_rows, shape[2])](
            logits_BLV.contiguous(),
            temperature_B.contiguous(),
            best_BLS,
            best_ids_BLS,
            mass_BLS,
            num_rows,
            vocab_size,
            IS_TEMPERED=is_tempered,
            GREEDY_BELOW=GREEDY_BELOW,
            LOWEST=LOWEST_TEMPERATURE,
            TILE=MASS_TILE,
        )
    return RowMasses(best_BLS, best_ids_BLS, mass_BLS)


def stop_noise_triton(
    logits_BLV: Tensor,
    accepted_B: Tensor,
    candidate_ids_BKC: Tensor,
    log_q_BKC: Tensor | None,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    *,
    is_tempered: bool,
) -> StopNoise:
    """Launch one program per request and tile.

    Args:
        logits_BLV: as for `row_masses_triton`.
        accepted_B: int64 in [0, K], the row that stopped.
        candidate_ids_BKC: int64 ids that rows 0..K-1 leave out; padding is -1.
        log_q_BKC: float32; candidates with -inf are none. None takes all of them for candidates.
        temperature_B: float; below 1e-5 a request is greedy and draws nothing.
        seed_B: int64.
        anchor_position_B: int64; row i draws with the noise of position anchor + i.
        is_tempered: as for `row_masses_triton`.
    """
    num_requests, num_rows, vocab_size = logits_BLV.shape
    num_tiles, device = triton.cdiv(vocab_size, NOISE_TILE), logits_BLV.device
    noisy_BS = torch.empty(num_requests, num_tiles, dtype=torch.float32, device=device)
    noisy_ids_BS = torch.empty(num_requests, num_tiles, dtype=torch.int64, device=device)
    with torch.cuda.device_of(logits_BLV):
        _stop_noise_kernel[(num_requests, num_tiles)](
            logits_BLV.contiguous(),
            accepted_B.contiguous(),
            candidate_ids_BKC.contiguous(),
            noisy_BS if log_q_BKC is None else log_q_BKC.contiguous(),
            temperature_B.contiguous(),
            seed_B.contiguous(),
            anchor_position_B.contiguous(),
            noisy_BS,
            noisy_ids_BS,
            num_rows,
            vocab_size,
            NUM_CANDIDATES=candidate_ids_BKC.shape[2],
            HAS_LOG_Q=log_q_BKC is not None,
            IS_TEMPERED=is_tempered,
            GREEDY_BELOW=GREEDY_BELOW,
            LOWEST=LOWEST_TEMPERATURE,
            TILE=NOISE_TILE,
        )
    return StopNoise(noisy_BS, noisy_ids_BS)
