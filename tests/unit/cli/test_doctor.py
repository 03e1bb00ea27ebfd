from __future__ import annotations

import json

import pytest
from tests.unit.cli.test_main import run

import paceline
from paceline.cli import doctor
from paceline.ops.native import build


def test_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    assert run(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert set(report) == {"versions", "machine", "torch", "environment", "folders"}
    assert report["versions"]["paceline"] == paceline.__version__
    assert report["machine"]["cores"] >= 1
    assert report["environment"]["HF_TOKEN"] == "(set)"
    assert "very-secret" not in text
    assert run(["doctor"]) == 0
    assert "versions:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("is_there", "is_amx", "text"), [(False, False, "no:"), (True, False, "built"), (True, True, "built; only where")]
)
def test_native_operations(monkeypatch: pytest.MonkeyPatch, is_there: bool, is_amx: bool, text: str) -> None:
    monkeypatch.setattr(build, "library", lambda: object() if is_there else None)
    monkeypatch.setattr(build, "has_amx", lambda: is_amx)
    assert doctor._native_operations().startswith(text)
