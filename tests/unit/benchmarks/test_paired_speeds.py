from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from benchmarks.paired_speeds import (
    Mode,
    TimedRun,
    acceptance,
    bootstrap_median,
    measure,
    num_same_ids,
    ratios,
    round_noise,
    speed_row,
    speeds,
)

from paceline.trace.step import StepRecord


def timed(num_tokens: int, decode_s: float, records: tuple[StepRecord, ...] = ()) -> TimedRun:
    return TimedRun(tuple(range(num_tokens)), 0.5, decode_s, records)


def record(num_accepted: int) -> StepRecord:
    proposed = (5, 6, 7)
    return StepRecord("a", 0, 0, 1, proposed, num_accepted, num_accepted, (*proposed[:num_accepted], 9), 9, 1.0)


def orders(num_prompts: int, num_rounds: int) -> list[str]:
    seen: list[str] = []

    def mode(name: str) -> Mode:
        def run(prompt: Sequence[int]) -> TimedRun:
            seen.append(f"{name}{prompt[0]}")
            return timed(2, 1.0)

        return run

    runs = measure({"a": mode("a"), "b": mode("b")}, [[i] for i in range(num_prompts)], num_rounds=num_rounds)
    assert {name: [len(rounds) for rounds in found] for name, found in runs.items()} == {
        name: [num_rounds] * num_prompts for name in "ab"
    }
    return seen


def test_modes_run_there_and_back() -> None:
    assert orders(1, 2) == ["a0", "b0", "b0", "a0"]
    assert orders(2, 1) == ["a0", "b0", "b1", "a1"]


def test_the_first_token_is_not_decoding_and_rounds_are_pooled() -> None:
    assert speeds([[timed(11, 1.0), timed(11, 3.0)], [timed(5, 2.0)]]) == [5.0, 2.0]


def test_ratios_are_of_the_same_prompt() -> None:
    ours, base = [[timed(11, 1.0)], [timed(11, 10.0)]], [[timed(11, 2.0)], [timed(11, 5.0)]]
    assert ratios(ours, base) == [2.0, 0.5]


def test_row() -> None:
    base = [[timed(11, seconds)] for seconds in (1.0, 2.0, 4.0)]
    ours = [[timed(11, seconds / ratio, (record(3), record(0)))] for seconds, ratio in ((1.0, 3), (2.0, 1.5), (4.0, 2))]
    row = speed_row("speculative", ours, base)
    assert row["tokens_per_second"] == pytest.approx(7.5)
    assert row["ratio_to_plain"] == pytest.approx(2.0)  # not 7.5 / 5, the ratio of medians
    assert row["p10"] == pytest.approx(1.6) and row["p90"] == pytest.approx(2.8)
    assert (row["low"], row["high"]) == (pytest.approx(1.5), pytest.approx(3.0))
    assert row["acceptance_length"] == 2.5 and row["prefill_ms"] == 500.0
    assert (row["mode"], row["concurrency"], row["num_prompts"]) == ("speculative", 1, 3)
    plain = speed_row("plain", base, base)
    assert plain["ratio_to_plain"] == plain["low"] == plain["high"] == 1.0 and "acceptance_length" not in plain


def test_acceptance_pools_all_rounds() -> None:
    assert acceptance([[timed(9, 1.0, (record(3),))], [timed(9, 1.0, (record(1),) * 3)]]).acceptance_length == 2.5


def test_interval_of_a_median_covers_it() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.3, 16).tolist()
    low, high = bootstrap_median(values)
    assert low < float(np.median(values)) < high
    assert bootstrap_median(values) == (low, high)
    assert high - low > np.subtract(*bootstrap_median(values * 16)[::-1])
    assert bootstrap_median([1.5]) == (1.5, 1.5)


def test_one_other_id_in_any_round_counts() -> None:
    def one(*ids: int) -> TimedRun:
        return TimedRun(ids, 0.0, 1.0)

    reference = [[one(1, 2), one(1, 2)], [one(3), one(3)]]
    assert num_same_ids(reference, reference) == 2
    assert num_same_ids([[one(1, 2), one(1, 9)], [one(3), one(3)]], reference) == 1
    assert num_same_ids(reference, [[one(1, 2), one(1, 9)], [one(3), one(3)]]) == 1


def test_noise_between_rounds() -> None:
    assert round_noise([[timed(11, 1.0)]]) is None
    assert round_noise([[timed(11, 1.0), timed(11, 1.0)], [timed(9, 1.0), timed(13, 1.0)]]) == pytest.approx(0.2)
