from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.evaluation.statistics import (
    bootstrap_mean,
    bootstrap_median,
    bootstrap_quotient,
    bootstrap_ratio,
    compare_pairs,
    sign_test,
    wilcoxon_signed_rank,
)

DIFFERENCES = [0.21, 0.05, 0.33, 0.12, -0.04, 0.18, 0.27, 0.09]


def test_worked_vector() -> None:
    mean = bootstrap_mean(DIFFERENCES)
    assert mean.estimate == pytest.approx(0.15125)
    assert (mean.low, mean.high) == pytest.approx((0.0725, 0.2275))
    sign = sign_test(DIFFERENCES)
    assert (sign.wins, sign.losses, sign.ties) == (7, 1, 0)
    assert sign.p_value == pytest.approx(0.0703125)
    assert wilcoxon_signed_rank(DIFFERENCES) == pytest.approx(0.015625)


def test_thirty_one_of_thirty_two() -> None:
    sign = sign_test([1.0] * 31 + [-1.0])
    assert sign.p_value == pytest.approx(66 / 2**32, rel=1e-12)
    assert (sign.low, sign.high) == pytest.approx((0.838, 0.999), abs=5e-4)
    assert sign_test([1.0] * 32).p_value == pytest.approx(4.66e-10, rel=1e-2)


@pytest.mark.parametrize(("loser", "expected"), [(1, 9.31e-10), (16, 7.87e-8), (32, 1.29e-6)])
def test_wilcoxon_depends_on_the_rank_of_the_loser(loser: int, expected: float) -> None:
    differences = [float(-rank if rank == loser else rank) for rank in range(1, 33)]
    assert wilcoxon_signed_rank(differences) == pytest.approx(expected, rel=5e-3)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_wilcoxon_equals_the_count_over_all_sign_patterns(differences: list[int]) -> None:
    values = [value for value in differences if value != 0]
    sizes = [abs(value) for value in values]
    ranks = [sum(other < size for other in sizes) + (sum(other == size for other in sizes) + 1) / 2 for size in sizes]
    observed = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    extreme = min(observed, sum(ranks) - observed)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product([0, 1], repeat=len(ranks))]
    expected = min(1.0, 2 * sum(value <= extreme for value in sums) / len(sums))
    assert wilcoxon_signed_rank(differences) == pytest.approx(expected)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40))
def test_sign_test_is_symmetric_and_its_interval_holds_the_observed_share(differences: list[int]) -> None:
    sign, mirrored = sign_test(differences), sign_test([-value for value in differences])
    assert sign.p_value == mirrored.p_value and (sign.wins, sign.losses) == (mirrored.losses, mirrored.wins)
    assert sign.wins + sign.losses + sign.ties == len(differences)
    if sign.wins + sign.losses > 0:
        assert sign.low <= sign.wins / (sign.wins + sign.losses) <= sign.high


def test_ties_are_dropped_and_reported() -> None:
    assert sign_test([0.0, 0.0, 1.0]).ties == 2
    assert sign_test([0.0]).p_value == 1.0
    assert wilcoxon_signed_rank([0.0, 0.0]) == 1.0


def test_thousands_of_pairs_do_not_overflow() -> None:
    sign = sign_test([1.0] * 1500 + [-1.0] * 1500)
    assert sign.p_value == 1.0
    assert (sign.low, sign.high) == pytest.approx((0.482, 0.518), abs=1e-3)


def test_a_ratio_of_sums_weighs_long_prompts_more() -> None:
    """Two prompts: 16 tokens in 2 steps, 10 in 10. The mean of the two ratios would be 4.5."""
    interval = bootstrap_ratio([16, 10], [2, 10])
    assert interval.estimate == pytest.approx(26 / 12)
    assert (interval.low, interval.high) == (1.0, 8.0)
    assert interval.num_units == 2


def test_the_interval_resamples_prompts_not_steps() -> None:
    """Many steps of few prompts that differ must leave the interval wide."""
    few = bootstrap_ratio([300.0, 100.0] * 4, [100.0] * 8)
    many = bootstrap_ratio([300.0, 100.0] * 200, [100.0] * 400)
    assert few.high - few.low > 5 * (many.high - many.low)


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        steps = generator.integers(5, 60, 60)
        accepted = generator.poisson(1.5 * steps)
        interval = bootstrap_ratio((steps + accepted).tolist(), steps.tolist(), num_resamples=500, seed=trial)
        hits += interval.low <= 2.5 <= interval.high
    assert 178 <= hits <= 200


def test_equal_seeds_give_equal_intervals_also_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bootstrap_mean(DIFFERENCES, seed=3)
    assert bootstrap_mean(DIFFERENCES, seed=3) == whole != bootstrap_mean(DIFFERENCES, seed=4)
    monkeypatch.setattr("paceline.evaluation.statistics._BLOCK", 1000)
    assert bootstrap_mean(DIFFERENCES, seed=3) == whole


def test_compare_pairs() -> None:
    before = [1.0 + 0.1 * i for i in range(8)]
    after = [value + difference for value, difference in zip(before, DIFFERENCES, strict=True)]
    comparison = compare_pairs(before, after)
    assert comparison.mean.estimate == pytest.approx(0.15125)
    assert comparison.median == pytest.approx(0.15)
    assert comparison.sign.wins == 7
    assert comparison.wilcoxon_p_value == pytest.approx(0.015625)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_mean([]), "numerators is empty"),
        (lambda: bootstrap_mean([1.0, math.nan]), "1 values that are not finite"),
        (lambda: bootstrap_ratio([1.0], [1.0, 2.0]), "1 numerators but 2 denominators"),
        (lambda: bootstrap_ratio([1.0], [0.0]), "not all 0"),
        (lambda: bootstrap_mean([1.0], confidence=1.0), "confidence 1.0"),
        (lambda: sign_test([]), "differences is empty"),
        (lambda: wilcoxon_signed_rank([math.inf]), "not finite"),
        (lambda: compare_pairs([1.0], [1.0, 2.0]), "1 prompts before but 2 after"),
    ],
)
def test_unusable_input_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(DataError, match=message):
        call()


def test_a_quotient_is_of_sums_and_what_both_share_cancels() -> None:
    """Prompts of very different ease, each drafted a tenth further by one of both: the ratio has no spread, the
    acceptance lengths have."""
    before = [(100.0, 50.0), (100.0, 20.0), (300.0, 290.0), (80.0, 31.0)]
    after = [(tokens, steps / 1.1) for tokens, steps in before]
    found = bootstrap_quotient(after, before)
    assert (found.estimate, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    assert found.num_units == 4
    alone = bootstrap_ratio(*zip(*before, strict=True))
    assert alone.high / alone.low > 1.5
    # The planted fault: sides drawn apart from each other, as two unpaired samples.
    shuffled = bootstrap_quotient(after, [before[index] for index in (2, 0, 3, 1)])
    assert shuffled.estimate == pytest.approx(1.1) and shuffled.high / shuffled.low > 1.5


def test_groups_keep_their_size_in_every_resample() -> None:
    """Two groups without spread inside, in which the quotient is 1 and 2: drawn across them it would vary."""
    before = [(10.0, 5.0)] * 6
    after = [(10.0, 5.0)] * 3 + [(10.0, 2.5)] * 3
    grouped, ungrouped = bootstrap_quotient(after, before, [0, 0, 0, 1, 1, 1]), bootstrap_quotient(after, before)
    assert grouped.estimate == ungrouped.estimate == pytest.approx(30 / 22.5)
    assert (60 / 22.5) * (30 / 60) == pytest.approx(grouped.low) == pytest.approx(grouped.high)
    assert ungrouped.high - ungrouped.low > 0.3


@pytest.mark.parametrize(
    ("after", "before", "problem"),
    [
        ([(1.0, 1.0)], [], "1 prompts after, 0 before"),
        ([(1.0, 0.0)], [(1.0, 1.0)], "not all 0"),
        ([(1.0, 1.0)], [(0.0, 1.0)], "not all 0"),
        ([(-1.0, 1.0)], [(1.0, 1.0)], "0 or more"),
        ([(math.nan, 1.0)], [(1.0, 1.0)], "not finite"),
        ([], [], "empty"),
    ],
)
def test_quotients_that_mean_nothing(after: list[Any], before: list[Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        bootstrap_quotient(after, before)


def test_the_interval_of_a_median() -> None:
    found = bootstrap_median([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.estimate, found.num_units, found.confidence) == (3.0, 5, 0.95)
    assert (found.low, found.high) == (1.0, 100.0)  # of five, the ends of the sample are within 95 %
    assert bootstrap_median([2.0]).low == bootstrap_median([2.0]).high == 2.0
    with pytest.raises(DataError, match="empty"):
        bootstrap_median([])
    with pytest.raises(DataError, match="confidence"):
        bootstrap_median([1.0], confidence=1.0)


def test_the_interval_of_a_median_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(5)
    covered = 0
    for index in range(300):
        sample = generator.exponential(1.0, 40)
        found = bootstrap_median(list(sample), num_resamples=400, seed=index)
        covered += found.low <= math.log(2) <= found.high
    assert 0.91 <= covered / 300 <= 0.985


def test_medians_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(np.random.default_rng(0).normal(size=20))
    whole = bootstrap_median(values)
    monkeypatch.setattr("paceline.evaluation.statistics._BLOCK", 500)
    assert bootstrap_median(values) == whole
