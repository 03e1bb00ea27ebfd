"""Counters count kept drafts per position."""

from __future__ import annotations

from paceline.engine.counters import Counters
from paceline.engine.draft_planner import DraftPlanner
from paceline.engine.step_cost import StepCosts, StepCostTable
from paceline.trace.step import StepRecord

FLAT = StepCostTable({(1, 1): 1.0})


def test_positions_count_what_was_kept_and_delivered() -> None:
    counters = Counters(3)
    common = {"request_id": "r", "step_index": 0, "anchor_position": 4, "anchor_id": 1, "step_ms": 1.0}
    counters.count_step(
        StepRecord(
            **common, proposed_ids=(5, 6, 7), num_verified_accepted=3, num_accepted=1, emitted_ids=(5,), bonus_id=None
        )
    )
    counters.count_step(
        StepRecord(
            **common, proposed_ids=(5, 6), num_verified_accepted=2, num_accepted=2, emitted_ids=(5, 6, 9), bonus_id=9
        )
    )
    assert counters.drafted_per_position == [2, 2, 1]
    assert counters.accepted_per_position == [2, 1, 0]
    assert counters.num_request_steps == 2


def test_a_snapshot_speaks_of_the_drafts_that_are_planned() -> None:
    planner = DraftPlanner(3, schedule=None, measure=lambda: StepCosts(FLAT, FLAT))
    counters = Counters(3)
    counters.num_steps, counters.total_step_ms = 4, 10.0
    moment = {
        "num_running": 1,
        "num_waiting": 2,
        "num_free_slots": 3,
        "target_cache_bytes": 4,
        "drafter_cache_bytes": 5,
        "token_rules_bytes": 6,
        "linear_mode": "plain",
        "method": "dflash/greedy",
    }
    stats = counters.snapshot(planner, **moment)
    assert {name: getattr(stats, name) for name in moment} == moment
    assert (stats.num_drafts, stats.num_probes, stats.mean_step_ms) == (3, 0, 2.5)
    controller = planner.prepare()
    controller.num_drafts, controller.num_probes, controller.num_switched_off = 0, 7, 1
    stats = counters.snapshot(planner, **moment)
    assert (stats.num_drafts, stats.num_probes, stats.num_switched_off) == (0, 7, 1)
