from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.evaluation.lossless import Comparison, compare_ids, num_identical

ids = st.lists(st.integers(0, 3), max_size=12)


def test_identical_different_and_cut() -> None:
    assert compare_ids([1, 2], [1, 2]) == Comparison(None, None, None, 2)
    assert compare_ids([1, 5, 9], [1, 2, 9]) == Comparison(1, 5, 2, 3)
    assert compare_ids([1], [1, 2]) == Comparison(1, None, 2, 2)
    assert compare_ids([1, 2], [1]) == Comparison(1, 2, None, 2)
    assert compare_ids([], []).is_identical


def test_descriptions() -> None:
    assert compare_ids([1], [1]).describe() == "yes"
    assert compare_ids([1, 3], [1, 2]).describe() == "no, from token 1 on (token 3 instead of token 2)"
    assert compare_ids([1], [1, 2]).describe() == "no, from token 1 on (the end instead of token 2)"


@given(ids, ids)
def test_identical_exactly_when_equal(ours: list[int], reference: list[int]) -> None:
    comparison = compare_ids(ours, reference)
    assert comparison.is_identical == (ours == reference)
    if comparison.first_divergence is not None:
        at = comparison.first_divergence
        assert ours[:at] == reference[:at]
        assert ours[at : at + 1] != reference[at : at + 1]


def test_count() -> None:
    assert num_identical([compare_ids([1], [1]), compare_ids([1], [2])]) == 1
