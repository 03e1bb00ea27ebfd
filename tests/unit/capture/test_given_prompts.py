from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.capture.exclusion import Exclusion
from paceline.capture.given_prompts import read_given_prompts
from paceline.errors import DataError


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages from texts that begin with the first letter of their role: "u..." and so on."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn} for turn in turns]


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def test_both_forms(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "u1"}, {"id": 7, "messages": chat("s", "u1", "a1", "u2", "a2")})
    found = read_given_prompts(path, Exclusion())
    first, second = found.prompts
    assert list(first.messages) == chat("u1") and first.questions == [0]
    assert list(second.messages) == chat("s", "u1", "a1", "u2"), "the last answer is not part of any prompt"
    assert second.id == "7" and second.questions == [1, 3] and second.place.endswith("a.jsonl:3")


@pytest.mark.parametrize(
    ("turns", "questions"),
    [(("u1", "u2"), [1]), (("a0", "u1", "a1", "u2", "u3"), [1, 4]), (("u1", "s", "a1", "u2"), [3])],
)
def test_an_answer_belongs_behind_a_run_of_questions(tmp_path: Path, turns: tuple[str, ...], questions: Any) -> None:
    found = read_given_prompts(written(tmp_path / "a.jsonl", {"messages": chat(*turns)}), Exclusion())
    assert found.prompts[0].questions == questions


def test_ids_survive_another_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"u{index}"} for index in range(4)]
    there = read_given_prompts(written(tmp_path / "a.jsonl", *rows), Exclusion())
    back = read_given_prompts(written(tmp_path / "b.jsonl", *rows[::-1]), Exclusion())
    assert {p.id: p.messages for p in there.prompts} == {p.id: p.messages for p in back.prompts}
    assert there.sha256 != back.sha256


def test_repeated_and_excluded_prompts_are_dropped(tmp_path: Path) -> None:
    exclusion = Exclusion(run_length=3)
    exclusion.add(["under the old tree"])
    rows = [{"prompt": "u1"}, {"id": "x", "prompt": "u1"}, {"id": "y", "prompt": "u sat under the old bridge"}]
    found = read_given_prompts(written(tmp_path / "a.jsonl", *rows, rows[0]), exclusion)
    assert len(found.prompts) == 1
    assert found.dropped == [("x", "repeated"), ("y", "excluded"), (found.prompts[0].id, "repeated")]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "does not exist"),
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ("{", "not JSON"),
        ('{"prompt": "a", "id": ' + "1" * 5000 + "}", "not JSON that can be read"),
        ("[]", "either `prompt` or `messages`"),
        ('{"text": "a"}', "either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "either `prompt` or `messages`"),
        ('{"prompt": " "}', "a prompt is empty"),
        ('{"prompt": 3}', "a message has a role"),
        ('{"messages": "a"}', "a message has a role"),
        ('{"messages": []}', "needs a message of the user"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "needs a message of the user"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "a message has a role"),
        ('{"prompt": "a", "id": [1]}', "an id is a text or a number"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}', "the id '1' names two different chats"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=problem) as caught:
        read_given_prompts(path, Exclusion())
    assert str(path) in str(caught.value)


def test_nothing_left(tmp_path: Path) -> None:
    exclusion = Exclusion(run_length=1)
    exclusion.add(["u1"])
    with pytest.raises(DataError, match="all 1 are repeated or excluded"):
        read_given_prompts(written(tmp_path / "a.jsonl", {"prompt": "u1"}), exclusion)
