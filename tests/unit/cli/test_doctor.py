from __future__ import annotations

import json

import pytest
from tests.unit.cli.test_main import run

import paceline


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
