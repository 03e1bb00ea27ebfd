"""Progress, warnings and what a saved command line must not hold."""

from __future__ import annotations

import sys

import pytest
from tests.unit.benching.made import answer, failed, passed

from paceline.benching.result import Figures, rows_of
from paceline.cli.bench_report import _Progress, _warnings, without_secrets
from paceline.trace.acceptance import DraftTotals


def test_a_terminal_has_one_line_that_is_drawn_anew(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = _Progress(4)
    for record in (answer(0), failed(1)):
        progress.on_answer(record)
    done = passed("a", answer(0, drafting=DraftTotals(5, 35, 10, (5, 5), None)), failed(1), total_s=2.0)
    progress.on_pass(done)
    said = capsys.readouterr().err
    assert said.startswith("\r\x1b[K1 of 4 requests, ") and "2 of 4 requests" in said and ", 1 failed, " in said
    assert said.endswith("\r\x1b[Ka, 1 at once, round 1: 1 answers, 5.0 tokens/s, acceptance length 3.00, 1 failed\n")


def test_elsewhere_only_passes_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = _Progress(4)
    progress.on_answer(answer(0))
    progress.on_pass(passed("a", answer(0, num_tokens=None)))
    progress.close()
    assert capsys.readouterr().err == "a, 1 at once, round 1: 1 answers\n"


def test_warnings() -> None:
    figures = Figures(["base", "ours"])
    passes = [
        passed("base", *(answer(index) for index in range(9))),
        passed("ours", *(answer(index) for index in range(8)), failed(8, "status 500")),
    ]
    rows = [row.to_dict(figures) for row in rows_of(passes, figures)]
    (warning,) = _warnings(rows, figures)
    assert warning == "ours, 1 at once: 1 of 9 requests failed; most often: status 500"
    passes[1].records[:2] = [failed(0), answer(1, output_sha256="another")]
    rows = [row.to_dict(figures) for row in rows_of(passes, figures)]
    said = "\n".join(_warnings(rows, figures))
    assert "an interval over 7 prompts says little" in said and "6 of 7 answers are those of base" in said


def test_keys_are_in_no_command_line() -> None:
    given = ["bench", "--api-key", "s1", "--api-key=s2", "--set", "api_key=s3", "--set=api_key=s4", "--rounds", "1"]
    shown = without_secrets(given)
    assert not any(secret in " ".join(shown) for secret in ("s1", "s2", "s3", "s4"))
    assert len(shown) == len(given) and shown[-2:] == ["--rounds", "1"]
