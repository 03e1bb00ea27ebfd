"""One pass over the target's logits: all that verification needs to know of a row but its candidates' own logits.

Per tile of a row: the largest logit and its lowest id; the sum of exponentials, of all ids and of those that are no
candidates of the drafter; the largest logit plus Gumbel noise among ids that are no candidates, and its lowest id.
The noisy maximum needs no normaliser: outside the candidates q = 0, so the residual max(p - q, 0) is p itself there.
A NaN is never compared: it counts as -inf, and makes its tile's maximum NaN.

B requests, K drafts, L = K + 1 rows, C candidates, V vocabulary, S tiles of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops import noise
from paceline.ops.dispatch import kernel, tl, triton
from paceline.ops.largest_ids import largest_of_runs
from paceline.ops.noise import gumbel_of_token, key_state
from paceline.ops.target_distribution import GREEDY_BELOW, LOWEST_TEMPERATURE, rows_are_greedy, tempered

TILE = 2048  # ids per program
_NO_ID = torch.iinfo(torch.int64).max


class VocabStatistics(NamedTuple):
    """Statistics of every tile; ids are counted from the row's start.

    Attributes:
        best_BLS: float32; NaN where the tile holds one.
        best_ids_BLS: int64.
        mass_BLS: float32, sum of exp(logit - best).
        outside_mass_BLS: the same of ids that are no candidates.
        noisy_BLS: float32, -inf where all are candidates; for greedy requests without noise.
        noisy_ids_BLS: int64; meaningless where `noisy_BLS` is -inf.
    """

    best_BLS: Tensor
    best_ids_BLS: Tensor
    mass_BLS: Tensor
    outside_mass_BLS: Tensor
    noisy_BLS: Tensor
    noisy_ids_BLS: Tensor


def vocab_statistics_reference(
    logits_BLV: Tensor, candidate_ids_BKC: Tensor, temperature_B: Tensor, seed_B: Tensor, anchor_position_B: Tensor
) -> VocabStatistics:
    """The definition; arguments as for `vocab_statistics_triton`."""
    num_requests, num_rows, vocab_size = logits_BLV.shape
    position_BL = anchor_position_B.unsqueeze(1) + torch.arange(num_rows, device=logits_BLV.device)
    seed_BL = seed_B.unsqueeze(1).expand_as(position_BL)
    noise_RV = noise.gumbel_noise(seed_BL.flatten(), position_BL.flatten(), vocab_size, domain=noise.TARGET)
    noise_BLV = noise_RV.view(logits_BLV.shape).masked_fill(rows_are_greedy(temperature_B)[:, None, None], 0.0)
    # One column more than V takes what is padding.
    is_candidate_BLW = torch.zeros(num_requests, num_rows, vocab_size + 1, dtype=torch.bool, device=logits_BLV.device)
    columns_BKC = candidate_ids_BKC.masked_fill(candidate_ids_BKC < 0, vocab_size)
    is_candidate_BLW[:, : num_rows - 1].scatter_(2, columns_BKC, True)

    num_tiles = -(-vocab_size // TILE)
    padding = (0, num_tiles * TILE - vocab_size)
    raw_BLV = logits_BLV.float()
    logits_BLST = _tiles(raw_BLV.masked_fill(raw_BLV.isnan(), -torch.inf), padding)
    outside_BLST = _tiles(raw_BLV.masked_fill(raw_BLV.isnan() | is_candidate_BLW[..., :-1], -torch.inf), padding)
    first_S = torch.arange(num_tiles, device=logits_BLV.device) * TILE
    best_BLS, best_ids_BLS = logits_BLST.max(dim=-1)
    shift_BLS1 = best_BLS.masked_fill(~best_BLS.isfinite(), 0.0).unsqueeze(-1)
    noisy_BLS, noisy_ids_BLS = (outside_BLST + _tiles(noise_BLV, padding, value=0.0)).max(dim=-1)
    has_nan_BLS = _tiles(raw_BLV, padding).isnan().any(dim=-1)
    return VocabStatistics(
        best_BLS.masked_fill(has_nan_BLS, torch.nan),
        best_ids_BLS + first_S,
        (logits_BLST - shift_BLS1).clamp(max=0.0).exp().sum(dim=-1),
        (outside_BLST - shift_BLS1).clamp(max=0.0).exp().sum(dim=-1),
        noisy_BLS,
        noisy_ids_BLS + first_S,
    )


def _tiles(values_BLV: Tensor, padding: tuple[int, int], value: float = -torch.inf) -> Tensor:
    padded: Tensor = torch.nn.functional.pad(values_BLV, padding, value=value)
    return padded.view(*padded.shape[:2], -1, TILE)


@kernel
def best_of_tile(logits: tl.tensor) -> tl.tensor:
    """In a kernel: logits with -inf for NaN, the largest of them, and whether there was a NaN, an integer."""
    has_nan = tl.max((logits != logits).to(tl.int32), axis=0)
    logits = tl.where(logits == logits, logits, float("-inf"))
    return logits, tl.max(logits, axis=0), has_nan


@kernel
def _vocab_statistics_kernel(
    logits_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    anchor_position_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    outside_mass_ptr: tl.tensor,
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
    row, tile = tl.program_id(0), tl.program_id(1)
    request, index = row // num_rows, row % num_rows
    ids = tile * TILE + tl.arange(0, TILE)
    is_inside = ids < vocab_size
    logits = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + ids, mask=is_inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    temperature = tl.load(temperature_ptr + request)
    if not IS_TEMPERED:
        logits = tempered(logits, temperature, GREEDY_BELOW, LOWEST)
    logits, best, has_nan = best_of_tile(logits)
    best_id = tl.min(tl.where(logits == best, ids, 0x7FFF_FFFF), axis=0)
    out = row * tl.num_programs(1) + tile
    tl.store(best_ptr + out, tl.where(has_nan > 0, float("nan"), best))
    tl.store(best_id_ptr + out, best_id)
    shift = tl.where((best > float("-inf")) & (best < float("inf")), best, 0.0)
    weights = tl.exp(tl.minimum(logits - shift, 0.0))  # the bound is for rows with +inf, whose sums say nothing
    is_outside = is_inside
    if index < num_rows - 1:  # the bonus row has no candidates
        first = (request * (num_rows - 1) + index).to(tl.int64) * NUM_CANDIDATES
        for c in range(NUM_CANDIDATES):
            candidate = tl.load(candidate_ptr + first + c).to(tl.int32)  # compared with every id
            if HAS_LOG_Q:  # with q = 0 it is none
                candidate = tl.where(tl.load(log_q_ptr + first + c) == float("-inf"), -1, candidate)
            is_outside &= ids != candidate
    noisy = tl.where(is_outside, logits, float("-inf"))
    if temperature >= GREEDY_BELOW:
        position = tl.load(anchor_position_ptr + request) + index
        noisy += gumbel_of_token(key_state(tl.load(seed_ptr + request), position, 0), ids)
    noisy_best = tl.max(noisy, axis=0)
    tl.store(mass_ptr + out, tl.sum(weights, axis=0))
    tl.store(outside_mass_ptr + out, tl.sum(tl.where(is_outside, weights, 0.0), axis=0))
    tl.store(noisy_ptr + out, noisy_best)
    tl.store(noisy_id_ptr + out, tl.min(tl.where(noisy == noisy_best, ids, 0x7FFF_FFFF), axis=0))


def vocab_statistics_triton(
    logits_BLV: Tensor,
    candidate_ids_BKC: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    anchor_position_B: Tensor,
    *,
    log_q_BKC: Tensor | None = None,
    all_greedy: bool = False,
    is_tempered: bool = True,
) -> VocabStatistics:
    """Launch one program per row and tile.

    Args:
        logits_BLV: float processed logits.
        candidate_ids_BKC: int64 ids that rows 0..K-1 leave out of their noisy maximum; padding is -1.
        temperature_B: float; below 1e-5 a request is greedy and gets no noise.
        seed_B: int64.
        anchor_position_B: int64; row i draws with the noise of position anchor + i.
        log_q_BKC: float32; candidates with -inf are none. None takes all of them for candidates.
        all_greedy: every request is greedy, whatever the temperatures say; only the best logits and their ids are
            found, in tiles of another size, and the other statistics mean nothing.
        is_tempered: nothing of the logits is left to be divided by temperatures.
    """
    num_requests, num_rows, vocab_size = logits_BLV.shape
    if all_greedy:
        best_RS, best_ids_RS = largest_of_runs(logits_BLV.reshape(-1, vocab_size))
        best_BLS, best_ids_BLS = (found.view(num_requests, num_rows, -1) for found in (best_RS, best_ids_RS))
        return VocabStatistics(best_BLS, best_ids_BLS, best_BLS, best_BLS, best_BLS, best_ids_BLS)
    num_tiles = triton.cdiv(vocab_size, TILE)
    shape = (num_requests, num_rows, num_tiles)
    numbers = [torch.empty(shape, dtype=torch.float32, device=logits_BLV.device) for _ in range(4)]
    ids = [torch.empty(shape, dtype=torch.int64, device=logits_BLV.device) for _ in range(2)]
    found = VocabStatistics(numbers[0], ids[0], numbers[1], numbers[2], numbers[3], ids[1])
    with torch.cuda.device_of(logits_BLV):
        _vocab_statistics_kernel[(num_requests * num_rows, num_tiles)](
            logits_BLV.contiguous(),
            candidate_ids_BKC.contiguous(),
            found.best_BLS if log_q_BKC is None else log_q_BKC.contiguous(),
            temperature_B.contiguous(),
            seed_B.contiguous(),
            anchor_position_B.contiguous(),
            *found,
            num_rows,
            vocab_size,
            NUM_CANDIDATES=candidate_ids_BKC.shape[2],
            HAS_LOG_Q=log_q_BKC is not None,
            IS_TEMPERED=is_tempered,
            GREEDY_BELOW=GREEDY_BELOW,
            LOWEST=LOWEST_TEMPERATURE,
            TILE=TILE,
        )
    return found


class RowStatistics(NamedTuple):
    """The tiles of every row joined: as in `VocabStatistics`, and the log of the whole and of the outside mass."""

    best_BL: Tensor
    best_ids_BL: Tensor
    log_mass_BL: Tensor
    outside_BL: Tensor
    noisy_BL: Tensor
    noisy_ids_BL: Tensor


def join_tiles(tiles: VocabStatistics) -> RowStatistics:
    """Reduce tiles to rows, in torch.

    Args:
        tiles: of either implementation.

    Returns:
        best_BL is NaN where any tile is; log_mass_BL is the logarithm of the sum of exponentials; outside_BL is the
        probability of ids that are no candidates; both say nothing where best_BL is not finite.
    """
    best_BL = tiles.best_BLS.amax(dim=-1)
    shift_BLS = tiles.best_BLS.masked_fill(~tiles.best_BLS.isfinite(), -torch.inf) - best_BL.unsqueeze(-1)
    scale_BLS = torch.where(tiles.best_BLS == -torch.inf, 0.0, shift_BLS.exp())
    mass_BL = (tiles.mass_BLS * scale_BLS).sum(dim=-1)
    noisy_BL = tiles.noisy_BLS.amax(dim=-1)
    return RowStatistics(
        best_BL,
        _lowest_id(tiles.best_BLS, tiles.best_ids_BLS, best_BL),
        best_BL + mass_BL.log(),
        (tiles.outside_mass_BLS * scale_BLS).sum(dim=-1) / mass_BL,
        noisy_BL,
        _lowest_id(tiles.noisy_BLS, tiles.noisy_ids_BLS, noisy_BL),
    )


def _lowest_id(values_BLS: Tensor, ids_BLS: Tensor, best_BL: Tensor) -> Tensor:
    return ids_BLS.masked_fill(values_BLS != best_BL.unsqueeze(-1), _NO_ID).amin(dim=-1)


@kernel
def lowest_id(is_best: tl.tensor, ids: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """In a kernel: the lowest of the ids that are marked, along an axis; beyond all ids where none is."""
    return tl.min(tl.where(is_best, ids, 0x7FFF_FFFF_FFFF_FFFF), axis=AXIS)


@kernel
def join_best(best_ptr: tl.tensor, at: tl.tensor, is_tile: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """In a kernel: the largest logit of rows, whose tiles lie along AXIS.

    Returns:
        Of every tile the largest logit, -inf for NaN; of every row that, whether it is finite, and what is wrong with
        the row: 0 nothing, 1 NaN or +inf, 2 all -inf.
    """
    best = tl.load(best_ptr + at, mask=is_tile, other=float("-inf"))
    has_nan = tl.max((best != best).to(tl.int32), axis=AXIS)
    best = tl.where(best == best, best, float("-inf"))
    row_best = tl.max(best, axis=AXIS)
    is_finite = (row_best > float("-inf")) & (row_best < float("inf"))
    fault = tl.where((has_nan > 0) | (row_best == float("inf")), 1, tl.where(is_finite, 0, 2))
    return best, row_best, is_finite, fault


@kernel
def join_row(
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    outside_mass_ptr: tl.tensor,
    noisy_ptr: tl.tensor,
    noisy_id_ptr: tl.tensor,
    row: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
) -> tl.tensor:
    """In a kernel: `join_tiles` of one row, as best id, ln of the mass, outside probability, noisy best and its id, and
    what is wrong with the row: 0 nothing, 1 NaN or +inf, 2 all -inf.
    """
    tile = tl.arange(0, TILES)
    at, is_tile = row * num_tiles + tile, tile < num_tiles
    best, row_best, is_finite, fault = join_best(best_ptr, at, is_tile, 0)
    best_id = lowest_id(is_tile & (best == row_best), tl.load(best_id_ptr + at, mask=is_tile, other=0), 0)
    row_best = tl.where(is_finite, row_best, 0.0)
    scale = tl.where(best < float("inf"), tl.exp(tl.minimum(best - row_best, 0.0)), 0.0)
    mass = tl.sum(tl.load(mass_ptr + at, mask=is_tile, other=0.0) * scale, axis=0)
    mass = tl.where(fault == 0, mass, 1.0)
    outside = tl.sum(tl.load(outside_mass_ptr + at, mask=is_tile, other=0.0) * scale, axis=0) / mass
    noisy = tl.load(noisy_ptr + at, mask=is_tile, other=float("-inf"))
    noisy_ids = tl.load(noisy_id_ptr + at, mask=is_tile, other=0)
    noisy_best = tl.max(noisy, axis=0)
    noisy_id = lowest_id(is_tile & (noisy == noisy_best), noisy_ids, 0)
    return best_id, row_best + tl.log(mass), outside, noisy_best, noisy_id, fault
