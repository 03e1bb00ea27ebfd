"""Each request gets drafts by its own mode; costs are measured for who needs them."""

from __future__ import annotations

import pytest

from paceline.engine.draft_budget import DraftSchedule
from paceline.engine.draft_planner import DraftPlanner


class Costs:
    """A row costs a tenth of a plain step, a draft nothing."""

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        return self.verify_ms(num_requests, num_drafts)

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        return 10.0 + num_drafts


def planner_of(schedule: DraftSchedule | None = None) -> tuple[DraftPlanner, list[int]]:
    calls: list[int] = []

    def measure() -> Costs:
        calls.append(1)
        return Costs()

    return DraftPlanner(7, schedule=schedule, measure=measure), calls


def test_every_request_gets_what_its_mode_says() -> None:
    planner, calls = planner_of()
    plan = planner.plan(["off", "fixed"], [True, True], num_requests=2)
    assert (plan.num_drafts, plan.most, plan.thresholds, calls) == ((0, 7), 7, None, [])
    controller = planner.prepare()
    controller.next_num_drafts = lambda _size: 2
    plan = planner.plan(["adaptive", "off", "fixed"], [True, False, True], num_requests=3)
    assert (plan.num_drafts, plan.most, calls) == ((2, 0, 7), 7, [1])
    assert plan.is_adaptive == (True, False, False)
    assert plan.teaches == (True, False, True)
    assert planner.plan(["off"], [True], num_requests=1).most == 0


def test_the_schedule_limits_every_mode() -> None:
    planner, _ = planner_of(DraftSchedule([(1, 2, 7), (3, 8, 1)], 7))
    assert planner.plan(["fixed", "adaptive"], [True] * 2, num_requests=2).num_drafts == (7, 7)
    assert planner.plan(["fixed", "adaptive"], [True] * 2, num_requests=5).num_drafts == (1, 1)


def test_probes_that_the_schedule_forbids_are_not_counted() -> None:
    """Else a busy engine would give up a drafter that it never asked."""
    planner, _ = planner_of(DraftSchedule([(1, 1, 7), (2, 8, 0)], 7))
    controller = planner.prepare()
    for _ in range(100):
        planner.observe("adaptive", num_drawn=7, num_judged=7, num_accepted=0)
    for _ in range(1000):
        assert planner.plan(["adaptive"], [True], num_requests=2).num_drafts == (0,)
    assert (controller.num_probes, planner.has_given_up) == (0, False)


def test_thresholds_cover_the_block_except_in_trials_and_probes() -> None:
    planner, _ = planner_of()
    controller = planner.prepare()
    controller.next_num_drafts = lambda _size: 3
    plans = [planner.plan(["adaptive"], [True], num_requests=1) for _ in range(32)]
    held = [plan.thresholds for plan in plans]
    assert sum(thresholds is None for thresholds in held) == 2
    assert all(len(thresholds) == 7 and thresholds[3:] == (0.0,) * 4 for thresholds in held if thresholds is not None)
    assert held[0] is not None
    assert held[0][:3] == pytest.approx([4 / 13] * 3)  # 4 tokens in 13 ms at first, and a row costs 1 ms
    controller.num_drafts = 0  # what it draws now is a probe
    assert planner.plan(["adaptive"], [True], num_requests=1).thresholds is None


def test_only_adaptive_blocks_teach_the_controller() -> None:
    planner, _ = planner_of()
    controller = planner.prepare()
    for mode in ("fixed", "off"):
        for _ in range(100):
            planner.observe(mode, num_drawn=7, num_judged=7, num_accepted=0)
    assert controller.next_num_drafts(1) == 7
    for _ in range(100):
        planner.observe("adaptive", num_drawn=7, num_judged=2, num_accepted=0)
    assert controller.next_num_drafts(1) == 0
