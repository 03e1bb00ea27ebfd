"""Costs are held apart by kind of step, start from trial steps, and follow real ones."""

from __future__ import annotations

import pytest

from paceline.engine.kind_costs import CostsByKind, KindCosts
from paceline.engine.step_cost import Costs, StepCosts, StepCostTable, WholeStepCosts
from paceline.engine.step_kind import GREEDY_STEP, SAMPLED_STEP, StepKind, StepSize

# 1 and 8 requests; a sampled step's rows take 3 ms instead of 1, a draft 2.
PLAIN = StepCostTable({(1, 1): 9.0, (8, 1): 9.0})


def costs_of(row_ms: float) -> StepCosts:
    verify = StepCostTable({(batch, rows): 10 + row_ms * rows for batch in (1, 8) for rows in (1, 8)})
    return StepCosts(verify, StepCostTable({(1, 1): 2.0, (1, 7): 2.0}), PLAIN)


def made_up(kind: StepKind) -> Costs:
    return costs_of(3.0 if kind.is_sampled else 1.0)


def observe(
    costs: KindCosts, num_drafts: int, ms: float, *, times: int = 1, num_requests: int = 1, host_ms: float = 0.0
) -> None:
    for _ in range(times):
        costs.observe(StepSize(GREEDY_STEP, num_requests, num_drafts, writes_context=True), ms, host_ms)


def test_a_kind_costs_what_its_trial_steps_take_until_real_ones_are_known() -> None:
    by_kind = CostsByKind(made_up)
    assert by_kind.of(GREEDY_STEP).step_ms(1, 7) == 10 + 8 + 2
    assert by_kind.of(SAMPLED_STEP).step_ms(1, 7) == 10 + 24 + 2
    ruled = by_kind.of(StepKind(is_sampled=True, has_rules=True))
    assert ruled.step_ms(1, 7) == 10 + 24 + 2, "the nearest kind stands in"
    assert [by_kind.of(kind).plain_ms(1) for kind in (GREEDY_STEP, SAMPLED_STEP)] == [9, 9]


def test_what_one_kind_is_seen_to_take_says_nothing_of_another() -> None:
    by_kind = CostsByKind(made_up)
    observe(by_kind.of(GREEDY_STEP), 7, 200.0, times=20)
    assert by_kind.of(GREEDY_STEP).step_ms(1, 7) == pytest.approx(200)
    assert by_kind.of(SAMPLED_STEP).step_ms(1, 7) == 36


def test_a_few_slow_steps_are_no_cost_and_a_lasting_change_is() -> None:
    costs = KindCosts(made_up(GREEDY_STEP))
    observe(costs, 7, 500.0, times=6)
    assert costs.step_ms(1, 7) == 20, "so few are not believed"
    observe(costs, 7, 22.0, times=9)
    assert costs.step_ms(1, 7) == pytest.approx(22), "a recording or a pause of the host is not what a step costs"
    observe(costs, 7, 500.0, times=7)
    assert costs.step_ms(1, 7) == pytest.approx(22)
    observe(costs, 7, 500.0, times=8)
    assert costs.step_ms(1, 7) == pytest.approx(500)


def test_what_was_not_run_is_given_the_benefit_of_the_doubt() -> None:
    """Else plain decoding, which nobody has run yet, would seem to be as slow as whatever is found to be slow."""
    costs = KindCosts(made_up(GREEDY_STEP))
    observe(costs, 7, 40.0, times=7)
    assert (costs.step_ms(1, 7), costs.step_ms(1, 0), costs.plain_ms(1)) == (40, 11, 9)
    assert costs.step_ms(8, 7) == 20
    faster = KindCosts(made_up(GREEDY_STEP))
    observe(faster, 7, 10.0, times=7)
    assert (faster.step_ms(1, 0), faster.plain_ms(1), faster.step_ms(8, 3)) == (5.5, 4.5, 8)
    observe(faster, 0, 2.2, times=7, num_requests=5)
    assert faster.step_ms(8, 3) == pytest.approx(16 / 5), "of 5 to 8 requests something of their own is known now"
    assert faster.step_ms(1, 0) == 5.5


def test_a_plain_step_costs_no_more_than_one_that_keeps_the_context() -> None:
    costs = KindCosts(made_up(GREEDY_STEP))
    observe(costs, 0, 5.5, times=7)
    observe(costs, 7, 60.0, times=7)
    assert costs.plain_ms(1) == pytest.approx(4.5), "half of its trial, as the step that is most like it"
    for plain_ms in (4.0, 8.0):
        for _ in range(15):
            costs.observe(StepSize(GREEDY_STEP, 1, 0, writes_context=False), plain_ms)
        assert costs.plain_ms(1) == pytest.approx(min(plain_ms, 5.5)) and costs.step_ms(1, 0) == pytest.approx(5.5)


def test_no_step_is_shorter_than_the_host_is_busy_with_it() -> None:
    """With many requests a plain step is done before the host is, so drafts cost less than a device's clock says."""
    costs = KindCosts(made_up(GREEDY_STEP))
    observe(costs, 7, 21.0, times=7, host_ms=15.0)
    assert costs.step_ms(1, 7) == pytest.approx(21)
    assert costs.step_ms(1, 0) == costs.plain_ms(1) == 15, "known before any such step was run"
    observe(costs, 0, 15.2, times=15, host_ms=15.1)
    assert costs.step_ms(1, 7) == pytest.approx(21), "how long the device took is not known from that"
    assert costs.step_ms(8, 0) == 11, "of other batches neither"
    observe(costs, 0, 16.5, times=15, host_ms=2.0)
    assert costs.step_ms(1, 0) == pytest.approx(16.5)


def test_what_was_seen_long_ago_is_looked_at_again() -> None:
    costs = KindCosts(made_up(GREEDY_STEP))
    observe(costs, 7, 80.0, times=7)
    observe(costs, 0, 11.0, times=4000)
    assert costs.step_ms(1, 7) == pytest.approx(80)
    observe(costs, 0, 11.0, times=1001)
    assert costs.step_ms(1, 7) == pytest.approx(20), "it is worth another few steps"
    observe(costs, 7, 30.0, times=7)
    assert costs.step_ms(1, 7) == pytest.approx(30), "what was seen before does not count again"


def test_padded_lengths_share_what_is_known() -> None:
    """5 drafts run as 7 do; else they would seem cheaper as soon as 7 are found to be slower than a trial step."""
    steps = StepCostTable({(1, rows): 10.0 * rows for rows in (1, 2, 4, 8)}, is_padded=True)
    costs = KindCosts(WholeStepCosts(steps, StepCostTable({(1, 1): 9.0})))
    observe(costs, 0, 10.0, times=7)
    observe(costs, 7, 160.0, times=7)
    assert [costs.step_ms(1, count) for count in (3, 4, 5, 7)] == pytest.approx([40, 160, 160, 160])
    assert [costs.verify_ms(1, count) for count in (0, 3, 7)] == [10, 10, 10], "no row is saved"
