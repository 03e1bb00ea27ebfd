"""Results are kept up to a number, the newest of them."""

from __future__ import annotations

import pytest

from paceline.engine import results as results_module
from paceline.engine.request import RequestResult
from paceline.engine.results import FinishedRequests
from paceline.trace.step import RequestTrace


def result(name: str) -> RequestResult:
    return RequestResult(name, (1,), (), "", "abort", None, RequestTrace(name, 1))


def test_the_oldest_results_go_first_and_taken_ones_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "NUM_KEPT_RESULTS", 2)
    finished = FinishedRequests()
    for name in "abc":
        finished.put(result(name))
    assert finished.get("a") is None
    kept = finished.get("b")
    assert kept is not None
    assert finished.take("b") is kept
    assert finished.get("b") is None
    finished.forget("c")
    finished.forget("never there")
    assert finished.get("c") is None
