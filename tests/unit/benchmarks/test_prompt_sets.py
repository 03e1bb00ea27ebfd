from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import prompt_sets
from benchmarks.prompt_sets import NamedFile, named_file, read_set, read_sets

from paceline.errors import DataError


class ChatTokenizer:
    """Bytes of the messages' texts."""

    has_chat_template = True

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return list("|".join(message["content"] for message in messages).encode())


TOKENIZER: Any = ChatTokenizer()


def test_first_turns_only(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"ask {i}", "then"]}) + "\n" for i in range(3)))
    found = read_set(NamedFile("chat", path), TOKENIZER, vocab_size=256, limit=2)
    assert [bytes(prompt).decode() for prompt in found.prompts] == ["ask 0", "ask 1"]
    assert found.responses is None and found.conversations is None


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """Conversation i has prompt (10 + i) and response (10 + i, 1), and three that training keeps come first."""
    path = tmp_path / "talk.npz"
    tokens = [token for i in range(6) for token in (10 + i, 10 + i, 1)]
    np.savez(path, tokens=np.array(tokens, np.uint16), prompt_len=np.full(6, 1), response_len=np.full(6, 2))
    return path


def test_held_out_conversations(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_sets, "NUM_HELD_OUT", 3)
    found = read_sets([NamedFile("talk", token_file)], TOKENIZER, vocab_size=256, limit=2)[0]
    assert found.prompts == ((13,), (14,))
    assert found.responses == ((13, 1), (14, 1))
    assert found.conversations is not None and len(found.conversations) == 2
    assert found.conversations.tokens.tolist() == [13, 13, 1, 14, 14, 1]


def test_a_file_with_fewer_than_the_held_out_number_is_all_held_out(token_file: Path) -> None:
    assert len(read_set(NamedFile("talk", token_file), TOKENIZER, vocab_size=256, limit=99).prompts) == 6


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist|no such"):
        read_set(NamedFile("a", tmp_path / "none.npz"), TOKENIZER, vocab_size=256, limit=2)


def test_named_files() -> None:
    assert named_file("a=b/c=d.jsonl") == NamedFile("a", Path("b/c=d.jsonl"))
    for text in ("a", "=b", "a="):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=FILE"):
            named_file(text)
