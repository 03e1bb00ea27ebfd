from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.command_line import make_parser, name_of, report, run

from paceline.errors import DataError, RequestError


def test_errors_become_one_message_and_their_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--quick"])
    seen: list[Sequence[str]] = []

    def failing(arguments: Sequence[str]) -> int:
        seen.append(arguments)
        raise RequestError("the prompt is empty")

    assert run(failing) == RequestError.exit_code
    assert seen == [["--quick"]]
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "RequestError: the prompt is empty\n"


def test_interruption() -> None:
    def interrupted(_arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    assert run(interrupted) == 130


def test_other_errors_are_bugs_and_stay_loud() -> None:
    def broken(_arguments: Sequence[str]) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(broken)


def test_a_failed_run_passes_its_code() -> None:
    def failing(_arguments: Sequence[str]) -> int:
        raise DataError("no such file")

    assert run(failing) == 1
    assert run(lambda _arguments: 3) == 3


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_counts_are_positive(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_parser("text").parse_args(["--threads", value])
    assert "--threads" in capsys.readouterr().err


def test_a_result_is_written_only_where_asked(tmp_path: Path) -> None:
    arguments = ["--threads", "1"]
    report("name", [{"a": 1}], make_parser("text").parse_args(arguments), arguments)
    assert list(tmp_path.iterdir()) == []
    arguments += ["--out", str(tmp_path)]
    report("name", [{"a": 1}], make_parser("text").parse_args(arguments), arguments, facts=["bfloat16"])
    text = (tmp_path / "name.json").read_text()
    assert "1 threads, bfloat16" in text and str(tmp_path) not in text


def test_models_are_called_by_their_last_part() -> None:
    assert name_of("/models/a-dflash/") == "a-dflash"
    assert name_of("smollm2-135m-instruct") == "smollm2-135m-instruct"
