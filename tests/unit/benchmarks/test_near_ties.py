from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from benchmarks.near_ties import find_divergence, near_tie_tolerance
from torch import Tensor


@pytest.mark.parametrize(
    ("largest", "tolerance"), [(8.0, 0.25), (15.9, 0.25), (16.0, 0.5), (-12.0, 0.25), (1.0, 1 / 32)]
)
def test_four_units_in_the_last_place_of_bf16(largest: float, tolerance: float) -> None:
    assert near_tie_tolerance(largest) == tolerance
    unit = torch.tensor(abs(largest), dtype=torch.bfloat16)
    assert 4 * float(torch.nextafter(unit, torch.tensor(torch.inf, dtype=torch.bfloat16)) - unit) == tolerance


def never(_ids: Sequence[int]) -> Tensor:
    raise AssertionError("identical texts need no logits")


def test_identical_texts_are_not_judged() -> None:
    assert find_divergence([1], [2, 3], [2, 3], never) is None


@pytest.mark.parametrize(("lower", "is_near_tie"), [(9.75, True), (9.74, False)])
def test_the_first_difference_decides(lower: float, is_near_tie: bool) -> None:
    asked: list[list[int]] = []

    def logits(ids: Sequence[int]) -> Tensor:
        asked.append(list(ids))
        return torch.tensor([0.0, 10.0, lower, 0.0])

    found = find_divergence([7, 8], [3, 2, 0], [3, 1, 3], logits)
    assert asked == [[7, 8, 3]]
    assert found is not None and found.position == 1 and found.gap == pytest.approx(10 - lower)
    assert found.is_near_tie == is_near_tie


def test_both_tokens_must_be_near_the_largest() -> None:
    """Two tokens that are equal to each other, far below the best, are a fault."""
    found = find_divergence([0], [2], [3], lambda _ids: torch.tensor([10.0, 0.0, 1.0, 1.0]))
    assert found is not None and found.gap == 9.0 and not found.is_near_tie


def test_an_early_end_is_never_a_near_tie() -> None:
    found = find_divergence([0], [2], [2, 3], lambda _ids: torch.tensor([10.0, 0.0, 1.0, 10.0]))
    assert found is not None and found.position == 1 and found.gap is None and not found.is_near_tie
