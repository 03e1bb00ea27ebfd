"""Answers come apart the same way however they are cut: thoughts, text, and calls of Kimi-K3."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.answer_parts import (
    AnswerReader,
    FoundCall,
    Part,
    PlainText,
    Reasoning,
    length_of_beginning,
    read_whole,
)
from paceline.checkpoint.kimi_k3_answers import KimiK3Answers
from paceline.checkpoint.kimi_k3_chat import render_kimi_k3
from paceline.checkpoint.think_tags import ThinkTags


def read(reader: AnswerReader, *pieces: str) -> list[Part]:
    """Neighbouring parts of a kind as one."""
    found = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    whole: list[Part] = []
    for part in found:
        last = whole[-1] if whole else None
        if isinstance(part, str) and isinstance(last, str):
            whole[-1] = last + part
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + part.text)
        else:
            whole.append(part)
    return whole


def tags(*, begins_inside: bool = False) -> ThinkTags:
    return ThinkTags(PlainText(), begins_inside=begins_inside)


def k3(begins_in: str = "think", *, reads_calls: bool = True, takes_several: bool = True) -> KimiK3Answers:
    return KimiK3Answers(begins_in, reads_calls=reads_calls, takes_several=takes_several)


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


TAG_PARTS = st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "think>", "a", " ", "\n", "é<"])
K3_PARTS = st.sampled_from(
    [
        *("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "think", "response", "tools", "message", "<|", "|>"),
        *("<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|open|>tools<|sep|>", "<|close|>message<|sep|>"),
        *('<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>", "<|close|>argument<|sep|>", "1", "a b"),
        *('<|open|>argument key="k" type="number"<|sep|>', '<|open|>argument key="s" type="string"<|sep|>'),
    ]
)
READERS: list[Callable[[], AnswerReader]] = [
    tags,
    lambda: tags(begins_inside=True),
    k3,
    lambda: k3("response", reads_calls=False),
    lambda: k3(takes_several=False),
]


@given(st.data(), st.sampled_from(READERS), st.lists(TAG_PARTS | K3_PARTS, max_size=9).map("".join))
def test_no_cut_makes_a_difference(data: st.DataObject, make: Callable[[], AnswerReader], text: str) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    assert read(make(), *cut(text, places)) == read(make(), *text) == read(make(), text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>\nwhy not\n</think>\n\nYes.", [Reasoning("why not"), "Yes."]),
        ("\n <think>a</think>b", [Reasoning("a"), "b"]),
        ("<think>a\n\nb</think>", [Reasoning("a\n\nb")]),
        ("<think></think>b", ["b"]),
        ("<think>cut off <", [Reasoning("cut off <")]),
        ("a <think>b</think>", ["a <think>b</think>"]),
        ("<think>a</think>b</think><think>c", [Reasoning("a"), "b</think><think>c"]),
        ("<thin", ["<thin"]),
        ("  \n", ["  \n"]),
        ("", []),
    ],
)
def test_thoughts_between_tags(text: str, found: list[Part]) -> None:
    assert read(tags(), text) == found


def test_a_thought_that_the_prompt_has_begun() -> None:
    assert read(tags(begins_inside=True), "hm</think>\n\nYes. </think>") == [Reasoning("hm"), "Yes. </think>"]
    assert read(tags(begins_inside=True), "hm") == [Reasoning("hm")]


def test_thoughts_come_as_they_are_thought() -> None:
    reader = tags(begins_inside=True)
    assert reader.feed("one ") == [Reasoning("one")]
    assert reader.feed("two<") == [Reasoning(" two")]
    assert reader.feed("/think> said") == ["said"]
    assert read_whole(tags(), "<think>a</think>b") == ("a", "b", [])


CALL = '<|open|>call tool="{}" index="1"<|sep|>{}<|close|>call<|sep|>'
ARGUMENT = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
TO_RESPONSE = "<|close|>think<|sep|><|open|>response<|sep|>"
TO_TOOLS = "<|close|>response<|sep|><|open|>tools<|sep|>"


def test_channels_of_kimi_k3() -> None:
    said = f"hm{TO_RESPONSE}Yes.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>more"
    assert read(k3(), said) == [Reasoning("hm"), "Yes."]
    assert read(k3("response"), "Yes.<|close|>response<|sep|><|close|>message<|sep|>") == ["Yes."]
    assert read(k3(), "hm <|clo") == [Reasoning("hm <|clo")]
    assert read(k3(), f"hm{TO_RESPONSE}cut <|open|>too") == [Reasoning("hm"), "cut "]
    assert read(k3(), "hm<|close|>think<|sep|>\nfree text") == [Reasoning("hm"), "\nfree text"]


def test_calls_of_kimi_k3() -> None:
    arguments = ARGUMENT.format("city", "string", "Paris <x>") + ARGUMENT.format("days", "number", "3")
    arguments += ARGUMENT.format("l", "array", '[1, "é"]') + ARGUMENT.format("b", "boolean", "true")
    calls = CALL.format("get &quot;&amp;", arguments) + CALL.format("g", "")
    text = f"hm{TO_RESPONSE}One moment.{TO_TOOLS}{calls}<|close|>tools<|sep|><|close|>message<|sep|>"
    first = FoundCall('get "&', '{"city": "Paris <x>", "days": 3, "l": [1, "é"], "b": true}')
    assert read(k3(), text) == [Reasoning("hm"), "One moment.", first, FoundCall("g", "{}")]
    assert read(k3(takes_several=False), text) == [Reasoning("hm"), "One moment.", first]
    block = CALL.format("f", '<|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>')
    assert read(k3("response"), f"{TO_TOOLS}{block}") == [FoundCall("f", '{"a": 1}')]


@pytest.mark.parametrize("value", ["NaN", "[1", "9" * 5000, "[" * 100_000, "three"])
def test_a_value_that_is_not_of_its_type_is_text(value: str) -> None:
    text = TO_TOOLS + CALL.format("f", ARGUMENT.format("n", "number", value))
    assert read(k3("response"), text) == [FoundCall("f", f'{{"n": "{value}"}}')]


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    text = TO_TOOLS + CALL.format("f", ARGUMENT.format("n", "array", r'["\ud800"]'))
    assert read(k3("response"), text) == [FoundCall("f", r'{"n": ["\ud800"]}')]


def test_a_call_without_its_end_is_text_and_so_are_calls_that_nobody_wants() -> None:
    begun = '<|open|>call tool="f" index="1"<|sep|>' + ARGUMENT.format("a", "string", "b")
    assert read(k3("response"), f"Yes.{TO_TOOLS}{begun}") == ["Yes." + begun]
    tools = f"<|open|>tools<|sep|>{CALL.format('f', '')}<|close|>tools<|sep|>"
    text = f"Yes.<|close|>response<|sep|>{tools}<|close|>message<|sep|>"
    assert read(k3("response", reads_calls=False), text) == [f"Yes.{tools}"]


def test_an_answer_in_a_chat_is_read_as_it_was() -> None:
    """What the format writes for a message is what it reads back."""
    call = {"function": {"name": "f", "arguments": {"a": "x", "n": 1.5, "o": {"k": None}}}}
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm", "tool_calls": [call]}
    text = render_kimi_k3([message], add_generation_prompt=False, variables={"thinking_effort": None}).text
    answer = text.removeprefix('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
    called = FoundCall("f", '{"a": "x", "n": 1.5, "o": {"k": null}}')
    assert read_whole(k3(), answer) == ("hm", "Yes.", [called])


def test_how_much_may_be_the_beginning_of_a_mark() -> None:
    marks = ("<|open|>", "<|end|>")
    texts = ("a<", "a<|o", "<|e", "<|x", "", "<|open|>")
    assert [length_of_beginning(text, marks) for text in texts] == [1, 3, 3, 0, 0, 0]
