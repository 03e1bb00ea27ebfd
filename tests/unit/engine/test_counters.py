"""Counters count kept drafts per position."""

from __future__ import annotations

from dataclasses import fields

from tests.unit.engine.block_fakes import Bench

from paceline.engine.block_stats import BlockStats
from paceline.engine.counters import ComponentStats, Counters
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
    planner = DraftPlanner(3, schedule=None, measure=lambda _kind: StepCosts(FLAT, FLAT))
    counters = Counters(3)
    counters.num_steps, counters.total_step_ms = 4, 10.0
    components = ComponentStats(
        target_weight_bytes=1,
        drafter_weight_bytes=2,
        target_cache_bytes=3,
        recurrent_state_bytes=6,
        snapshot_bytes=7,
        drafter_cache_bytes=4,
        token_rules_bytes=5,
        linear_mode="plain",
        attention="per_request",
        implementations={},
        method="dflash/greedy",
    )
    blocks = BlockStats.of(Bench(7, num_slots=3).scheduler)
    stats = counters.snapshot(planner, blocks, components)
    for part in (blocks, components):
        assert {field.name: getattr(stats, field.name) for field in fields(part)} == vars(part)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_free_slots) == (7, 7, 3)
    assert (stats.num_drafts, stats.num_probes, stats.mean_step_ms) == (3, 0, 2.5)
    controller = planner.prepare()
    controller.num_drafts, controller.num_probes, controller.num_switched_off = 0, 7, 1
    stats = counters.snapshot(planner, blocks, components)
    assert (stats.num_drafts, stats.num_probes, stats.num_switched_off) == (0, 7, 1)
