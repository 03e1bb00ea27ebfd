"""Intervals and paired tests. The unit is the prompt: tokens and steps of one prompt are not independent.

    bootstrap      resample prompts with replacement; percentiles of a mean, of a median, or of a ratio of sums
    sign test      2 * P(wins or more of n fair coins), capped at 1; ties are dropped and reported
    Wilcoxon       signed ranks, exact null distribution over all sign patterns, two-sided, zeros dropped; equal
                   magnitudes share their mean rank

Exact for every n that a prompt set has: the normal approximation of Wilcoxon is off by a factor of 1000 at n = 32.

Source: Wilcoxon 1945; Clopper and Pearson 1934; Efron 1979.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

NUM_RESAMPLES = 10_000
_BLOCK = 4_000_000  # resampled entries held at once


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval.

    Attributes:
        estimate: from the sample as it is.
        low: lower end.
        high: upper end.
        confidence: nominal coverage, such as 0.95.
        num_units: prompts (or pairs) that the sample holds.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    num_units: int


@dataclass(frozen=True)
class SignTest:
    """Wins against losses; `low` and `high` bound the true share of wins among decided pairs (Clopper-Pearson)."""

    wins: int
    losses: int
    ties: int
    p_value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedComparison:
    """Everything that is reported about two set-ups on the same prompts, differences B - A."""

    mean: Interval
    median: float
    sign: SignTest
    wilcoxon_p_value: float


def bootstrap_mean(
    values: Sequence[float], *, confidence: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile bootstrap of a mean.

    Args:
        values: one per prompt.
        confidence: coverage in (0, 1).
        num_resamples: bootstrap samples.
        seed: of the resampling; equal seeds give equal intervals.

    Raises:
        DataError: no values, or a value that is not finite.
    """
    return bootstrap_ratio(values, [1.0] * len(values), confidence=confidence, num_resamples=num_resamples, seed=seed)


def bootstrap_median(
    values: Sequence[float], *, confidence: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile bootstrap of a median.

    Args:
        values: one per prompt.
        confidence: coverage in (0, 1).
        num_resamples: bootstrap samples.
        seed: of the resampling; equal seeds give equal intervals.

    Raises:
        DataError: no values, or a value that is not finite.
    """
    array = _finite(values, "values")
    if not 0 < confidence < 1:
        raise DataError(f"confidence {confidence} is not between 0 and 1")
    generator = np.random.default_rng(seed)
    medians: list[NDArray[np.float64]] = []
    rows_left = num_resamples
    while rows_left > 0:
        num_rows = min(rows_left, max(1, _BLOCK // len(array)))
        indices = generator.integers(0, len(array), (num_rows, len(array)))
        medians.append(np.median(array[indices], axis=1))
        rows_left -= num_rows
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(medians), [tail, 1 - tail])
    return Interval(float(np.median(array)), float(low), float(high), confidence, len(array))


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of sum(numerators) / sum(denominators), such as committed tokens over steps.

    Args:
        numerators: one per prompt.
        denominators: one per prompt, >= 0; a resample in which they add up to 0 is left out.
        confidence: coverage in (0, 1).
        num_resamples: bootstrap samples.
        seed: of the resampling; equal seeds give equal intervals.

    Raises:
        DataError: no prompts, lengths that differ, a value that is not finite, or denominators that are all 0.
    """
    top, bottom = _finite(numerators, "numerators"), _finite(denominators, "denominators")
    if len(top) != len(bottom):
        raise DataError(f"{len(top)} numerators but {len(bottom)} denominators; there must be one of each per prompt")
    if not 0 < confidence < 1:
        raise DataError(f"confidence {confidence} is not between 0 and 1")
    if (bottom < 0).any() or bottom.sum() == 0:
        raise DataError("the denominators must be 0 or more and not all 0", hint="no step with drafts was taken")
    generator = np.random.default_rng(seed)
    num_units = len(top)
    ratios: list[NDArray[np.float64]] = []
    rows_left = num_resamples
    while rows_left > 0:
        num_rows = min(rows_left, max(1, _BLOCK // num_units))
        indices = generator.integers(0, num_units, (num_rows, num_units))
        sums, weights = top[indices].sum(axis=1), bottom[indices].sum(axis=1)
        ratios.append(sums[weights > 0] / weights[weights > 0])
        rows_left -= num_rows
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(ratios), [tail, 1 - tail])
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high), confidence, num_units)


def bootstrap_ratios(
    numerators: Sequence[Sequence[float]],
    denominators: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    num_resamples: int = 2_000,
    seed: int = 0,
) -> list[Interval | None]:
    """What `bootstrap_ratio` gives, for many ratios of the same prompts, over the same resamples.

    Args:
        numerators: a list per prompt, with an entry per ratio.
        denominators: likewise, >= 0; a resample in which a ratio's add up to 0 is left out for that ratio.
        confidence: coverage in (0, 1).
        num_resamples: bootstrap samples.
        seed: of the resampling; equal seeds give equal intervals.

    Returns:
        One per ratio; None where all denominators are 0.

    Raises:
        DataError: no prompts, lengths that differ, or a value that is not finite.
    """
    top, bottom = _finite(numerators, "numerators"), _finite(denominators, "denominators")
    if top.shape != bottom.shape or top.ndim != 2:
        raise DataError(f"numerators are {list(top.shape)} and denominators {list(bottom.shape)}; both need all pairs")
    if not 0 < confidence < 1:
        raise DataError(f"confidence {confidence} is not between 0 and 1")
    generator = np.random.default_rng(seed)
    num_units = len(top)
    parts: list[NDArray[np.float64]] = []
    rows_left = num_resamples
    while rows_left > 0:
        num_rows = min(rows_left, max(1, _BLOCK // num_units))
        drawn = generator.multinomial(num_units, np.full(num_units, 1 / num_units), size=num_rows).astype(np.float64)
        sums, weights = drawn @ top, drawn @ bottom
        parts.append(np.divide(sums, weights, out=np.full_like(sums, np.nan), where=weights > 0))
        rows_left -= num_rows
    ratios, tail = np.concatenate(parts), (1 - confidence) / 2
    found: list[Interval | None] = []
    for column, whole_top, whole_bottom in zip(ratios.T, top.sum(axis=0), bottom.sum(axis=0), strict=True):
        usable = column[~np.isnan(column)]
        if whole_bottom == 0 or len(usable) == 0:
            found.append(None)
            continue
        low, high = np.quantile(usable, [tail, 1 - tail])
        found.append(Interval(float(whole_top / whole_bottom), float(low), float(high), confidence, num_units))
    return found


def bootstrap_quotient(
    after: Sequence[tuple[float, float]],
    before: Sequence[tuple[float, float]],
    groups: Sequence[object] | None = None,
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of one ratio of sums over another of the same prompts, such as two acceptance lengths.

    A prompt is drawn with both its values, so that what makes it easy or hard for both cancels.

    Args:
        after: numerator and denominator of each prompt, of what is judged.
        before: the same of what it is held against.
        groups: a label per prompt; each group keeps its number of prompts in every resample. None is one group.
        confidence: coverage in (0, 1).
        num_resamples: bootstrap samples.
        seed: of the resampling; equal seeds give equal intervals.

    Raises:
        DataError: no prompts, lengths that differ, a value that is not finite, or sums of 0.
    """
    labels = list(groups) if groups is not None else [None] * len(after)
    if not len(after) == len(before) == len(labels):
        raise DataError(f"{len(after)} prompts after, {len(before)} before, {len(labels)} labels; pairs need all three")
    columns = [
        _finite([pair[part] for pair in pairs], name)
        for pairs, name in ((after, "after"), (before, "before"))
        for part in (0, 1)
    ]
    if any((column < 0).any() or column.sum() == 0 for column in columns):
        raise DataError("values of both sides must be 0 or more and not all 0", hint="no step with drafts was taken")
    if not 0 < confidence < 1:
        raise DataError(f"confidence {confidence} is not between 0 and 1")
    generator = np.random.default_rng(seed)
    places = [np.flatnonzero([label == one for label in labels]) for one in dict.fromkeys(labels)]
    drawn = np.concatenate(
        [place[generator.integers(0, len(place), (num_resamples, len(place)))] for place in places], axis=1
    )
    sums = [column[drawn].sum(axis=1) for column in columns]
    is_usable = np.all([total > 0 for total in sums], axis=0)
    quotients = (sums[0] * sums[3] / np.where(is_usable, sums[1] * sums[2], 1.0))[is_usable]
    tail = (1 - confidence) / 2
    low, high = np.quantile(quotients, [tail, 1 - tail])
    whole = [float(column.sum()) for column in columns]
    return Interval(whole[0] * whole[3] / (whole[1] * whole[2]), float(low), float(high), confidence, len(after))


def sign_test(differences: Sequence[float], *, confidence: float = 0.95) -> SignTest:
    """Two-sided sign test of paired differences, positive meaning a win.

    Args:
        differences: one per prompt; zeros are ties.
        confidence: coverage of the interval of the share of wins.

    Raises:
        DataError: no differences, or one that is not finite.
    """
    values = _finite(differences, "differences")
    wins, losses = int((values > 0).sum()), int((values < 0).sum())
    decided = wins + losses
    tail = sum(math.comb(decided, k) for k in range(max(wins, losses), decided + 1))
    low, high = _clopper_pearson(wins, decided, confidence)
    return SignTest(wins, losses, len(values) - decided, min(1.0, float(Fraction(2 * tail, 2**decided))), low, high)


def wilcoxon_signed_rank(differences: Sequence[float]) -> float:
    """Give the exact two-sided p-value of Wilcoxon's signed-rank test; 1.0 when all differences are 0.

    Args:
        differences: one per prompt. With n of them the work grows as n cubed; a thousand take about a second.

    Raises:
        DataError: no differences, or one that is not finite.
    """
    values = _finite(differences, "differences")
    values = values[values != 0]
    if len(values) == 0:
        return 1.0
    doubled_ranks = _doubled_mean_ranks(np.abs(values))
    total = sum(doubled_ranks)
    positive = sum(rank for rank, value in zip(doubled_ranks, values, strict=True) if value > 0)
    # probability[s]: that the ranks with a plus add up to s when every sign is a fair coin
    probability = np.zeros(total + 1)
    probability[0] = 1.0
    for rank in doubled_ranks:
        shifted = np.zeros_like(probability)
        shifted[rank:] = probability[: total + 1 - rank]
        probability = (probability + shifted) / 2
    smaller = min(positive, total - positive)
    return min(1.0, 2 * float(probability[: smaller + 1].sum()))


def compare_pairs(
    before: Sequence[float], after: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> PairedComparison:
    """Compare two set-ups on the same prompts in the same order.

    Args:
        before: value of set-up A per prompt.
        after: value of set-up B per prompt.
        confidence: coverage of the intervals.
        seed: of the bootstrap.

    Raises:
        DataError: no prompts, lengths that differ, or a value that is not finite.
    """
    first, second = _finite(before, "before"), _finite(after, "after")
    if len(first) != len(second):
        raise DataError(f"{len(first)} prompts before but {len(second)} after; pairs need the same prompts")
    differences = [float(value) for value in second - first]
    return PairedComparison(
        mean=bootstrap_mean(differences, confidence=confidence, seed=seed),
        median=float(np.median(differences)),
        sign=sign_test(differences, confidence=confidence),
        wilcoxon_p_value=wilcoxon_signed_rank(differences),
    )


def _finite(
    values: Sequence[float] | Sequence[Sequence[float]] | NDArray[np.float64], name: str
) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise DataError(f"{name} is empty", hint="no prompt was run")
    if not np.isfinite(array).all():
        raise DataError(f"{name} holds {int((~np.isfinite(array)).sum())} values that are not finite")
    return array


def _doubled_mean_ranks(magnitudes: NDArray[np.float64]) -> list[int]:
    """Rank from 1, equal magnitudes sharing their mean; doubled, so that half ranks are whole numbers."""
    below = (magnitudes[None, :] < magnitudes[:, None]).sum(axis=1)
    equal = (magnitudes[None, :] == magnitudes[:, None]).sum(axis=1)
    return [int(rank) for rank in 2 * below + equal + 1]


def _clopper_pearson(wins: int, total: int, confidence: float) -> tuple[float, float]:
    """Give the shares at which `wins` or more, and `wins` or fewer, have half the tail probability each."""
    tail = (1 - confidence) / 2
    low = 0.0 if wins == 0 else _solve(lambda share: 1 - _binomial_cdf(wins - 1, total, share), tail)
    high = 1.0 if wins == total else _solve(lambda share: -_binomial_cdf(wins, total, share), -tail)
    return low, high


def _binomial_cdf(count: int, total: int, share: float) -> float:
    # In logarithms: the coefficients overflow a float from about a thousand pairs on.
    log_win, log_loss = math.log(share), math.log1p(-share)
    return math.fsum(
        math.exp(
            math.lgamma(total + 1)
            - math.lgamma(k + 1)
            - math.lgamma(total - k + 1)
            + k * log_win
            + (total - k) * log_loss
        )
        for k in range(count + 1)
    )


def _solve(rising: Callable[[float], float], level: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < level else (low, middle)
    return (low + high) / 2
