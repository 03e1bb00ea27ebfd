"""One variable turns the checks on."""

from __future__ import annotations

import pytest

from paceline.engine.debug import checks_are_asked_for
from paceline.errors import ConfigError


@pytest.mark.parametrize(("value", "expected"), [("on", True), ("1", True), ("ON", True), ("off", False), ("0", False)])
def test_on_and_off(value: str, expected: bool) -> None:
    assert checks_are_asked_for({"PACELINE_DEBUG": value}) is expected


def test_unset_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checks_are_asked_for({})
    assert not checks_are_asked_for()
    monkeypatch.setenv("PACELINE_DEBUG", "on")
    assert checks_are_asked_for()


@pytest.mark.parametrize("value", ["yes", "2", "true", "on off"])
def test_anything_else_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match="PACELINE_DEBUG"):
        checks_are_asked_for({"PACELINE_DEBUG": value})
