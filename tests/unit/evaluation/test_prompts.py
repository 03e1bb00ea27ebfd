from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy
import pytest

from paceline.errors import DataError, RequestError
from paceline.evaluation.prompts import Message, Prompt, encode_prompt, file_sha256, read_prompts, single_prompt

SHIPPED = Path(__file__).parents[3] / "prompts" / "first.jsonl"


def _write(folder: Path, *rows: object) -> Path:
    path = folder / "set.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_the_shipped_set() -> None:
    prompts = read_prompts(SHIPPED)
    assert len(prompts) == 24
    assert len({prompt.category for prompt in prompts}) >= 5
    assert all(prompt.num_turns == 1 for prompt in prompts)


def test_three_forms(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = _write(tmp_path, {"prompt": "a", "id": 7, "category": "c"}, "\n", {"turns": ["b", "c"]}, {"messages": chat})
    first, second, third = read_prompts(path)
    assert first == Prompt(id="7", turns=("a",), category="c")
    assert (second.id, second.turns, second.num_turns) == ("set-3", ("b", "c"), 2)
    assert (third.messages, third.num_turns) == ((Message("system", "s"), Message("user", "u")), 1)


def test_limit_and_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text("one\n\n two \nthree\n")
    assert [prompt.turns for prompt in read_prompts(path, limit=2)] == [("one",), ("two",)]
    assert len(read_prompts(path)) == 3
    with pytest.raises(DataError, match="0 prompts"):
        read_prompts(path, limit=0)


@pytest.mark.parametrize("name", ["set.txt", "set.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + (b"one\n" if name == "set.txt" else b'{"prompt": "one"}\n'))
    assert [prompt.turns for prompt in read_prompts(path)] == [("one",)]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("{oops\n", "not JSON"),
        ("[1]\n", "holds list"),
        ({"text": "a"}, "only 'text'"),
        ({}, "only nothing"),
        ({"prompt": "a", "turns": ["b"]}, "prompt and turns"),
        ({"prompt": 3}, "must be text"),
        ({"prompt": "  "}, "not empty"),
        ({"turns": []}, "must be text"),
        ({"turns": "a"}, "must be text"),
        ({"messages": []}, "not empty"),
        ({"messages": [{"role": "user"}]}, "a message has a role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "a message has a role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing to answer"),
        ({"prompt": "again", "id": "x"}, "stands in line 1"),
        ('{"prompt": ' + "[" * 100_000 + "\n", "cannot be read: maximum recursion"),
        ('{"prompt": ' + "1" * 5000 + "}\n", "cannot be read: Exceeds"),
        ({"prompt": "half a pair \ud83d"}, "cannot be written as UTF-8"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "cannot be written as UTF-8"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, part: str) -> None:
    path = _write(tmp_path, {"prompt": "fine", "id": "x"}, row)
    with pytest.raises(DataError, match=part) as caught:
        read_prompts(path)
    assert f"{path}:2" in str(caught.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match="no prompt"):
        read_prompts(empty)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        read_prompts(binary)
    with pytest.raises(DataError, match="cannot be read"):
        file_sha256(tmp_path / "none.jsonl")


def _token_file(path: Path, count: int, **changed: Any) -> Path:
    prompt_len, response_len = numpy.full(count, 2), numpy.full(count, 3)
    tokens = numpy.arange(5 * count, dtype=numpy.uint16)
    arrays = {"tokens": tokens, "prompt_len": prompt_len, "response_len": response_len, **changed}
    numpy.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_a_token_file_gives_its_held_out_end(tmp_path: Path) -> None:
    path = _token_file(tmp_path / "data.npz", 1030)
    prompts = read_prompts(path)
    assert len(prompts) == 1024
    assert (prompts[0].id, prompts[0].token_ids) == ("data-6", (30, 31))
    assert prompts[-1].token_ids == (5145, 5146)
    assert [prompt.id for prompt in read_prompts(path, limit=2)] == ["data-6", "data-7"]


def test_a_token_file_gives_what_the_drafter_has_not_learnt(tmp_path: Path) -> None:
    path = _token_file(tmp_path / "data.npz", 1030)
    prompts = read_prompts(path, num_held_out=4)
    assert [prompt.id for prompt in prompts] == [f"data-{index}" for index in range(1026, 1030)]
    small = _token_file(tmp_path / "small.npz", 5)  # too few to tell, unless somebody knows
    assert [prompt.token_ids for prompt in read_prompts(small, limit=1, num_held_out=2)] == [(15, 16)]
    with pytest.raises(DataError, match=r"has learnt every conversation of this file \(data\.hold_out 0\)"):
        read_prompts(path, num_held_out=0)


def test_damaged_token_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks the arrays \['response_len'\]"):
        read_prompts(_token_file(tmp_path / "a.npz", 3, response_len=None))
    with pytest.raises(DataError, match="add up to 15 tokens, the file holds 14"):
        read_prompts(_token_file(tmp_path / "b.npz", 3, tokens=numpy.arange(14)))
    whole = _token_file(tmp_path / "c.npz", 3).read_bytes()
    (tmp_path / "d.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot read"):
        read_prompts(tmp_path / "d.npz")
    (tmp_path / "e.npz").write_bytes(b"")
    with pytest.raises(DataError, match="cannot read"):
        read_prompts(tmp_path / "e.npz")


def test_a_token_file_without_anything_but_a_held_out_end(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 1024 conversations"):
        read_prompts(_token_file(tmp_path / "data.npz", 1024))


class _Tokenizer:
    """Renders a chat as `role:content|`, one id per character."""

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(letter) for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{message['role'][0]}:{message['content']}|" for message in messages))


def _text(prompt: Prompt, *, has_chat_template: bool = True, **options: Any) -> str:
    tokenizer = cast(Any, _Tokenizer(has_chat_template))
    return "".join(map(chr, encode_prompt(prompt, tokenizer, **options)))


def test_encoding() -> None:
    two = Prompt(id="x", turns=("one", "two"))
    assert _text(single_prompt("hi")) == "u:hi|"
    assert _text(single_prompt("hi"), system="be kind") == "s:be kind|u:hi|"
    assert _text(two) == "u:one|"
    assert _text(two, answers=["1"]) == "u:one|a:1|u:two|"
    own = Prompt(id="x", messages=(Message("system", "mine"), Message("user", "hi")))
    assert _text(own, system="not this") == "s:mine|u:hi|"
    assert _text(single_prompt("hi"), raw=True) == "\x01hi"
    assert encode_prompt(Prompt(id="x", token_ids=(4, 5)), cast(Any, _Tokenizer(False))) == [4, 5]


def test_what_cannot_be_encoded() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        _text(single_prompt("hi"), has_chat_template=False)
    with pytest.raises(RequestError, match="cannot be taken raw"):
        _text(Prompt(id="x", turns=("a", "b")), raw=True)
