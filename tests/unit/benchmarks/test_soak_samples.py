from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.soak_samples import (
    Sample,
    Window,
    acceptance_faults,
    counter_faults,
    memory_faults,
    resident_bytes,
)
from tests import tiny

from paceline.engine.counters import EngineStats
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters


def samples(*megabytes: float) -> list[Sample]:
    return [Sample(float(second), int(value * 2**20), 9, 1, 0) for second, value in enumerate(megabytes)]


def test_memory_may_fill_up_and_then_has_to_be_flat() -> None:
    assert memory_faults(samples(*range(100, 200, 10), *[200] * 30)) == []
    assert memory_faults(samples(*[200, 202, 198] * 13)) == []
    rising = [200 + second / 4 for second in range(40)]
    (fault,) = memory_faults(samples(*rising))
    assert "15.00 MiB a minute" in fault
    assert memory_faults(samples(200, 201)) == ["too few samples for a verdict on memory"]


def test_this_process_has_some_memory() -> None:
    assert resident_bytes() > 2**20


def window(**lengths: float) -> Window:
    found = Window()
    for name, length in lengths.items():
        found.add(int(name[1:]), round(100 * (length - 1)), 100, 50)
    return found


def test_acceptance_is_compared_over_the_same_requests() -> None:
    first, last = window(_0=2.0, _1=3.0), window(_1=3.05, _2=1.0)
    assert acceptance_faults(first, last) == []
    (fault,) = acceptance_faults(window(_1=3.0), window(_1=2.8, _2=9.0))
    assert fault == "acceptance length was 3.000 at first and is 2.800 at the end, over 1 requests"
    assert acceptance_faults(window(_0=2.0), window(_1=2.0)) != []
    without_drafts = Window()
    without_drafts.add(5, 0, 0, 10)
    assert math.isnan(without_drafts.acceptance_length()) and without_drafts.num_requests == 1


@pytest.fixture(scope="module")
def idle() -> tuple[EngineStats, dict[str, int], int]:
    target, drafter = tiny.loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    num_free = engine.stats().num_free_blocks
    results = engine.generate(tiny.tiny_prompts([5, 40, 40]), SamplingParameters(max_tokens=9, ignore_eos=True))
    seen = {"num_finished": 3, "num_aborted": 0, "num_output_tokens": sum(len(one.token_ids) for one in results)}
    return engine.stats(), seen, num_free


def test_counters_of_an_engine_agree(idle: tuple[EngineStats, dict[str, int], int]) -> None:
    stats, seen, num_free = idle
    assert counter_faults(stats, seen, num_free_at_start=num_free) == []


@pytest.mark.parametrize(
    "change",
    [
        {"num_output_tokens": 1},
        {"num_finished": 2},
        {"num_used_blocks": 1},
        {"num_free_blocks": 3},
        {"num_draft_tokens": 5},
        {"num_accepted": 99},
        {"accepted_per_position": (0, 1)},
        {"num_impossible_drafts": 1},
        {"num_hit_tokens": 10**6},
    ],
)
def test_a_counter_that_is_off_is_named(change: dict[str, Any], idle: tuple[EngineStats, dict[str, int], int]) -> None:
    stats, seen, num_free = idle
    assert counter_faults(replace(stats, **change), seen, num_free_at_start=num_free) != []
