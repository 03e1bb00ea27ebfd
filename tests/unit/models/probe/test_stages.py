"""Measures, near-ties, and the positions of a probe."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.models.probe.stages import (
    MEASURES,
    check_tensor,
    compare_stage,
    relative_error,
    scored_ids,
    settled,
    share_unequal,
    spread_error,
    stretched,
)


def test_measures() -> None:
    stored = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 3.0]), stored) == pytest.approx(0.2)
    assert relative_error(torch.ones(3), stored) == math.inf
    logits = torch.tensor([[100.0, 101.0, 102.0]])
    assert relative_error(logits + 0.5, logits) < 0.01, "a shared offset would hide the difference"
    assert spread_error(logits + 0.5, logits) == pytest.approx(0.5 * math.sqrt(3) / math.sqrt(2))
    assert share_unequal(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 4, 3])) == 0.5


def test_the_worst_tensor_of_a_stage_decides() -> None:
    stored = {"context_key": torch.ones(4), "context_value": torch.ones(4)}
    found = {"context_key": torch.ones(4) * 1.01, "context_value": torch.ones(4) * 1.5}
    result = compare_stage("keys", found, stored)
    assert not result.is_ok and result.error == pytest.approx(0.5 / MEASURES["context_value"].tolerance)
    assert "0.500" in result.note
    assert compare_stage("keys", {**found, "context_value": torch.ones(4)}, stored).is_ok
    nan = compare_stage("keys", {**found, "context_key": torch.full((4,), float("nan"))}, stored)
    assert not nan.is_ok
    other = compare_stage("keys", {**found, "context_key": torch.ones(5)}, stored)
    assert not other.is_ok and "[5], recorded was [4]" in other.note


@pytest.mark.parametrize("reach", [1, 2, 5, 7, 8, 100, 4096])
@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_stretched_distances_rise_to_their_reach(count: int, reach: int) -> None:
    distances = stretched(count, reach)
    assert len(distances) == min(count, reach)
    assert (distances == sorted(set(distances)) and distances[0] == 1) or count == 1
    assert distances[-1] <= reach and (distances[-1] == reach or count == 1)


def test_scored_ids_hold_the_best_and_a_spread() -> None:
    logits = torch.arange(100.0).expand(2, 3, 100)
    ids = scored_ids(logits)
    assert ids.shape == (2, 3, 16) and ids[0, 0, :8].tolist() == list(range(99, 91, -1))
    assert ids[0, 0, 8:].tolist() == [0, 12, 25, 37, 50, 62, 75, 87]
    assert scored_ids(torch.zeros(1, 1, 3)).shape == (1, 1, 3 + 8)


def test_a_near_tie_may_flip_and_hides_what_follows() -> None:
    recorded = torch.tensor([[4, 5, 6, 7]])
    candidates = torch.tensor([[[4, 9], [5, 9], [6, 9], [7, 9]]])
    log_q = torch.tensor([[[-1.0, -5.0], [-1.0, -1.5], [-1.0, -5.0], [-1.0, -5.0]]])
    is_out = torch.zeros(1, 4, dtype=torch.bool)
    assert settled(torch.tensor([[4, 9, 1, 1]]), recorded, candidates, log_q, is_out).tolist() == [[4, 5, 6, 7]]
    clear = settled(torch.tensor([[9, 5, 6, 7]]), recorded, candidates, log_q, is_out)
    assert clear.tolist() == [[9, 5, 6, 7]], "the other candidate was far less likely"
    foreign = settled(torch.tensor([[4, 8, 1, 1]]), recorded, candidates, log_q, is_out)
    assert foreign.tolist() == [[4, 8, 1, 1]], "no candidate at all"
    is_out[0, 1] = True
    fallen = settled(torch.tensor([[4, 8, 1, 1]]), recorded, candidates, log_q, is_out)
    assert fallen.tolist() == [[4, 5, 6, 7]], "the recorded draft could not be chosen"
    late = settled(torch.tensor([[8, 9, 1, 1]]), recorded, candidates, log_q, is_out)
    assert late.tolist() == [[8, 9, 1, 1]], "the first difference decides"


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("context", torch.ones(3, 5), r"shape \[3, 5\], expected \[any, 4\]"),
        ("context", torch.ones(0, 4), r"shape \[0, 4\]"),
        ("context", torch.ones(3, 4).long(), "int64"),
        ("context", torch.tensor([[1.0, 2.0, float("inf"), 1.0]]), "NaN or infinity"),
        ("context", torch.tensor([[0.0] * 4, [1.0] * 4]), "prove nothing"),
        ("draft_ids", torch.ones(3, 4), "float32"),
    ],
)
def test_tensors_that_measure_nothing_are_refused(name: str, tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_tensor(name, tensor, (None, 4))
