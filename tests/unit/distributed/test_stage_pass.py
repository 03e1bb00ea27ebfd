"""Taps 0 to L and logits of two and three real processes: those of the whole target, to the last bit, at any cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.distributed.spread import DEEP, Cut, same_bits
from tests.unit.training.processes import run_ranks, values

# One behind the embedding, around and at the end of a block of 8, inside others, before the last layer.
CUTS: list[Cut] = [
    ((cut,), stream, dtype)
    for cut, dtype in [(1, "float32"), (7, "bfloat16"), (8, "float32"), (13, "float32"), (16, "bfloat16")]
    for stream in ("prefix", "attn_res")
]
CUTS += [((21,), "attn_res", "bfloat16"), ((31,), "attn_res", "float32")]


def test_two_processes_at_a_sample_of_cuts(models: Path, tmp_path: Path) -> None:
    first, last = values(run_ranks(same_bits, tmp_path / "run", models, CUTS))
    assert first == last == [[]] * len(CUTS)


def test_three_processes(models: Path, tmp_path: Path) -> None:
    cuts: list[Cut] = [
        ((8, 16), "attn_res", "float32"),
        ((3, 5), "attn_res", "bfloat16"),
        ((1, 31), "prefix", "float32"),
    ]
    found = values(run_ranks(same_bits, tmp_path / "run", models, cuts, size=3))
    assert found == [[[]] * len(cuts)] * 3


@pytest.mark.parametrize(
    ("fault", "differing"),
    [("prefix at the boundary", ["13"]), ("taps stay behind", [str(capture) for capture in range(14)])],
)
def test_faults_of_public_engines_are_seen(fault: str, differing: list[str], models: Path, tmp_path: Path) -> None:
    """Both leave the logits right."""
    cut: Cut = ((13,), "attn_res", "float32")
    found: Any = values(run_ranks(same_bits, tmp_path / "run", models, [cut], fault))
    assert found == [[[]], [differing]] and DEEP > 13
