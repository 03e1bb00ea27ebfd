from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.trace.acceptance import AcceptanceSummary, DraftTotals
from paceline.trace.step import StepRecord


def step(num_drafts: int, accepted: int, *, verified: int | None = None, is_cut: bool = False) -> StepRecord:
    proposed = tuple(range(100, 100 + num_drafts))
    bonus = None if is_cut else 7
    return StepRecord(
        request_id="r",
        step_index=0,
        anchor_position=0,
        anchor_id=0,
        proposed_ids=proposed,
        num_verified_accepted=accepted if verified is None else verified,
        num_accepted=accepted,
        emitted_ids=proposed[:accepted] + (() if bonus is None else (bonus,)),
        bonus_id=bonus,
        step_ms=1.0,
    )


def summarise(depths: Sequence[int], accepted: Sequence[int]) -> AcceptanceSummary:
    return AcceptanceSummary.from_steps(step(d, a) for d, a in zip(depths, accepted, strict=True))


def test_worked_numbers_at_fixed_depth() -> None:
    summary = summarise([7] * 5, [3, 0, 7, 2, 1])
    assert summary.acceptance_length == pytest.approx(3.6)
    assert summary.draft_acceptance_rate == pytest.approx(13 / 35)
    assert summary.per_position == pytest.approx((0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2))
    assert summary.conditional == pytest.approx((0.8, 0.75, 2 / 3, 0.5, 1, 1, 1))
    assert summary.histogram == (1, 1, 1, 1, 0, 0, 0, 1)
    assert summary.delivered_per_step == pytest.approx(3.6)


def test_worked_numbers_at_variable_depth() -> None:
    summary = summarise([7, 7, 3, 3, 3], [3, 7, 2, 0, 3])
    assert summary.per_position == pytest.approx((4 / 5, 4 / 5, 3 / 5, 1 / 2, 1 / 2, 1 / 2, 1 / 2))
    # A step that kept all of its three drafts had no fourth to keep: it does not count there.
    assert summary.conditional == pytest.approx((4 / 5, 1, 3 / 4, 1 / 2, 1, 1, 1))
    assert summary.histogram == (1, 0, 1, 2, 0, 0, 0, 1)


def test_worked_rates_of_a_schedule_with_a_given_length() -> None:
    """Of length 3.4 with 7 drafts: two always kept, the third four times in ten, nothing behind it."""
    found = summarise([7] * 10, [3] * 4 + [2] * 6)
    rates = (1.0, 1.0, 0.4, 0.0, 0.0, 0.0, 0.0)
    assert found.acceptance_length == pytest.approx(3.4)
    assert found.per_position == pytest.approx(rates)
    assert found.conditional[:4] == pytest.approx(rates[:4])  # behind it no step arrives, so there is no rate
    assert all(math.isnan(rate) for rate in found.conditional[4:])


def test_pooled_over_requests_is_a_ratio_of_sums() -> None:
    summary = summarise([7] * 12, [7, 7] + [0] * 10)
    assert summary.acceptance_length == pytest.approx(26 / 12)


def test_perfect_and_hopeless_drafters() -> None:
    """100 tokens at four drafts a step take 20 steps of five."""
    perfect = summarise([4] * 20, [4] * 20)
    assert (perfect.acceptance_length, perfect.draft_acceptance_rate, perfect.num_delivered) == (5.0, 1.0, 100)
    hopeless = summarise([4] * 20, [0] * 20)
    assert (hopeless.acceptance_length, hopeless.draft_acceptance_rate) == (1.0, 0.0)


def test_a_stop_inside_the_block_counts_what_was_delivered() -> None:
    """Five drafts passed verification, the third was a stop: three tokens came out, and no bonus token."""
    summary = AcceptanceSummary.from_steps([step(7, 3, verified=5, is_cut=True)])
    assert summary.num_accepted == 3 and summary.num_verified_accepted == 5 and summary.num_delivered == 3
    assert summary.delivered_per_step == 3.0
    assert summary.acceptance_length == 4.0
    assert summary.verified_acceptance_length == 6.0


def test_steps_without_drafts_do_not_count() -> None:
    assert summarise([0, 3, 0], [0, 2, 0]) == summarise([3], [2])


def test_no_steps_give_nan_and_null() -> None:
    summary = summarise([0, 0], [0, 0])
    assert summary.num_steps == 0 and summary.histogram == () and summary.per_position == ()
    assert math.isnan(summary.acceptance_length) and math.isnan(summary.draft_acceptance_rate)
    plain = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert plain["acceptance_length"] is None and plain["num_steps"] == 0


def test_a_position_nobody_reached_has_no_conditional_rate() -> None:
    summary = summarise([2, 2], [0, 0])
    assert summary.per_position == (0.0, 0.0)
    assert summary.conditional[0] == 0.0 and math.isnan(summary.conditional[1])
    assert summary.to_dict()["conditional"] == [0.0, None]


@st.composite
def steps_of_one_depth(draw: st.DrawFn) -> tuple[int, list[int]]:
    depth = draw(st.integers(1, 9))
    return depth, draw(st.lists(st.integers(0, depth), min_size=1, max_size=40))


@given(steps_of_one_depth())
def test_identities_at_fixed_depth(case: tuple[int, list[int]]) -> None:
    depth, accepted = case
    summary = summarise([depth] * len(accepted), accepted)
    assert sum(summary.histogram) == summary.num_steps == len(accepted)
    assert 1 + sum(summary.per_position) == pytest.approx(summary.acceptance_length)
    assert sum(i * count for i, count in enumerate(summary.histogram)) == summary.num_accepted
    assert all(a >= b for a, b in zip(summary.per_position, summary.per_position[1:], strict=False))
    assert 0 <= summary.draft_acceptance_rate <= 1
    product = 1.0
    for unconditional, conditional in zip(summary.per_position, summary.conditional, strict=True):
        product *= 0.0 if math.isnan(conditional) else conditional
        assert unconditional == pytest.approx(product)
    assert summary.acceptance_length == pytest.approx(summary.delivered_per_step)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[1] <= pair[0]), max_size=30))
def test_identities_at_any_depth(steps: list[tuple[int, int]]) -> None:
    summary = summarise([d for d, _ in steps], [a for _, a in steps])
    assert sum(summary.histogram) == summary.num_steps == sum(d > 0 for d, _ in steps)
    for j, rate in enumerate(summary.per_position):
        assert rate == sum(a > j for _, a in steps) / sum(d > j for d, _ in steps)


def test_counts_and_records_agree() -> None:
    assert AcceptanceSummary.from_counts([(3, 2, 2, 3), (0, 0, 0, 1)]) == summarise([3, 0], [2, 0])


STEPS = st.lists(st.integers(0, 7).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=30)


@given(STEPS, STEPS)
def test_totals_are_those_of_a_summary_and_add_up(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    summary = summarise([d for d, _ in first + second], [a for _, a in first + second])
    totals = DraftTotals.from_steps(first) + DraftTotals.from_steps(second)
    assert totals == DraftTotals.from_steps(first + second)
    assert (totals.num_steps, totals.num_draft_tokens) == (summary.num_steps, summary.num_draft_tokens)
    for name in ("acceptance_length", "draft_acceptance_rate", "per_position"):
        assert getattr(totals, name) == pytest.approx(getattr(summary, name), nan_ok=True)
    json.dumps(totals.to_dict(), allow_nan=False)


@given(STEPS)
def test_a_histogram_tells_the_same_but_for_the_depths(steps: list[tuple[int, int]]) -> None:
    summary = summarise([d for d, _ in steps], [a for _, a in steps])
    totals = DraftTotals.from_histogram(summary.histogram, num_draft_tokens=summary.num_draft_tokens)
    assert totals.num_accepted == summary.num_accepted and totals.drafted is None
    assert totals.kept == DraftTotals.from_steps(steps).kept
    assert totals.acceptance_length == pytest.approx(summary.acceptance_length, nan_ok=True)


def test_without_depths_positions_are_shares_of_all_steps() -> None:
    # drafts 3, 1, 1 of which 2, 1, 0 were kept
    known = DraftTotals.from_steps([(3, 2), (1, 1), (1, 0)])
    assert known.per_position == (2 / 3, 1.0, 0.0)
    untold = DraftTotals.from_histogram([1, 1, 1, 0], num_draft_tokens=5)
    assert untold.per_position == (2 / 3, 1 / 3, 0.0)
    assert (known + untold).drafted is None and (known + untold).kept == (4, 2, 0)
    assert DraftTotals() + known == known
    assert DraftTotals().to_dict()["acceptance_length"] is None
