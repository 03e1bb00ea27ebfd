"""Figures of hand-made traces, worked out on paper."""

from __future__ import annotations

import math

import pytest
from tests.unit.reporting.traces import TOKENS, answer, two_answers

from paceline.evaluation.trace_figures import trace_figures
from paceline.trace.answer import TracedAnswer
from paceline.trace.step import RequestTrace, StepDetails


def values(rates: object) -> dict[str, float | None]:
    return {rate.label: rate.value for rate in rates}  # type: ignore[attr-defined]


def test_figures_of_two_answers() -> None:
    found = trace_figures(two_answers())
    assert (found.num_prompts, found.num_answers, found.num_output_tokens) == (2, 2, 2 + 4 + 2 + 1 + 3)
    assert found.length is not None
    assert found.length.value == pytest.approx((4 + 6) / 4)  # 1 + (3 + 1 + 0 + 2) / 4
    assert values(found.per_position) == {"0": 3 / 4, "1": 2 / 4, "2": 1 / 4}
    assert values(found.conditional) == {"0": 3 / 4, "1": 2 / 3, "2": 1 / 2}
    assert found.summary.histogram == (1, 1, 1, 1)
    assert found.first_refusals == [1, 1, 1, 1]  # the last kept all
    assert values(found.categories) == {"prose": 7 / 3, "code": 3.0}
    assert [rate.low for rate in found.categories] == [None, None], "one prompt each says nothing of others"
    assert found.methods == ["dflash/greedy"] and found.is_lossless


def test_intervals_come_from_whole_prompts() -> None:
    """Two prompts, so three kinds of resamples: a twice, b twice, one of each."""
    length = trace_figures(two_answers()).length
    assert length is not None and length.low == pytest.approx(7 / 3) and length.high == pytest.approx(3.0)
    alone = trace_figures(two_answers()[:1]).length
    assert alone is not None and alone.low is None


def test_a_prompt_with_several_answers_is_one_unit() -> None:
    both = [answer("a", [([1, 2], 2, 3)]), answer("a", [([1, 2], 0, 3)])]
    found = trace_figures(both)
    assert (found.num_prompts, found.num_answers) == (1, 2)
    assert found.length is not None and found.length.value == 2.0 and found.length.low is None


def test_classes_are_of_the_token_that_came() -> None:
    """Kept: " cat", " sat", " on"; then refused "\\n" for "."; then refused " cat" for " Anna"."""
    found = trace_figures([answer("a", [([1, 2, 8], 3, 3), ([4, 5, 6], 1, 7), ([1, 1, 1], 0, 6)])])
    assert {rate.label: (rate.total, rate.of) for rate in found.classes} == {
        "code": (1, 1),
        "word": (3, 4),  # " Anna" begins a sentence
        "punctuation": (0, 1),
    }


def test_no_classes_without_text() -> None:
    assert trace_figures([answer("a", [([1, 2], 2, 3)], tokens={})]).classes == []


def test_along_the_context_every_step_counts_once() -> None:
    found = trace_figures(two_answers())
    assert sum(rate.of for rate in found.along_context) == 4
    assert sum(rate.total for rate in found.along_context) == 10
    assert found.along_context[0].label.startswith("10")


def details(confidence: float, draft: float, target_entropy: float) -> StepDetails:
    return StepDetails(
        draft_logprobs=(math.log(draft),) * 2,
        draft_entropies=(0.2,) * 2,
        confidences=(confidence,) * 2,
        target_logprobs=(-0.1,) * 2,
        target_entropies=(target_entropy,) * 2,
        verify_ms=6.0,
        sampling_ms=1.0,
        draft_ms=2.0,
        host_ms=1.0,
    )


def test_calibration_and_entropy_count_judged_drafts_alone() -> None:
    one = answer("a", [([1, 2], 1, 3)], details=details(0.95, 0.25, 0.7))  # kept one, refused one
    two = answer("b", [([1, 2], 0, 3)], details=details(0.35, 0.25, 2.5))  # refused the first; the second was not seen
    found = trace_figures([one, two])
    assert [(each.label, round(each.said, 6), each.kept.total, each.kept.of) for each in found.confidence] == [
        ("0.3–0.4", 0.35, 0, 1),
        ("0.9–1.0", 0.95, 1, 2),
    ]
    assert [(each.label, each.kept.total, each.kept.of) for each in found.probability] == [("0.2–0.3", 1, 3)]
    assert {rate.label: (rate.total, rate.of) for rate in found.draft_entropies} == {"0.1–0.25": (1, 3)}
    assert {rate.label: (rate.total, rate.of) for rate in found.target_entropies} == {"0.5–1": (1, 2), "2–3": (0, 1)}
    assert found.times is not None and found.times.parts is not None
    assert (found.times.parts.verify_ms, found.times.parts.num_steps) == (6.0, 2)


def test_times_and_break_even() -> None:
    drafted = [answer("a", [([1, 2], 1, 3), ([1, 2], 1, 3)], step_ms=12.0)]
    plain = [
        answer("a", [([], 0, 1)] * 4, method="plain", step_ms=4.0),
        answer("other", [([], 0, 1)] * 4, method="plain", step_ms=400.0),
    ]
    times = trace_figures(drafted, plain).times
    assert times is not None
    assert (times.mean_ms, times.median_ms, times.plain_step_ms) == (12.0, 12.0, 4.0), "of the same prompts alone"
    assert times.break_even == pytest.approx(3.0)
    assert times.tokens_per_second == pytest.approx(4 / 0.024)
    assert times.speed_up == pytest.approx((4 / 0.024) / (4 / 0.016))


def test_an_answer_of_one_token_has_no_step() -> None:
    only = TracedAnswer(RequestTrace("r", 3, 0, [], "length", 1.0, 1.0, True, "dflash/greedy"), None, TOKENS)
    found = trace_figures([only])
    assert found.length is None and found.times is None and found.per_position == []


def test_what_a_stop_cut_off_is_verified_and_not_delivered() -> None:
    whole = answer("a", [([1, 2, 8], 3, 3)])
    record = whole.trace.records[0]
    cut = type(record)("a", 0, 10, 0, (1, 2, 8), 3, 1, (1,), None, 1.0)
    whole.trace.records[0] = cut
    found = trace_figures([whole])
    assert found.length is not None and found.length.value == 2.0
    assert found.first_refusals == [0, 0, 0, 1]
