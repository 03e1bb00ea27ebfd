"""`docs/training-pitfalls.md` has every number once, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "training-pitfalls.md"
NAMED = re.compile(r"`([\w/]+)::(test_\w+)`(?: \(((?:`[^`]+`(?:, )?)+)\))?")


def rows(letter: str) -> list[list[str]]:
    """Cells of the rows that are numbered with a letter."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if re.match(rf"\| {letter}\d", line)]


def missing(cell: str) -> list[str]:
    """Named tests that do not exist, and named cases that their file does not have."""
    found = []
    for place, name, cases in NAMED.findall(cell):
        path = (ROOT / "tests" / "unit" / place).with_suffix(".py")
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        if name not in functions:
            found.append(f"{place}::{name}")
        found += [f"{place}: {case}" for case in re.findall(r"`([^`]+)`", cases) if f'"{case}"' not in text]
    return found


@pytest.mark.parametrize(("letter", "count"), [("T", 50), ("N", 10)])
def test_every_number_stands_in_its_table_once_and_in_order(letter: str, count: int) -> None:
    assert [cells[0] for cells in rows(letter)] == [f"{letter}{number}" for number in range(1, count + 1)]


@pytest.mark.parametrize("letter", ["T", "N"])
def test_every_row_names_tests_that_exist(letter: str) -> None:
    for cells in rows(letter):
        assert NAMED.search(cells[2]), f"{cells[0]} names no test"
        assert missing(cells[2]) == [], cells[0]
        unread = NAMED.sub("", cells[2]).replace("<br>", "").strip()
        assert not unread, f"{cells[0]}: {unread!r} is not the name of a test"


def test_a_name_that_is_wrong_would_be_seen() -> None:
    good = "training/test_pitfalls_table::test_a_name_that_is_wrong_would_be_seen"
    assert missing(f"`{good}`") == []
    assert missing(f"`{good}s`") == [f"{good}s"]
    assert missing("`training/test_nowhere::test_nothing`") == ["training/test_nowhere::test_nothing"]
    assert missing(f"`{good}` (`no such case`)") == ["training/test_pitfalls_table: no such case"]
