"""Which reader an answer gets follows from the target's template or marks, and from what the prompt has opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.byte_level import byte_level_tokenizer
from tests.tiny_kimi_text import write_kimi_text

from paceline.checkpoint.answer_parts import FoundCall, PlainText, read_whole
from paceline.checkpoint.tokenizer import TextTokenizer, open_tokenizer
from paceline.serving.answer_form import answer_form
from paceline.serving.call_forms import HERMES
from paceline.serving.call_reader import CallReader
from paceline.serving.tools import ToolUse

CALLS = ToolUse(reads_calls=True, form=HERMES)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
THINKS = byte_level_tokenizer("{{ messages }}{# <think> </think> #}")


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("k3")
    write_kimi_text(folder)
    return open_tokenizer(folder)


def test_a_target_that_says_nothing_of_thoughts() -> None:
    form = answer_form(byte_level_tokenizer(), "<|assistant|>", ToolUse(), tells_reasoning=True)
    assert isinstance(form.make_reader(), PlainText) and form.structure_begins_after is None
    assert isinstance(answer_form(byte_level_tokenizer(), "", CALLS, tells_reasoning=True).make_reader(), CallReader)


def test_thoughts_between_tags_and_calls_behind_them() -> None:
    form = answer_form(THINKS, "<|assistant|>\n", CALLS, tells_reasoning=True)
    assert read_whole(form.make_reader(), f"<think>hm</think>\n{CALL}") == ("hm", "", [FoundCall("f", "{}")])
    assert form.structure_begins_after is None  # whether it will think is its own matter
    begun = answer_form(THINKS, "<|assistant|><think>\n", ToolUse(), tells_reasoning=True)
    assert read_whole(begun.make_reader(), "hm</think>\nYes.") == ("hm", "Yes.", [])
    assert begun.structure_begins_after == "</think>"
    told_not_to = answer_form(THINKS, "<|assistant|><think>\n\n</think>\n\n", ToolUse(), tells_reasoning=True)
    assert read_whole(told_not_to.make_reader(), "Yes.") == ("", "Yes.", [])
    assert told_not_to.structure_begins_after is None


@pytest.mark.parametrize(
    ("begun", "is_inside"),
    [("<think>\nfirst", True), ("<think>a</think>\nYes", False), ("The tag <think> opens", False), ("", False)],
)
def test_an_answer_may_go_on_with_a_thought(begun: str, is_inside: bool) -> None:
    form = answer_form(THINKS, f"<|assistant|>{begun}", ToolUse(), tells_reasoning=True, begun=begun)
    found = ("hm", "Yes.", []) if is_inside else ("", "hm</think>Yes.", [])
    assert read_whole(form.make_reader(), "hm</think>Yes.") == found
    assert form.structure_begins_after == ("</think>" if is_inside else None)


def test_tags_that_texts_leave_out_are_not_waited_for() -> None:
    """Else all of an answer would be thought, and its form never begin."""
    tokenizer = byte_level_tokenizer("{{ messages }}<think> </think>")
    tokenizer.backend.add_special_tokens(["<think>", "</think>"])
    hidden = TextTokenizer(
        tokenizer.backend, chat_template=tokenizer.chat_template, special_tokens={}, origin="a tokenizer of this test"
    )
    form = answer_form(hidden, "<|assistant|><think>\n", ToolUse(), tells_reasoning=True)
    assert isinstance(form.make_reader(), PlainText) and form.structure_begins_after is None


def test_channels(channels: TextTokenizer) -> None:
    prompt = channels.render_chat([{"role": "user", "content": "q"}])
    thinks = answer_form(channels, prompt, ToolUse(), tells_reasoning=True)
    answer = "hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    assert read_whole(thinks.make_reader(), answer) == ("hm", "Yes.", [])
    assert thinks.structure_begins_after == "<|open|>response<|sep|>"
    says = answer_form(channels, prompt.replace("think<|sep|>", "response<|sep|>"), ToolUse(), tells_reasoning=True)
    assert read_whole(says.make_reader(), "Yes.<|close|>response<|sep|>") == ("", "Yes.", [])
    assert says.structure_begins_after is None


def test_all_of_it_is_text_where_nobody_wants_thoughts_apart(channels: TextTokenizer) -> None:
    for tokenizer in (THINKS, channels):
        form = answer_form(tokenizer, "<think>", ToolUse(), tells_reasoning=False)
        assert isinstance(form.make_reader(), PlainText) and form.structure_begins_after is None
