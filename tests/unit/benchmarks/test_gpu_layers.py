"""The layer benchmark runs without a GPU on a tiny layer; what is wrong is told, and the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import gpu_layer_cases, gpu_layers

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE
from paceline.ops.dispatch import HAS_TRITON
from paceline.ops.skinny_product import Tile

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


def test_a_trial_on_the_cpu_checks_and_times_every_operation(tmp_path: Path) -> None:
    assert gpu_layers.main(["--device", "cpu", "--rows", "3", "--out", str(tmp_path)]) == EXIT_DONE
    rows = json.loads((tmp_path / "gpu-layers.json").read_text())["rows"]
    assert [row["operation"] for row in rows] == [*gpu_layer_cases.OPERATIONS, "stack, fused", "stack, library"]
    assert all(row["us"] > 0 for row in rows)


def test_an_operation_that_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_layer_cases, "ALLOWED_ERROR", -1.0)
    options = ["--device", "cpu", "--rows", "1", "--operations", "o", "stack"]
    assert gpu_layers.main(options) == EXIT_CHECK_SAYS_NO
    shown = capsys.readouterr()
    assert "rows, o: ArithmeticError" in shown.err and "stack" in shown.out


def test_cuts_are_tried_in_whole_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_layer_cases, "tiles", lambda *_: iter([Tile(32, 32, 2)]))
    options = ["--device", "cpu", "--rows", "2", "--operations", "gated", "--tune", "--num-replays", "1"]
    assert gpu_layers.main(options) == EXIT_DONE
    assert "(32, 32, 2, 4, 4, 0): " in capsys.readouterr().err


def test_chains_are_timed_with_a_part_of_the_weight_asked_for_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_layers.main(["--device", "cpu", "--rows", "2", "--ahead-kb", "0", "8"]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert all(f"chain, ahead {ahead}" in shown for ahead in (None, 0, 8))


def test_every_cut_to_be_tried_fits_a_multiprocessor() -> None:
    for shape in gpu_layer_cases.SHAPES:
        for name in gpu_layer_cases.OPERATIONS:
            cuts = list(gpu_layer_cases.tiles(name, shape))
            assert len(cuts) >= 10
            for cut in cuts:
                assert (cut.stages - 1) * 2 * cut.block * (cut.outputs + 16) <= 227 * 1024
