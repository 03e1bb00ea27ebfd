from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.capture.exclusion import Exclusion, runs_of_words
from paceline.errors import DataError

QUESTION = "Janet has three apples and gives two of them to her brother. How many are left?"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    rows = [{"id": 1, "prompt": QUESTION}, {"turns": ["Name a big red fruit of the season, please now."], "tag": "a b"}]
    chat = {"messages": [{"role": "user", "content": "Count from one to ten in steps of one."}]}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, chat]))
    (tmp_path / "b.txt").write_text("Why is the sky blue?\n\n")
    return [tmp_path / "a.jsonl", tmp_path / "b.txt"]


def test_runs_ignore_case_and_punctuation() -> None:
    assert runs_of_words("Why, is THE sky blue?", 4) == {("why", "is", "the", "sky"), ("is", "the", "sky", "blue")}
    assert runs_of_words("Why?", 8) == {("why",)}
    assert runs_of_words("Écris à ma sœur", 8) == {("écris", "à", "ma", "sœur")}
    assert runs_of_words("?!", 8) == set()


@pytest.mark.parametrize(
    ("text", "is_covered"),
    [
        (QUESTION, True),
        ("Yesterday janet has three apples, and gives two of him", True),  # eight words in a row
        ("Janet has three apples and gives two to them", False),  # seven
        ("name a big red fruit of the season", True),
        ("count from one to ten in steps", False),
        ("Count from one to ten in steps of two", True),
        ("why is the sky blue", True),  # shorter than a run: the same words in all
        ("why is the sky blue today", False),
    ],
)
def test_what_resembles_an_excluded_prompt(files: list[Path], text: str, is_covered: bool) -> None:
    assert Exclusion(files, 8).covers(text) is is_covered


def test_shorter_runs_cover_more(files: list[Path]) -> None:
    assert Exclusion(files, 6).covers("count from one to ten in steps")
    assert not Exclusion().covers(QUESTION)


def test_the_files_are_named_by_their_hashes(files: list[Path]) -> None:
    named = Exclusion(files).files
    assert [entry["name"] for entry in named] == ["a.jsonl", "b.txt"]
    assert all(len(entry["sha256"]) == 64 for entry in named)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", None, "does not exist"),
        ("a.jsonl", b"{no", "not JSON"),
        ("a.jsonl", b"[" * 100_000, "not JSON that can be read"),
        ("a.txt", b"\xff\xfe\xff", "cannot be read"),
        ("a.npz", b"", "token ids, no words"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        Exclusion([tmp_path / name])
