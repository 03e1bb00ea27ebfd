"""Pick one token per row: argmax for greedy rows, Gumbel-max for the others. R rows, V vocabulary.

    id = argmax over v of (z[v] + g[v]),  g = 0 for greedy rows, else Gumbel noise keyed by (seed, position, v)

z is what `target_distribution.process_logits` returns. Ties go to the lowest id. A row that has no sound maximum (NaN
or +inf anywhere, or everything -inf) gets NO_TOKEN: an id is never picked from a NaN. The kernel's noise differs from
the reference's by the rounding of a logarithm, so an id may differ where two noisy scores lie within 1e-5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import noise
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.noise import gumbel_of_token, key_state
from paceline.ops.target_distribution import GREEDY_BELOW, rows_are_greedy

NO_TOKEN = -1
_TILE = 2048  # ids per program


def row_is_bad(scores_RV: Tensor) -> Tensor:
    """Tell which rows hold NaN or +inf, or nothing but -inf.

    Args:
        scores_RV: float logits, raw or processed; any number of leading dimensions.

    Returns:
        bool, one entry per row.
    """
    return ~scores_RV.amax(dim=-1).isfinite()  # amax hands a NaN on


def pick_largest(scores_RV: Tensor) -> Tensor:
    """Give each row's argmax, the lowest id among equals, or NO_TOKEN for a bad row.

    Args:
        scores_RV: float [R, V].

    Returns:
        int64 [R].
    """
    best_R, ids_R = scores_RV.max(dim=-1)
    return ids_R.masked_fill(~best_R.isfinite(), NO_TOKEN)


def sample_tokens_reference(
    processed_RV: Tensor, temperature_R: Tensor, seed_R: Tensor, position_R: Tensor, domain: int
) -> Tensor:
    """The definition; `seed_R` holds the step already."""
    noise_RV = noise.gumbel_noise(seed_R, position_R, processed_RV.shape[1], domain=domain)
    noise_RV.masked_fill_(rows_are_greedy(temperature_R).unsqueeze(1), 0.0)
    return pick_largest(processed_RV.float() + noise_RV)


@kernel
def _sample_tokens_kernel(
    scores_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    vocab_size: tl.tensor,
    DOMAIN: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    is_inside = ids < vocab_size
    scores = tl.load(scores_ptr + row.to(tl.int64) * vocab_size + ids, mask=is_inside, other=float("-inf"))
    scores = scores.to(tl.float32)
    has_nan = tl.max((scores != scores).to(tl.int32), axis=0)
    scores = tl.where(scores == scores, scores, float("-inf"))
    if tl.load(temperature_ptr + row) >= GREEDY_BELOW:
        scores += gumbel_of_token(key_state(tl.load(seed_ptr + row), tl.load(position_ptr + row), DOMAIN), ids)
    best = tl.max(scores, axis=0)
    out = row * tl.num_programs(1) + tile
    tl.store(best_ptr + out, tl.where(has_nan > 0, float("nan"), best))
    tl.store(best_id_ptr + out, tl.min(tl.where(scores == best, ids, 0x7FFF_FFFF), axis=0))


def sample_tokens_triton(
    processed_RV: Tensor, temperature_R: Tensor, seed_R: Tensor, position_R: Tensor, domain: int
) -> Tensor:
    """Launch one program per row and tile; the tiles' winners are compared in torch, NaN above all of them."""
    num_rows, vocab_size = processed_RV.shape
    shape = (num_rows, triton.cdiv(vocab_size, _TILE))
    best_RS = torch.empty(shape, dtype=torch.float32, device=processed_RV.device)
    best_ids_RS = torch.empty(shape, dtype=torch.int64, device=processed_RV.device)
    with torch.cuda.device_of(processed_RV):
        _sample_tokens_kernel[shape](
            processed_RV.contiguous(),
            temperature_R.contiguous(),
            seed_R.contiguous(),
            position_R.contiguous(),
            best_RS,
            best_ids_RS,
            vocab_size,
            DOMAIN=domain,
            GREEDY_BELOW=GREEDY_BELOW,
            TILE=_TILE,
        )
    tile_R = pick_largest(best_RS)  # the first tile among equals holds the lowest ids
    return torch.where(tile_R >= 0, best_ids_RS.gather(1, tile_R.clamp(min=0).unsqueeze(1)).squeeze(1), NO_TOKEN)


def sample_tokens(
    processed_RV: Tensor,
    *,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    domain: int = noise.TARGET,
    step_R: Tensor | None = None,
    all_greedy: bool = False,
) -> Tensor:
    """Draw one token per row from softmax of its processed logits.

    Args:
        processed_RV: float logits after temperature and truncation; raw logits for greedy rows.
        temperature_R: float; only tells greedy rows from others, it is not applied again.
        seed_R: int64.
        position_R: int64 absolute position just before the token that is drawn.
        domain: noise.TARGET for the target's own draws, noise.DRAFT for a drafter's.
        step_R: int64 step index to mix into the seed, as drafters do; None for target draws.
        all_greedy: every row is greedy (the host knows this from the requests); no noise is made at all.

    Returns:
        int64 [R]; NO_TOKEN (-1) marks a bad row, see `row_is_bad`. Clamp it at 0 before it indexes an embedding.

    Raises:
        ShapeError: a setting does not have one entry per row.
    """
    if all_greedy:
        return pick_largest(processed_RV)
    num_rows = processed_RV.shape[0]
    for name, setting in (("temperature", temperature_R), ("seed", seed_R), ("position", position_R)):
        if setting.shape != (num_rows,):
            raise ShapeError(name, expected=[num_rows], found=setting.shape)
    if step_R is not None:
        seed_R = noise.mix_step(seed_R, step_R)
    run = choose("sample_tokens", processed_RV, sample_tokens_reference, sample_tokens_triton)
    return run(processed_RV, temperature_R, seed_R, position_R, domain)
