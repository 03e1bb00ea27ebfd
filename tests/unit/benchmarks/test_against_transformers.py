from __future__ import annotations

import pytest
import torch
from benchmarks.against_transformers import exit_code, logit_difference, make_row
from benchmarks.near_ties import Divergence

NEAR, FAR, ENDED = Divergence(3, 0.2, 0.25), Divergence(3, 0.3, 0.25), Divergence(3, None, 0.25)


def test_row() -> None:
    row = make_row("bfloat16", [None, NEAR, None], 0.5, 20.0)
    assert row == {
        "dtype": "bfloat16",
        "num_prompts": 3,
        "num_identical": 2,
        "num_near_ties": 1,
        "first_divergence_gaps": [0.2],
        "max_logit_difference": 0.5,
        "largest_logit": 20.0,
    }


@pytest.mark.parametrize(
    ("dtype", "divergence", "difference", "code"),
    [
        ("float32", None, 5e-5, 0),
        ("float32", NEAR, 5e-5, 0),
        ("float32", None, 2e-4, 3),
        ("bfloat16", NEAR, 0.5, 0),
        ("bfloat16", FAR, 0.5, 3),
        ("bfloat16", ENDED, 0.5, 3),
    ],
)
def test_only_rounding_is_excused(dtype: str, divergence: Divergence | None, difference: float, code: int) -> None:
    rows = [make_row("float32", [None], 0.0, 20.0), make_row(dtype, [None, divergence], difference, 20.0)]
    assert exit_code(rows) == code


def test_logit_difference() -> None:
    ours, theirs = torch.tensor([[1.0, -5.0]]), torch.tensor([[1.5, -5.0]])
    assert logit_difference(ours, theirs) == (0.5, 5.0)
