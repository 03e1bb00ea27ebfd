"""Answers that are nothing but calls, in the form of Llama 3; everything else is text."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.answer_parts import FoundCall, Part
from paceline.serving.llama_calls import LlamaCallReader

CALL = '{"name": "f", "parameters": {"a": "; {"}}'
PIECES = st.sampled_from([CALL, "{", "}", "x", " ", ";", "\n", '{"a": 1}', '{"name": "g", "arguments": {}}'])


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    whole: list[Part] = []
    for part in parts:
        if isinstance(part, str) and whole and isinstance(whole[-1], str):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


@given(st.lists(PIECES, max_size=6).map("".join), st.booleans())
def test_no_cut_makes_a_difference(text: str, takes_several: bool) -> None:
    by_letter, whole = (LlamaCallReader(takes_several=takes_several) for _ in range(2))
    cut_up = [part for letter in text for part in by_letter.feed(letter)]
    assert joined([*cut_up, *by_letter.finish()]) == joined([*whole.feed(text), *whole.finish()])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', [FoundCall("f", '{"a": 1}')]),
        ('\n {"name": "f", "arguments": {}}\n', [FoundCall("f", "{}")]),
        (
            '{"name": "f", "parameters": {"a": "}; {"}}; {"name": "g", "parameters": {}}',
            [FoundCall("f", '{"a": "}; {"}'), FoundCall("g", "{}")],
        ),
        ('{"name": "f", "parameters": {}} and text', ['{"name": "f", "parameters": {}} and text']),
        ('{"name": "f", "parameters": 5}', ['{"name": "f", "parameters": 5}']),
        ('{"name": "f", "parameters": {"a": "\\ud800"}}', ['{"name": "f", "parameters": {"a": "\\ud800"}}']),
        ('{"temperature": 5}', ['{"temperature": 5}']),
        ('{"name": "f", "param', ['{"name": "f", "param']),
        ("[" * 100_000, ["[" * 100_000]),
        ('{"a":' * 100_000, ['{"a":' * 100_000]),
        ('{"name": "f", "parameters": {"a": NaN}}', ['{"name": "f", "parameters": {"a": NaN}}']),
        ("Yes.", ["Yes."]),
        (" \n", [" \n"]),
        ("", []),
    ],
)
def test_calls_of_llama_targets(text: str, found: list[Part]) -> None:
    reader = LlamaCallReader()
    assert joined([*reader.feed(text), *reader.finish()]) == found


def test_text_of_a_llama_target_is_not_held_back() -> None:
    reader = LlamaCallReader()
    assert [reader.feed(" "), reader.feed("a"), reader.feed("{")] == [[], [" a"], ["{"]]
    assert LlamaCallReader().feed("\n" * 65) == ["\n" * 65]


def test_only_the_first_call_where_one_is_wanted() -> None:
    reader = LlamaCallReader(takes_several=False)
    assert [*reader.feed(f"{CALL}; {CALL}"), *reader.finish()] == [FoundCall("f", '{"a": "; {"}')]
