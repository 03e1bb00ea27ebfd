"""Each request gets drafts by its own mode; costs are measured for who needs them."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.draft_budget import DraftSchedule
from paceline.engine.draft_length import JudgedBlock
from paceline.engine.draft_planner import DraftPlanner
from paceline.engine.step_kind import GREEDY_STEP, GREEDY_TEXT, TRIED_KINDS, StepAhead, StepKind


class Costs:
    """A row costs a tenth of a plain step, a draft nothing."""

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        return self.verify_ms(num_requests, num_drafts)

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        return 10.0 + num_drafts

    def plain_ms(self, num_requests: int) -> float:
        return 10.0

    def padded_drafts(self, num_drafts: int) -> int:
        return num_drafts


def planner_of(schedule: DraftSchedule | None = None, **changes: Any) -> tuple[DraftPlanner, list[StepKind]]:
    calls: list[StepKind] = []

    def measure(kind: StepKind) -> Costs:
        calls.append(kind)
        return Costs()

    return DraftPlanner(7, schedule=schedule, measure=measure, **changes), calls


def ahead(num_requests: int = 1) -> StepAhead:
    return StepAhead(GREEDY_STEP, num_requests, ((GREEDY_TEXT, num_requests),))


def judged(planner: DraftPlanner, num_drawn: int, num_accepted: int) -> None:
    planner.observe_step(GREEDY_STEP, [JudgedBlock(GREEDY_TEXT, num_drawn, num_accepted)])


def test_every_request_gets_what_its_mode_says() -> None:
    planner, calls = planner_of()
    plan = planner.plan(["off", "fixed"], [True, True], ahead(2))
    assert (plan.num_drafts, plan.most, plan.thresholds, calls) == ((0, 7), 7, None, [])
    controller = planner.prepare()
    controller.next_num_drafts = lambda _size: 2
    plan = planner.plan(["adaptive", "off", "fixed"], [True, False, True], ahead(3))
    assert (plan.num_drafts, plan.most, calls) == ((2, 0, 7), 7, [*TRIED_KINDS])
    assert plan.is_adaptive == (True, False, False)
    assert plan.teaches == (True, False, True)
    assert planner.plan(["off"], [True], ahead(1)).most == 0


def test_the_schedule_limits_every_mode() -> None:
    planner, _ = planner_of(DraftSchedule([(1, 2, 7), (3, 8, 1)], 7))
    assert planner.plan(["fixed", "adaptive"], [True] * 2, ahead(2)).num_drafts == (7, 7)
    assert planner.plan(["fixed", "adaptive"], [True] * 2, ahead(5)).num_drafts == (1, 1)


def test_probes_that_the_schedule_forbids_are_not_counted() -> None:
    """Else a busy engine would give up a drafter that it never asked."""
    planner, _ = planner_of(DraftSchedule([(1, 1, 7), (2, 8, 0)], 7))
    controller = planner.prepare()
    for _ in range(100):
        judged(planner, 7, 0)
    for _ in range(1000):
        assert planner.plan(["adaptive"], [True], ahead(2)).num_drafts == (0,)
    assert (controller.num_probes, planner.has_given_up(GREEDY_STEP)) == (0, False)


def test_thresholds_cover_the_block_except_in_trials_and_probes() -> None:
    planner, _ = planner_of()
    controller = planner.prepare()
    controller.next_num_drafts = lambda _size: 3
    plans = [planner.plan(["adaptive"], [True], ahead(1)) for _ in range(32)]
    held = [plan.thresholds for plan in plans]
    assert sum(thresholds is None for thresholds in held) == 2
    assert all(len(thresholds) == 7 and thresholds[3:] == (0.0,) * 4 for thresholds in held if thresholds is not None)
    assert held[0] is not None
    assert held[0][:3] == pytest.approx([4 / 13] * 3)  # 4 tokens in 13 ms at first, and a row costs 1 ms
    controller.is_off = lambda _kind: True  # what it draws now is a probe
    assert planner.plan(["adaptive"], [True], ahead(1)).thresholds is None


def test_nothing_is_held_back_where_that_saves_no_row() -> None:
    """A step has as many rows as its longest block, and with the host ahead, as many as were planned."""
    for planner, num_requests in ((planner_of()[0], 2), (planner_of(holds_back=False)[0], 1)):
        planner.prepare().next_num_drafts = lambda _step: 3
        plans = [
            planner.plan(["adaptive"] * num_requests, [True] * num_requests, ahead(num_requests)) for _ in range(8)
        ]
        assert all(plan.thresholds is None and plan.most == 3 for plan in plans)


def test_only_adaptive_blocks_teach_the_controller() -> None:
    planner, _ = planner_of()
    controller = planner.prepare()
    for _ in range(100):
        planner.observe(num_judged=7, num_accepted=0)
    assert controller.next_num_drafts(ahead()) == 7
    for _ in range(100):
        judged(planner, 7, 0)
    assert controller.next_num_drafts(ahead()) == 0
