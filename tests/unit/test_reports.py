"""The tables of public reports and of conformance point at tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| \[(B\d{2,3})\]\((https://github\.com/[^)]+)\) \| (.+) \| (.+) \|$")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_report_names_a_test_that_exists_or_a_reason() -> None:
    lines = [line for line in (ROOT / "docs" / "reports.md").read_text(encoding="utf-8").splitlines() if "[B" in line]
    rows = [ROW.match(line) for line in lines]
    assert all(rows), [line for line, row in zip(lines, rows, strict=True) if row is None]
    numbers = [int(row[1][1:]) for row in rows if row]
    assert numbers == sorted(set(numbers)) and numbers[0] == 1 and numbers[-1] == 111
    for row in rows:
        assert row is not None
        named = TEST.findall(row[4])
        assert named or row[4].startswith("not yet: "), row[1]
        for file, name in named:
            assert name in names_in(file), f"{file}::{name}"


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_worked_example_and_item_of_the_checklist_names_its_tests() -> None:
    text = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:8|10)\.\d+) \| .+ \| (.+) \|$", text, flags=re.MULTILINE)
    assert {number for number, _ in rows} == {f"8.{k}" for k in range(1, 11)} | {f"10.{k}" for k in range(1, 7)}
    for number, tests in rows:
        named = TEST.findall(tests)
        assert named, number
        for file, name in named:
            assert name in names_in(file), f"{number}: {file}::{name}"


def test_every_test_of_the_engines_specification_is_named() -> None:
    text = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([TSG]\d+(?:\.\d)?) \| .+ \| (.+) \|$", text, flags=re.MULTILINE)
    faults = {f"G{k}" for k in (*range(2, 11), 12, 13, 15, 16, 17, 20)}
    assert {item for item, _ in rows} == {f"T7.{k}" for k in range(1, 9)} | {f"S6.{k}" for k in range(1, 6)} | faults
    for item, tests in rows:
        named = TEST.findall(tests)
        assert named, item
        for file, name in named:
            assert name in names_in(file), f"{item}: {file}::{name}"
