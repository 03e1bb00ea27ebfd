"""The micro-benchmark runs without a GPU on tiny inputs; what is wrong, fails or comes too late is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_micro, gpu_micro_launches
from benchmarks.gpu_micro_clock import Bench, Ceilings, GraphClock, MicroCase, Row, relative_error

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError
from paceline.ops.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
CPU = torch.device("cpu")


def test_a_trial_on_the_cpu_checks_every_part_and_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_micro_launches, "NUM_NODES", (3,))
    assert gpu_micro.main(["--device", "cpu", "--out", str(tmp_path)]) == EXIT_DONE
    result = json.loads((tmp_path / "gpu-micro.json").read_text())
    assert result["complete"] and {row["part"] for row in result["rows"]} == set(gpu_micro.PARTS)
    assert all(row["us"] > 0 and "failure" not in row and "allowed" not in row for row in result["rows"])


def outcomes(_part: str, _bench: Bench) -> Iterator[MicroCase]:
    def fail(_bench: Bench) -> Row:
        raise RuntimeError("out of memory")

    yield MicroCase("launches", "fine", 1, lambda _bench: {"us": 1.0, "error": 1e-3, "allowed": 1e-2})
    yield MicroCase("launches", "wrong", 1, lambda _bench: {"us": 1.0, "error": 1e-1, "allowed": 1e-2})
    yield MicroCase("launches", "poisoned", 1, lambda _bench: {"us": 1.0, "error": float("nan"), "allowed": 1e-2})
    yield MicroCase("launches", "fails", 1, fail)
    yield MicroCase("launches", "also fine", 1, lambda _bench: {"us": 2.0})


def test_what_is_wrong_or_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_micro, "cases_of", outcomes)
    options = ["--device", "cpu", "--parts", "launches", "--out", str(tmp_path)]
    assert gpu_micro.main(options) == EXIT_CHECK_SAYS_NO
    rows = json.loads((tmp_path / "gpu-micro.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["fine", "also fine"]
    told = capsys.readouterr().err
    for words in ("wrong by 0.1", "wrong by nan", "RuntimeError: out of memory"):
        assert words in told


def test_cases_that_come_too_late_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_micro, "cases_of", outcomes)
    assert gpu_micro.main(["--device", "cpu", "--parts", "launches", "--seconds", "-1"]) == EXIT_CHECK_SAYS_NO
    assert capsys.readouterr().err.count("no time was left") == 5


def test_a_script_of_another_part_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_micro.OTHER_SCRIPTS, "layers", "benchmarks.never_written")
    assert gpu_micro.main(["--device", "cpu", "--parts", "layers"]) == EXIT_CHECK_SAYS_NO
    assert "benchmarks.never_written does not exist" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        gpu_micro.main([])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
def test_a_node_that_does_not_wait_for_the_one_before_is_found(order: tuple[int, ...]) -> None:
    calls, error = gpu_micro_launches.relay("plain", 16, 4, CPU)
    for node in order:
        calls[node]()
    assert (error() < 1e-4) == (order == (0, 1, 2, 3))


def test_floors_follow_from_bytes_or_from_operations() -> None:
    ceilings = Ceilings(bytes_per_s=4e12, flops=800e12)
    assert ceilings.floor_us(8e6, 8e8) == pytest.approx(2.0)  # 1 us of arithmetic
    assert ceilings.floor_us(8e6, 8e9) == pytest.approx(10.0)
    assert ceilings.floor_us(8e6, 8e9, flops=80e12) == pytest.approx(100.0)
    row = Bench(GraphClock(CPU), ceilings).measure([lambda: None] * 3, num_bytes=8e6)
    us = row["us"]
    assert isinstance(us, float) and row["ratio"] == pytest.approx(us / 2.0) and row["tflops"] is None


def test_an_error_is_relative_and_nan_never_passes() -> None:
    one = torch.ones(4)
    assert relative_error(one * 1.01, one) == pytest.approx(0.01, rel=1e-4)
    assert not relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) <= 1e9
