"""The benchmark of block attention on its small shape, where it compares both and times the forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import block_attention
from torch import Tensor

from paceline.errors import EXIT_DONE


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_row_per_shape_is_written(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--threads", "1", "--repeats", "1", "--out", str(tmp_path)]
    assert block_attention.main(arguments) == EXIT_DONE
    found = json.loads((tmp_path / "block-attention.json").read_text(encoding="utf-8"))
    (row,) = found["rows"]
    assert (row["rows"], row["blocks"], row["heads"]) == ("2 x 96", "4 x 8", "9/3 x 64")
    assert row["flex_over_dense"] > 0 and row["largest_difference"] < 0.04


def test_results_that_differ_are_no_measurement() -> None:
    def zeros() -> Tensor:
        return torch.zeros(2, 2)

    def ones() -> Tensor:
        return torch.ones(2, 2)

    assert block_attention.compare(ones, ones, [], has_gradient=False) == 0.0
    with pytest.raises(AssertionError, match="differ by 1"):
        block_attention.compare(ones, zeros, [], has_gradient=False)
