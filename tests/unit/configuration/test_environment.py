from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline
from paceline.configuration import environment
from paceline.configuration.environment import OWN_VARIABLES, Environment, describe_environment, read_environment
from paceline.errors import ConfigError


def test_an_empty_environment_asks_for_nothing() -> None:
    assert read_environment({}) == Environment()
    assert read_environment({"PACELINE_LOG_LEVEL": "", "NO_COLOR": ""}) == Environment()


def test_all_variables() -> None:
    assert read_environment(
        {
            "PACELINE_LOG_LEVEL": "Debug",
            "PACELINE_AUX_HIDDEN_STREAM": "attn_res",
            "PACELINE_DEBUG": "1",
            "PACELINE_NUM_THREADS": "2",
            "PACELINE_DEPENDENT_LAUNCH": "mixed",
            "PACELINE_API_KEY": "key",
            "NO_COLOR": "1",
        }
    ) == Environment("debug", "attn_res", True, 2, "mixed", "key", True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PACELINE_LOG_LEVEL", "loud"),
        ("PACELINE_AUX_HIDDEN_STREAM", "both"),
        ("PACELINE_DEBUG", "yes"),
        ("PACELINE_NUM_THREADS", "0"),
        ("PACELINE_NUM_THREADS", "100000"),
        ("PACELINE_NUM_THREADS", "two"),
        ("PACELINE_DEPENDENT_LAUNCH", "early"),
        ("PACELINE_THREADS", "2"),
    ],
)
def test_wrong_values_and_unknown_names_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_environment({name: value})


@pytest.mark.parametrize(("value", "expected"), [("on", True), ("1", True), ("off", False), ("0", False)])
def test_debug_is_on_or_off(value: str, expected: bool) -> None:
    assert read_environment({"PACELINE_DEBUG": value}).debug is expected


@pytest.mark.parametrize(("value", "expected"), [("1", "on"), ("0", "off"), ("", "on"), ("After-Wait", "after-wait")])
def test_dependent_launch_is_on_or_off_or_a_rule(value: str, expected: str) -> None:
    assert read_environment({"PACELINE_DEPENDENT_LAUNCH": value}).dependent_launch == expected


def test_secrets_are_not_shown() -> None:
    described = describe_environment({"HF_TOKEN": "secret", "HF_HOME": "/cache"})
    assert described["HF_TOKEN"] == "(set)"
    assert described["HF_HOME"] == "/cache"
    assert described["PACELINE_DEBUG"] is None


def test_the_table_in_the_docstring_is_complete_and_short() -> None:
    assert environment.__doc__ is not None
    documented = re.findall(r"^\| `([A-Z_]+)`", environment.__doc__, re.MULTILINE)
    assert tuple(documented) == OWN_VARIABLES
    assert len([name for name in OWN_VARIABLES if name.startswith("PACELINE_")]) <= 6


def test_nobody_else_reads_the_environment() -> None:
    package = Path(paceline.__file__).parent
    readers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"os\.environ|os\.getenv|\bgetenv\(", path.read_text(encoding="utf-8"))
    ]
    assert readers == ["configuration/environment.py"]
