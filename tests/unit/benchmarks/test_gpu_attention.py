"""The script that times attention over blocks, tried through the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_attention
from tests.unit.ops.conftest import let_the_interpreter_count
from torch import Tensor

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError
from paceline.ops import paged_attention
from paceline.ops.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    let_the_interpreter_count(monkeypatch)


def test_it_checks_and_times_every_size(tmp_path: Path) -> None:
    assert gpu_attention.main(["--device", "cpu", "--sweep", "none", "--out", str(tmp_path)]) == EXIT_DONE
    result = json.loads((tmp_path / "gpu-attention.json").read_text())
    assert result["complete"] and [(row["batch"], row["rows"]) for row in result["rows"]] == [
        (1, 1),
        (1, 3),
        (2, 1),
        (2, 3),
    ]
    assert all(row["error"] < 1e-5 and row["us"] > 0 and row["is_chosen"] for row in result["rows"])


def test_a_kernel_that_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = paged_attention.paged_attention_reference

    def shifted(q_BTNH: Tensor, *rest: object) -> Tensor:
        return honest(q_BTNH * 1.1, *rest)

    monkeypatch.setattr(paged_attention, "paged_attention_reference", shifted)
    assert gpu_attention.main(["--device", "cpu", "--out", str(tmp_path)]) == EXIT_CHECK_SAYS_NO
    assert json.loads((tmp_path / "gpu-attention.json").read_text())["rows"] == []


def test_a_gpu_is_not_made_up() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="sees no GPU"):
        gpu_attention.main(["--device", "cuda"])


def test_bytes_are_those_of_keys_values_queries_and_results() -> None:
    size = gpu_attention.Size("smollm2", gpu_attention.SHAPES["smollm2"], 2, 100, 4)
    assert size.num_bytes == 2 * (2 * 104 * 3 * 64 * 2 + 2 * 2 * 4 * 9 * 64)
