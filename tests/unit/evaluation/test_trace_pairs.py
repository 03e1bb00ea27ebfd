"""Two set-ups on the same prompts: who is paired with whom, which steps differ, and what the figures say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.reporting.traces import answer

from paceline.errors import DataError
from paceline.evaluation.trace_pairs import compare_traces
from paceline.trace.step import StepRecord

# The text of "a" is 0 1 2 3 4 5 6 in both: A takes it in blocks of 3 + 1 and 1 + 1, B in 1 + 1, 1 + 1 and 1 + 1.
A = [answer("a", [([1, 2, 3], 3, 4), ([5, 9, 9], 1, 6)]), answer("b", [([1, 2, 9], 2, 3)])]
B = [
    answer("b", [([1, 9, 9], 1, 2), ([3, 9, 9], 1, 4)]),
    answer("a", [([1, 9, 9], 1, 2), ([3, 9], 1, 4), ([5, 9], 1, 6)]),
]


def test_answers_are_paired_by_prompt_and_compared_from_equal_places() -> None:
    found = compare_traces(A, B)
    assert [(pair.before.name, pair.after.name) for pair in found.pairs] == [("a", "a"), ("b", "b")]
    first, second = found.pairs
    assert (first.num_same, first.is_same_text) == (7, True)
    assert [(each.position, each.before.num_accepted, each.after.num_accepted) for each in first.differing] == [
        (1, 3, 1)
    ]
    assert first.num_shared_steps == 2, "at the first token, and at the fifth, where both keep one"
    assert (second.num_same, second.is_same_text, second.num_shared_steps) == (4, False, 1)
    assert (found.num_same_texts, found.num_shared_steps, found.num_differing_steps) == (1, 3, 2)
    assert not found.is_by_order and (found.num_only_before, found.num_only_after) == (0, 0)


def test_figures_are_paired_by_prompt() -> None:
    found = compare_traces(A, B)
    assert found.length_before.estimate == pytest.approx((6 + 3) / 3)
    assert found.length_after.estimate == pytest.approx((6 + 4) / 5)
    assert found.quotient.estimate == pytest.approx(2 / 3)
    assert found.quotient.low == found.quotient.high == pytest.approx(2 / 3), "both prompts have the same ratio"
    assert found.difference.estimate == pytest.approx(-1.0)
    assert (found.sign.wins, found.sign.losses, found.sign.ties) == (0, 2, 0)
    assert found.speed is not None and found.speed.estimate == pytest.approx((10 / 0.05) / (9 / 0.03))


def test_prompts_without_a_partner_are_told_and_left_out() -> None:
    found = compare_traces([*A, answer("c", [([1], 1, 2)])], B)
    assert (len(found.pairs), found.num_only_before, found.num_only_after) == (2, 1, 0)


def test_of_a_question_answered_twice_the_last_answer_counts() -> None:
    found = compare_traces([answer("a", [([1], 0, 9)]), *A], B)
    assert found.pairs[0].before is A[0] and found.num_only_before == 1


def test_sets_of_other_names_are_paired_by_prompt() -> None:
    other = [replace(each, prompt=replace(each.prompt, set=None)) for each in B if each.prompt is not None]
    assert len(compare_traces(A, other).pairs) == 2


def test_files_without_prompts_are_paired_by_order() -> None:
    first = [replace(each, prompt=None) for each in A]
    second = [replace(each, prompt=None) for each in (B[1], B[0])]
    assert compare_traces(first, second).is_by_order
    with pytest.raises(DataError, match="one file has 2 answers, the other 1"):
        compare_traces(first, second[:1])
    second[1] = replace(second[1], trace=replace(second[1].trace, num_prompt_tokens=11))
    with pytest.raises(DataError, match="answer 2 has a prompt of 10 tokens in one file and of 11 in the other"):
        compare_traces(first, second)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(DataError, match="no question in common"):
        compare_traces(A, [answer("z", [([1], 1, 2)])])
    with pytest.raises(DataError, match="1 of 2 questions are others in the two files, such as 'a'"):
        compare_traces(A, [B[0], answer("a", [([1], 1, 2)], sha256="bb")])
    with pytest.raises(DataError, match="no prompt has steps that judged drafts in both"):
        compare_traces(A, [answer("a", [([], 0, 1)], method="plain")])


def test_steps_behind_the_place_where_texts_part_are_not_compared() -> None:
    one = answer("a", [([1, 2], 2, 3), ([4, 5], 2, 6)])
    other = answer("a", [([1, 2], 2, 9), ([4, 5], 0, 6)])
    (pair,) = compare_traces([one], [other]).pairs
    assert pair.num_same == 3 and pair.num_shared_steps == 1 and pair.differing == []


def test_what_the_budget_cut_off_makes_no_difference() -> None:
    one, other = answer("a", [([1, 2, 3], 3, 4)]), answer("a", [([1, 2, 9], 2, 3)])
    for each, verified in ((one, 3), (other, 2)):
        drafts = each.trace.records[0].proposed_ids
        each.trace.records[0] = StepRecord("a", 0, 10, 0, drafts, verified, 1, (1,), None, 10.0)
    (pair,) = compare_traces([one], [other]).pairs
    assert pair.num_shared_steps == 1 and pair.differing == []
