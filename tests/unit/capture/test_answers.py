"""Answers to given prompts, turn by turn, with the target's own words in the history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.capture.chatting import CLOSING, END, OPENING, chat_target

from paceline.capture.answers import Answers
from paceline.capture.exclusion import Exclusion
from paceline.capture.given_prompts import read_given_prompts
from paceline.capture.sampling import AnswerSampling
from paceline.capture.writer import Passage, PassageRequest, Progress
from paceline.errors import DataError
from paceline.models.loading import LoadedTarget


class EchoWriter:
    """Answers with one token, the length of the prompt; `ends` of chosen prompts' lengths differ."""

    def __init__(self, ends: dict[int, Any] | None = None) -> None:
        self.asked: list[list[PassageRequest]] = []
        self._ends = ends or {}

    def write(self, requests: Sequence[PassageRequest], on_progress: Progress | None = None) -> list[Passage]:
        self.asked.append(list(requests))
        made = []
        for request in requests:
            end = self._ends.get(len(request.prompt_ids), "stop")
            made.append(Passage((4 + len(request.prompt_ids) % 20, END) if end == "stop" else (5, 6), end))
        return made


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.fixture
def target() -> LoadedTarget:
    return chat_target(num_layers=1)


def answers(target: LoadedTarget, folder: Path, rows: list[Any], **changes: Any) -> Answers:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = AnswerSampling(max_answer_tokens=12, seed=1)
    return Answers(target, read_given_prompts(path, Exclusion()), sampling, **changes)


MULTI = {
    "id": "m",
    "messages": [say("user", "abc"), say("assistant", "recorded"), say("user", "de"), say("assistant", "x")],
}


def test_later_turns_see_the_answers_of_the_target(target: LoadedTarget, tmp_path: Path) -> None:
    writer = EchoWriter()
    source = answers(target, tmp_path, [MULTI, {"id": "s", "prompt": "a"}])
    content = source.shard(range(2), writer)
    assert [(row.id, row.turn) for row in content.rows] == [("m", 0), ("m", 1), ("s", 0)]
    assert [len(wave) for wave in writer.asked] == [2, 1]
    encode = target.tokenizer.encode
    first = [*OPENING, *encode("abc"), *CLOSING]
    own = encode(target.tokenizer.decode([4 + len(first) % 20]))
    assert list(content.rows[0].request.prompt_ids) == first
    assert list(content.rows[1].request.prompt_ids) == [*first, *own, END, *OPENING, *encode("de"), *CLOSING]
    assert content.rows[0].request.seed != content.rows[1].request.seed
    assert content.rows[0].request.temperature == content.rows[1].request.temperature


def test_recorded_answers_would_show(target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a history of recorded answers has other ids."""
    from paceline.capture import answers as module

    right = answers(target, tmp_path, [MULTI]).shard(range(1), EchoWriter()).rows[1].request.prompt_ids
    monkeypatch.setattr(module._Chat, "history", lambda self: list(self.prompt.messages[: 2 * self.turn + 1]))
    wrong = answers(target, tmp_path, [MULTI]).shard(range(1), EchoWriter()).rows[1].request.prompt_ids
    assert list(right) != list(wrong)


@pytest.mark.parametrize(
    ("end", "reason", "num_rows"),
    [("length", "turns behind a cut answer", 1), ("loop", "turns behind a cut answer", 1), ("error", "bad numbers", 0)],
)
def test_a_cut_answer_ends_its_chat(target: LoadedTarget, tmp_path: Path, end: str, reason: str, num_rows: int) -> None:
    content = answers(target, tmp_path, [MULTI]).shard(range(1), EchoWriter({9: end}))
    assert len(content.rows) == num_rows and content.dropped == [("m", reason)]


def test_an_answer_does_not_depend_on_line_or_neighbours(target: LoadedTarget, tmp_path: Path) -> None:
    rows = [{"prompt": "abcdefg"[: index + 1]} for index in range(6)]

    def requests(chosen: list[Any]) -> dict[str, PassageRequest]:
        source = answers(target, tmp_path, chosen)
        content = source.shard(range(source.num_items), EchoWriter())
        return {row.id: row.request for row in content.rows}

    whole, part = requests(rows), requests(rows[::-2])
    assert len(part) == 3 and all(whole[name] == request for name, request in part.items())


def test_a_prompt_without_room_is_refused_with_its_line(tmp_path: Path) -> None:
    target = chat_target(num_layers=1, max_position_embeddings=40)
    rows = [{"prompt": "a"}, {"prompt": "b" * 23}]
    with pytest.raises(DataError, match="29 tokens; beside 12 of an answer the target has room for 28") as caught:
        answers(target, tmp_path, rows)
    assert "prompts.jsonl:2" in str(caught.value) and "--max-prompt-tokens 28" in str(caught.value)
    source = answers(target, tmp_path, rows, max_prompt_tokens=28)
    assert source.num_items == 1 and [reason for _, reason in source.dropped] == ["prompt too long"]
    with pytest.raises(DataError, match="all 2 prompts have more than 5 tokens"):
        answers(target, tmp_path, rows, max_prompt_tokens=5)


def test_a_history_without_room_ends_its_chat(tmp_path: Path) -> None:
    target = chat_target(num_layers=1, max_position_embeddings=40)
    long = {"id": "m", "messages": [say("user", "a"), say("assistant", ""), say("user", "b" * 20)]}
    source = answers(target, tmp_path, [long])
    assert source.context_length() == 40
    content = source.shard(range(1), EchoWriter())
    assert len(content.rows) == 1 and content.dropped == [("m", "history too long")]


def test_progress_counts_every_chat_once(target: LoadedTarget, tmp_path: Path) -> None:
    told: list[int] = []
    source = answers(target, tmp_path, [MULTI, {"prompt": "a"}])
    source.shard(range(2), EchoWriter(), lambda ended, tokens: told.append(ended))
    assert sum(told) == 2
