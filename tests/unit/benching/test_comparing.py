"""Pairs of set-ups by worked numbers, and what must not sway them."""

from __future__ import annotations

import pytest
from tests.unit.benching.made import answer, failed, passed

from paceline.benching.comparing import compare
from paceline.benching.latency import tpot_s


def test_the_median_of_ratios_of_prompts() -> None:
    base = passed("base", answer(0, total_s=4.0), answer(1, total_s=2.0), answer(2, total_s=2.0), total_s=8.0)
    ours = passed("ours", answer(0, total_s=2.0), answer(1, total_s=1.0), answer(2, total_s=0.5), total_s=4.0)
    found = compare([ours], [base], expects_identity=True)
    assert found is not None and found.speed_up is not None
    assert (found.speed_up.estimate, found.speed_up.num_units) == (2.0, 3)
    assert 2.0 <= found.speed_up.low <= found.speed_up.high <= 4.0
    assert found.total_ratio == pytest.approx(2.0)
    assert (found.num_identical, found.num_compared, found.num_left_out) == (3, 3, 0)


def test_rounds_of_a_prompt_are_pooled_and_it_stays_one_unit() -> None:
    base = [passed("base", answer(total_s=3.0)), passed("base", answer(total_s=1.0), round_index=1)]
    ours = [passed("ours", answer(total_s=1.0)), passed("ours", answer(total_s=1.0), round_index=1)]
    found = compare(ours, base, expects_identity=True)
    assert found is not None and found.speed_up is not None
    assert (found.speed_up.estimate, found.speed_up.num_units) == (2.0, 1)  # 4 s beside 2 s, not a mean of ratios


def test_the_same_prompt_twice_in_a_pass_is_one_unit() -> None:
    twice = [answer(0, prompt_id="p"), answer(1, prompt_id="p", output_sha256="text 0")]
    found = compare([passed("a", *twice)], [passed("b", *twice)], expects_identity=True)
    assert found is not None and found.speed_up is not None
    assert (found.num_compared, found.speed_up.num_units) == (1, 1)


def test_another_seed_may_give_a_repeated_prompt_another_answer() -> None:
    twice = [answer(0, prompt_id="p"), answer(1, prompt_id="p")]
    found = compare([passed("a", *twice)], [passed("b", *twice)], expects_identity=True)
    assert found is not None and found.num_identical == 1
    crossed = [answer(0, prompt_id="p", output_sha256="text 1"), answer(1, prompt_id="p", output_sha256="text 0")]
    found = compare([passed("a", *twice)], [passed("b", *crossed)], expects_identity=True)
    assert found is not None and found.num_identical == 0


def test_an_answer_that_is_longer_is_not_slower() -> None:
    base = passed("base", answer(total_s=1.0, num_tokens=10, first_s=0.5))
    ours = passed("ours", answer(total_s=2.0, num_tokens=40, first_s=1.5))
    found = compare([ours], [base], expects_identity=False)
    assert found is not None and found.speed_up is not None and found.decode_speed_up is not None
    assert found.speed_up.estimate == pytest.approx(2.0)  # 20 tokens per second beside 10
    assert found.decode_speed_up.estimate == pytest.approx(39 / 0.5 / (9 / 0.5))
    assert found.num_identical is None


def test_failures_are_left_out_of_both() -> None:
    base = passed("base", answer(0, total_s=1.0), answer(1, total_s=1.0))
    ours = passed("ours", failed(0), answer(1, total_s=0.5))
    for mine, other, ratio in ((ours, base, 2.0), (base, ours, 0.5)):
        found = compare([mine], [other], expects_identity=True)
        assert found is not None and found.speed_up is not None
        assert (found.speed_up.estimate, found.num_compared, found.num_left_out) == (ratio, 1, 1)
    nothing = compare([passed("ours", failed(0))], [passed("base", answer(0))], expects_identity=True)
    assert nothing is not None and nothing.speed_up is None and nothing.num_compared == 0


def test_only_rounds_of_both_count() -> None:
    base = [passed("base", answer(total_s=1.0))]
    ours = [passed("ours", answer(total_s=0.5)), passed("ours", answer(total_s=9.0), round_index=1)]
    found = compare(ours, base, expects_identity=True)
    assert found is not None and found.speed_up is not None and found.speed_up.estimate == 2.0
    assert compare(ours[1:], base, expects_identity=True) is None


def test_one_round_that_differs_makes_a_prompt_differ() -> None:
    base = [passed("base", answer()), passed("base", answer(), round_index=1)]
    ours = [passed("ours", answer()), passed("ours", answer(output_sha256="other"), round_index=1)]
    found = compare(ours, base, expects_identity=True)
    assert found is not None and (found.num_identical, found.num_compared) == (0, 1)


def test_without_usage_there_is_no_ratio() -> None:
    found = compare([passed("a", answer(num_tokens=None))], [passed("b", answer())], expects_identity=True)
    assert found is not None and found.speed_up is None and found.total_ratio is None and found.num_identical == 1


def test_an_answer_in_one_delta_has_no_decoding() -> None:
    """Its end is microseconds behind its first delta; nine tokens in that time would be a speed of millions."""
    base = [answer(0, first_s=0.5, delta_s=(0.5, 0.8, 1.0)), answer(1, first_s=0.5, delta_s=(0.5, 0.8, 1.0))]
    ours = [answer(0, first_s=0.9999, delta_s=(0.9999,)), answer(1, first_s=0.5, delta_s=(0.5, 1.0))]
    found = compare([passed("a", *ours)], [passed("b", *base)], expects_identity=False)
    assert found is not None and found.speed_up is not None and found.decode_speed_up is not None
    assert (found.speed_up.num_units, found.decode_speed_up.num_units) == (2, 1)
    assert found.decode_speed_up.high == 1.0
    assert tpot_s(ours[0]) is None and tpot_s(ours[1]) is not None
