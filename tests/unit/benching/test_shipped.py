"""The default prompts are found, and a package gets them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from paceline.benching import shipped
from paceline.errors import DataError
from paceline.evaluation.prompts import read_prompts

ROOT = Path(__file__).parents[3]


def test_a_source_tree_has_them() -> None:
    assert len(read_prompts(shipped.shipped_prompts())) == 24


def test_a_wheel_puts_them_where_they_are_looked_for() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    ((source, place),) = wheel.items()
    assert (ROOT / source).is_file()
    assert (ROOT / "src" / place).parent == Path(shipped.__file__).parent and Path(place).name == shipped._NAME


def test_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "_NAME", "nothing.jsonl")
    with pytest.raises(DataError, match="not where they should be"):
        shipped.shipped_prompts()
