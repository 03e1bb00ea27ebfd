"""The kernel benchmark runs without a GPU through the interpreter, and a wrong kernel stops it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks import kernel_cases, kernels
from benchmarks.kernel_cases import TINY, Case, make_cases

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError
from paceline.ops.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
CPU = torch.device("cpu")


def test_a_trial_on_the_cpu_checks_every_kernel_and_writes_rows(tmp_path: Path) -> None:
    assert kernels.main(["--device", "cpu", "--out", str(tmp_path)]) == EXIT_DONE
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert result["command"].startswith("python -m benchmarks.")
    operations = {(row["operation"], row["batch"]) for row in result["rows"]}
    names = ("grouped_convolution", "candidate_walk", "write_context_kv", "verify_block", "sample_tokens")
    assert operations == {(name, batch) for name in names for batch in (1, 2)}
    for row in result["rows"]:
        assert row["is_right"] and row["kernel_us"] > 0 and row["reference_us"] > 0
    assert "interpreted" in result["machine"]


def test_a_wrong_kernel_is_told_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = make_cases

    def faulty(*arguments: object) -> Iterator[Case]:
        for case in original(*arguments):
            yield dataclasses.replace(case, errors=lambda: [(0.0, 1e-5), (0.5, 0.01)])

    monkeypatch.setattr(kernel_cases, "make_cases", faulty)
    assert kernels.main(["--device", "cpu", "--out", str(tmp_path)]) == EXIT_CHECK_SAYS_NO
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        kernels.main([])


def test_a_path_that_parts_at_a_near_tie_is_no_error() -> None:
    temperature, gumbel = torch.ones(1), torch.zeros(1, 3, 2)
    scores = torch.tensor([[[1.0, 0.0], [2.0, 2.0001], [3.0, 0.0]]])
    expected = torch.tensor([[4, 5, 6]]), scores
    after = scores.clone()
    after[0, 2] = 9.0
    for ids, error in (([4, 7, 8], 0.0), ([9, 5, 6], float("inf")), ([4, 5, 6], 9.0)):
        found = torch.tensor([ids]), after
        assert kernel_cases._walk_error(found, expected, temperature, gumbel) == pytest.approx(error)


def test_the_least_traffic_counts_inputs_and_results_once() -> None:
    cases = {case.operation: case for case in make_cases((TINY,), (2,), CPU)}
    rows, width, groups = 6, 24, 4
    assert cases["grouped_convolution"].num_bytes == (
        2 * rows * width * 2 + 2 * width * 2 + rows * 2 * groups * 2 + rows * 8
    )
    per_row = 2 * 2 * 2 * 10 * 2  # layers, keys and values, heads, head size, bytes
    assert cases["write_context_kv"].num_bytes == 2 * rows * per_row + 2 * 10 * 4 + rows * (8 + 8 + 10 * 4)
