"""Counters count kept drafts per position."""

from __future__ import annotations

from paceline.engine.counters import Counters
from paceline.trace.step import StepRecord


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
