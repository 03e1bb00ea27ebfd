"""The benchmark of cuts, on a target of six layers: nothing planted survives that should not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.partition_invariance import main


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-layers", "6", "--block-size", "2", "--hidden-size", "32", "--threads", "1"]
    assert main([*arguments, "--num-tokens", "3", "--dtype", "float32", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "partition-invariance.json").read_text())["rows"]
    assert [(row["stages"], row["num_cuts"], row["planted_fault"]) for row in rows] == [
        (2, 5, None),
        (3, 10, None),
        (2, 5, "prefix at the boundary"),
        (2, 5, "two kernels"),
        (2, 5, "two kernels, no zero delta"),
    ]
    assert [row["num_identical"] for row in rows] == [5, 10, 0, 5, 2], "two of five cuts lie between blocks"
    assert "median" in rows[2]["cosine"] and rows[0]["cosine"] is None
    assert "prefix at the boundary" in capsys.readouterr().out
