"""Pick one token per row: argmax for greedy rows, Gumbel-max for the others. R rows, V vocabulary.

    id = argmax over v of (z[v] + g[v]),  g = 0 for greedy rows, else Gumbel noise keyed by (seed, position, v)

z is what `target_distribution.process_logits` returns. Ties go to the lowest id. A row that has no sound maximum (NaN
or +inf anywhere, or everything -inf) gets NO_TOKEN: an id is never picked from a NaN.
"""

from __future__ import annotations

from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import noise
from paceline.ops.target_distribution import rows_are_greedy

NO_TOKEN = -1


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
    num_rows, vocab_size = processed_RV.shape
    for name, setting in (("temperature", temperature_R), ("seed", seed_R), ("position", position_R)):
        if setting.shape != (num_rows,):
            raise ShapeError(name, expected=[num_rows], found=setting.shape)
    noise_RV = noise.gumbel_noise(seed_R, position_R, vocab_size, domain=domain, step_R=step_R)
    noise_RV = noise_RV.masked_fill(rows_are_greedy(temperature_R).unsqueeze(1), 0.0)
    return pick_largest(processed_RV.float() + noise_RV)
