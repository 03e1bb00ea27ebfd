"""The benchmark of recurrent states on its smallest cases: rows are complete, and what is wrong is not timed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import gpu_recurrent, gpu_recurrent_engines, gpu_recurrent_kernels
from benchmarks.gpu_recurrent import main, parse
from benchmarks.gpu_recurrent_kernels import kernel_cases

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE
from paceline.ops.delta_attention import DeltaGate, DeltaInputs, delta_attention_reference

CPU = torch.device("cpu")


def by_definition(inputs: DeltaInputs, gate: DeltaGate, state: torch.Tensor) -> Any:
    return delta_attention_reference(inputs, gate, state, None, "recurrent")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu_recurrent_kernels, "SIZES", {"mini": (1, 8)})
    for name in ("recurrent", "delta_chunks"):
        monkeypatch.setattr(gpu_recurrent_kernels, name, by_definition)
    return parse(["--device", "cpu", "--parts", "kernels", "--sizes", "mini", "--lengths", "6"])


def test_kernels_are_held_against_the_recurrence(small: Any) -> None:
    cases = dict(kernel_cases(small, CPU))
    assert [key[2] for key in cases] == ["recurrent", "chunks, tf32", "chunks, tf32x3"]
    for name in ("recurrent", "chunks, tf32"):
        row = cases["kernels", "mini", name, 6]()
        assert row["error"] <= row["allowed"] and row["over_recurrent"] > 0 and row["eager_us"] > 0


def test_a_wrong_kernel_is_told_and_not_timed(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(*given: Any) -> Any:
        o, state = by_definition(*given)
        return o, state.mT.contiguous()

    monkeypatch.setattr(gpu_recurrent_kernels, "delta_chunks", transposed)
    wrong: list[str] = []
    rows: list[dict[str, object]] = []
    cases = [case for case in kernel_cases(small, CPU) if case[0][2] != "chunks, tf32x3"]
    monkeypatch.setattr(gpu_recurrent_kernels, "kernel_cases", lambda *_arguments: iter(cases))
    gpu_recurrent._run_part("kernels", small, CPU, SimpleNamespace(put=rows.append), wrong)  # type: ignore[arg-type]
    assert len(wrong) == 1 and wrong[0].startswith("kernels, mini, chunks, tf32, 6: by ")
    assert "us" in rows[0] and not {"us", "eager_us", "over_recurrent"} & set(rows[1])


def test_engines_with_narrow_states_and_prompts_by_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, value in (
        ("_PROMPT_TOKENS", 4),
        ("_NEW_TOKENS", 4),
        ("_WARM_UP", 1),
        ("_TIMED", 2),
        ("KINDS", ("plain",)),
    ):
        monkeypatch.setattr(gpu_recurrent_engines, name, value)
    small = ["--device", "cpu", "--shape", "tiny-k3", "--batches", "1", "--lengths", "5", "--fla", "tuned"]
    assert main([*small, "--parts", "states", "prompts", "--out", str(tmp_path)]) == EXIT_DONE
    rows = {
        (row["part"], row["case"]): row for row in json.loads((tmp_path / "gpu-recurrent.json").read_text())["rows"]
    }
    wide, narrow = (rows["states", f"plain, {dtype}"] for dtype in ("float32", "bfloat16"))
    assert narrow["state_mb"] < wide["state_mb"] and wide["num_equal_texts"] == 1 and wide["step_ms"] > 0
    assert rows["prompts", "recurrent"]["num_same"] == rows["prompts", "auto"]["num_same"] == 4
    assert "the target is on cpu" in rows["prompts", "fla"]["left_out"]


def test_a_case_that_fails_costs_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_arguments: Any) -> Any:
        def fail() -> Any:
            raise RuntimeError("no such kernel")

        yield ("states", "s", "one", 1), fail
        yield ("states", "s", "two", 1), lambda: {"step_ms": 1.0}

    monkeypatch.setattr(gpu_recurrent_engines, "state_cases", failing)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["--device", "cpu", "--parts", "states", "--fla", "tuned"]) == EXIT_CHECK_SAYS_NO


def test_each_kernel_of_fla_core_gets_one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLA_CACHE_MODE", "FLA_CONFIG_DIR"):
        monkeypatch.setenv(name, "before")
    with gpu_recurrent._fla_configurations("quick"):
        folder = Path(gpu_recurrent.os.environ["FLA_CONFIG_DIR"])
        assert gpu_recurrent.os.environ["FLA_CACHE_MODE"] == "default"
        assert {file.stem for file in folder.iterdir()} == set(gpu_recurrent._QUICK)
