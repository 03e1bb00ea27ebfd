"""The script for memory and race checkers runs every kernel there is, and tells wrong, unwritten and missing ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks import sanitize, sanitize_cases
from benchmarks.sanitize_comparing import Case, max_error
from tests.unit.ops.conftest import let_the_interpreter_count
from torch import Tensor

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError
from paceline.ops.dispatch import HAS_TRITON
from paceline.ops.gated_rms_norm import gated_rms_norm_triton

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    let_the_interpreter_count(monkeypatch)


def test_every_kernel_is_run_and_right(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that nobody runs here is named: it needs a case in `benchmarks/sanitize_cases.py`."""
    code = sanitize.main(["--device", "cpu"])
    output = capsys.readouterr()
    assert code == EXIT_DONE, output.out + output.err
    assert "_delta_kernel" in output.out and "WRONG" not in output.out


def test_a_kernel_without_a_case_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def few(device: torch.device) -> Iterator[Case]:
        yield from sanitize_cases._norms(device)

    monkeypatch.setattr(sanitize_cases, "make_cases", few)
    assert sanitize.main(["--device", "cpu"]) == EXIT_CHECK_SAYS_NO
    named = capsys.readouterr().err
    assert "no case runs" in named and "_replay_kernel" in named and "_gated_rms_norm_kernel" not in named
    assert "replay_row" not in named, "what other kernels call is launched by nobody"
    assert "_larger_or_nan" not in named, "nor is what they reduce by"
    assert "_largest_of_runs_kernel" in named


def wrong(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return gated_rms_norm_triton(x, gate, weight * 1.05, eps)


def unwritten(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = gated_rms_norm_triton(x, gate, weight, eps)
    whole = torch.empty_like(y)
    whole[1:] = y[1:]
    return whole


def changing(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = gated_rms_norm_triton(x, gate, weight, eps)
    x[0] += 1.0
    return y


def failing(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("fault", [wrong, unwritten, changing, failing])
def test_a_faulty_kernel_is_told_and_the_others_go_on(
    fault: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--only", "gated_"]
    assert sanitize.main(options) == EXIT_DONE
    capsys.readouterr()
    monkeypatch.setattr(sanitize_cases, "gated_rms_norm_triton", fault)
    assert sanitize.main(options) == EXIT_CHECK_SAYS_NO
    lines = capsys.readouterr().out.splitlines()
    norms, others = ([line for line in lines if name in line] for name in ("gated_rms_norm,", "gated_activation,"))
    assert norms and all("WRONG" in line or "FAILED" in line for line in norms)
    assert others and all("right" in line for line in others)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        sanitize.main([])


def test_kernels_are_left_as_they_were() -> None:
    found = dict(sanitize._kernels())
    with sanitize.counted_launches():
        assert all("run" in vars(one) for one in found.values())
    assert not any("run" in vars(one) for one in found.values())


def test_entry_kernels_are_those_that_no_kernel_calls(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "@kernel\ndef part(x): ...\n@kernel\ndef whole(x):\n    part(x)\n@other\ndef neither(x): ...\n"
        "@kernel(do_not_specialize=['n'])\ndef called(x): ...\ndef launcher(x): part(x)\n"
    )
    assert sanitize.entry_kernels(tmp_path) == {"whole", "called"}


def test_errors_see_nan_integers_and_shapes() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert max_error(x, x) == 0.0
    assert max_error(torch.tensor([1.0, 2.0]), x) == float("inf")
    assert max_error(x, torch.tensor([1.0, 2.0])) == float("inf")
    assert max_error(torch.tensor([1]), torch.tensor([2])) == float("inf")
    assert max_error(x[:1], x) == float("inf")
    assert max_error(x.double(), x) == float("inf")
