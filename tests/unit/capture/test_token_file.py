from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.capture.token_file import Conversation, read_token_file, write_token_file
from paceline.errors import DataError

CHATS = [Conversation(np.array([1, 2, 3]), np.array([4])), Conversation(np.array([5]), np.array([6, 7]))]


@pytest.mark.parametrize("largest", [7, 70_000])
def test_what_is_written_is_read(tmp_path: Path, largest: int) -> None:
    chats = [*CHATS, Conversation(np.array([largest]), np.array([8]))]
    write_token_file(tmp_path / "a.npz", chats)
    found = read_token_file(tmp_path / "a.npz")
    assert len(found) == 3
    assert [found.prompt_ids(index) for index in range(3)] == [[1, 2, 3], [5], [largest]]
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, largest, 8]
    assert found.starts.tolist() == [0, 4, 7, 9]


def test_an_empty_file_of_conversations(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.npz", [])
    assert len(read_token_file(tmp_path / "a.npz")) == 0


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such token file"):
        read_token_file(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_len": None}, r"lacks the arrays \['prompt_len'\]"),
        ({"tokens": np.arange(6)}, "add up to 7 tokens, the file holds 6"),
        ({"response_len": np.array([1])}, r"shape \(2,\), response_len \(1,\)"),
        ({"prompt_len": np.array([4, 0]), "response_len": np.array([-1, 4])}, "negative length"),
        ({"prompt_len": np.array([3.0, 1.0])}, "float64"),
        ({"tokens": np.arange(7).reshape(7, 1)}, r"shape \(7, 1\)"),
    ],
)
def test_contradictions(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    whole = {"tokens": np.arange(7), "prompt_len": np.array([3, 1]), "response_len": np.array([1, 2])}
    arrays = {name: array for name, array in {**whole, **changes}.items() if array is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=problem):
        read_token_file(tmp_path / "a.npz")


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive at all"])
def test_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match="cannot read"):
        read_token_file(tmp_path / "a.npz")
