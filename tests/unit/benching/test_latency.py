"""Latencies by worked numbers."""

from __future__ import annotations

import pytest
from tests.unit.benching.made import answer, failed, passed

from paceline.benching.latency import (
    e2el_s,
    is_good,
    itl_s,
    percentile_name,
    summary_ms,
    throughput,
    tokens_per_delta,
    tpot_s,
    ttft_s,
    values_of,
)


def test_one_answer() -> None:
    # five tokens: the first after 0.2 s, two after 0.5 s, two after 1.0 s
    one = answer(total_s=1.0, num_tokens=5, first_s=0.2, delta_s=(0.2, 0.5, 1.0), delta_tokens=(1, 2, 2))
    assert (ttft_s(one), e2el_s(one)) == (0.2, 1.0)
    assert tpot_s(one) == pytest.approx((1.0 - 0.2) / 4)
    assert itl_s(one) == pytest.approx([0.3, 0.5])
    assert tokens_per_delta([one]) == pytest.approx(5 / 3)


def test_what_an_answer_does_not_have() -> None:
    assert tpot_s(answer(num_tokens=1, first_s=0.5)) is None  # nothing comes after the first
    assert tpot_s(answer(num_tokens=None, first_s=0.5)) is None  # no usage
    assert tpot_s(answer(num_tokens=5, first_s=None)) is None  # no stream
    assert itl_s(answer(delta_s=(0.5,))) == [] and tokens_per_delta([answer()]) is None


def test_values_leave_out_failures() -> None:
    records = [answer(0, total_s=1.0, num_tokens=3, first_s=0.5), failed(1), answer(2, total_s=2.0, num_tokens=1)]
    assert values_of("e2el", records) == [1.0, 2.0]
    assert values_of("ttft", records) == [0.5]
    assert values_of("tpot", records) == [0.25]


def test_percentiles_are_numpys() -> None:
    found = summary_ms([0.001, 0.002, 0.003, 0.010], [50.0, 99.0, 99.9])
    assert found is not None
    assert (found["mean"], found["median"], found["num_values"]) == (pytest.approx(4.0), pytest.approx(2.5), 4)
    assert found["p50"] == found["median"]
    assert found["p99"] == pytest.approx(3 + 0.97 * 7)  # between the third and the fourth value: 0.99 * 3 = 2.97
    assert percentile_name(99.9) == "p99.9" and "p99.9" in found
    assert summary_ms([], [99.0]) is None


def test_throughput_is_everything_over_all_time() -> None:
    first = passed("a", answer(0, num_tokens=10, num_prompt_tokens=5), failed(1), total_s=2.0)
    second = passed("a", answer(0, num_tokens=20, num_prompt_tokens=5), total_s=1.0, round_index=1)
    found = throughput([first, second], {})
    assert found["requests_per_second"] == pytest.approx(2 / 3)
    assert found["output_tokens_per_second"] == pytest.approx(10.0)
    assert found["prompt_tokens_per_second"] == pytest.approx(10 / 3)
    assert found["goodput_requests_per_second"] is None
    assert throughput([passed("a", answer(0), answer(1, num_tokens=None))], {})["output_tokens_per_second"] is None


def test_goodput() -> None:
    good = answer(total_s=1.0, num_tokens=11, first_s=0.2)  # TPOT 80 ms
    assert is_good(good, {"ttft": 200.0, "tpot": 80.1, "e2el": 1000.0})
    assert (
        not is_good(good, {"ttft": 199.9}) and not is_good(good, {"tpot": 79.9}) and not is_good(good, {"e2el": 999.0})
    )
    assert is_good(answer(num_tokens=1, first_s=0.1), {"tpot": 1.0})  # nothing was late
    assert not is_good(answer(num_tokens=None, first_s=0.1), {"tpot": 1.0})  # nobody can tell
    assert not is_good(failed(), {"e2el": 1e9})
    found = throughput([passed("a", good, failed(1), total_s=2.0)], {"ttft": 250.0})
    assert found["goodput_requests_per_second"] == 0.5
