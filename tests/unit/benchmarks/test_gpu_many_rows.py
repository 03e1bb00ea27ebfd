"""The benchmark of what lies between products runs on a CPU, and tells what is wrong."""

from __future__ import annotations

import pytest
import torch
from benchmarks import gpu_many_rows
from tests.unit.ops.conftest import let_the_interpreter_count

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE
from paceline.ops import add_norm
from paceline.ops.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
TRIAL = ["--device", "cpu", "--num-replays", "1"]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    let_the_interpreter_count(monkeypatch)


def test_a_trial_measures_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--operations", "norm", "gated", "attention", "largest", "chain", "gate-up", "--context", "130"]
    code = gpu_many_rows.main([*TRIAL, *options])
    output = capsys.readouterr()
    assert code == EXIT_DONE, output.err
    for name in ("norm, copy", "gated", "attention", "largest runs", "chain of 2 layers at 32 rows", "gate-up, one"):
        assert name in output.out


def test_a_wrong_result_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = add_norm.add_norm_triton

    def wrong(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = right(*arguments)  # type: ignore[arg-type]
        return total, normed * 1.05

    monkeypatch.setattr(add_norm, "add_norm_triton", wrong)
    assert gpu_many_rows.main([*TRIAL, "--operations", "norm"]) == EXIT_CHECK_SAYS_NO
    assert capsys.readouterr().err.count("wrong by") == 3
