from __future__ import annotations

import pytest
from benchmarks.peers.closed_loop import TimedAnswer
from benchmarks.serving_rows import (
    Loop,
    decode_tokens_per_second,
    prompt_speeds,
    ratio,
    round_noise,
    serving_row,
    tokens_per_second,
)

from paceline.trace.step import StepRecord


def answer(num_tokens: int, added_s: float, first_s: float, last_s: float) -> TimedAnswer:
    return TimedAnswer(list(range(num_tokens)), added_s, first_s, last_s)


# Two requests at once: the second waits for the first one's prompt pass, and both decode from 2 to 5.
PAIR = Loop([answer(5, 0.0, 1.0, 5.0), answer(4, 0.0, 2.0, 5.0)])
# One after the other: nobody decodes between 3 and 4.
TURNS = Loop([answer(5, 0.0, 1.0, 3.0), answer(4, 3.0, 4.0, 5.5)])


def test_all_tokens_over_all_time() -> None:
    assert tokens_per_second([PAIR]) == 9 / 5
    assert tokens_per_second([PAIR, TURNS]) == 18 / (5 + 5.5)


def test_decoding_is_the_time_in_which_somebody_decodes() -> None:
    assert (PAIR.decode_s, TURNS.decode_s) == (4.0, 3.5)
    assert decode_tokens_per_second([PAIR]) == 7 / 4
    assert decode_tokens_per_second([TURNS]) == 7 / 3.5


def test_a_prompts_rounds_are_pooled_and_compared_with_its_own() -> None:
    assert prompt_speeds([PAIR, TURNS]) == [8 / 6, 6 / 4.5]
    middle, low, high = ratio([TURNS], [PAIR])
    assert middle == 2.0 and (low, high) == (2.0, 2.0)


def test_rows() -> None:
    record = StepRecord("a", 0, 0, 1, (5, 6), 1, 1, (5, 9), 9, 1.0)
    drafted = Loop(TURNS.answers, [record])
    row = serving_row("speculative", 2, [drafted], [PAIR], [TURNS])
    assert row["ratio_to_plain"] == 2.0 and row["ratio_to_vllm"] == 1.0 and row["num_prompts"] == 2
    assert row["total_ratio_to_plain"] == pytest.approx(5 / 5.5) and row["acceptance_length"] == 2.0
    assert row["tpot_ms_p50"] == 500.0 and row["ttft_ms_p50"] == 1000.0
    alone = serving_row("plain", 2, [PAIR], [PAIR], None)
    assert "ratio_to_vllm" not in alone and "acceptance_length" not in alone


def test_noise() -> None:
    assert round_noise([PAIR]) is None
    assert round_noise([PAIR, TURNS]) == pytest.approx(0.1)
