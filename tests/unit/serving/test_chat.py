"""Messages reach the template as it knows them, and a message that goes on is cut where the template leaves it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.byte_level import byte_level_tokenizer

from paceline.errors import RequestError
from paceline.serving.chat import as_template_takes, render_messages
from paceline.serving.fields import FieldError
from paceline.serving.protocol import ChatMessage

WHOLE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TRIMMED = WHOLE.replace("m.content", "m.content | trim")
ECHO = "{{ messages | tojson }}"


def messages(*contents: Any) -> list[ChatMessage]:
    roles = ("user", "assistant")
    return [
        ChatMessage.model_validate({"role": roles[index % 2], "content": content})
        for index, content in enumerate(contents)
    ]


def rendered(given: list[ChatMessage], template: str = WHOLE, **options: Any) -> str:
    tokenizer = byte_level_tokenizer(template)
    return render_messages(given, tokenizer, **options).text


@pytest.mark.parametrize(
    ("template", "contents", "text"),
    [
        (WHOLE, ("q", "Once upon"), "<|user|>q<|end|><|assistant|>Once upon"),
        (WHOLE, ("say hi", "hi"), "<|user|>say hi<|end|><|assistant|>hi"),  # it stands in the prompt before
        (WHOLE, ("q", "end"), "<|user|>q<|end|><|assistant|>end"),  # and in what the template writes behind it
        (WHOLE, ("q", "|"), "<|user|>q<|end|><|assistant|>|"),
        (WHOLE, ("q", " a \n"), "<|user|>q<|end|><|assistant|> a \n"),
        (TRIMMED, ("q", " a \n"), "<|user|>q<|end|><|assistant|>a"),
        (
            WHOLE,
            ("q", [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]),
            "<|user|>q<|end|><|assistant|>ab ",
        ),
        (WHOLE, ("q", "<|end|>"), "<|user|>q<|end|><|assistant|><|end|>"),
    ],
)
def test_a_message_that_goes_on(template: str, contents: tuple[Any, ...], text: str) -> None:
    assert rendered(messages(*contents), template, continue_final_message=True) == text


@given(st.lists(st.text("ab<|end> [go-s0]\n", max_size=8), min_size=1, max_size=3), st.sampled_from([WHOLE, TRIMMED]))
def test_a_message_goes_on_where_the_whole_chat_has_its_end(contents: list[str], template: str) -> None:
    given_messages = messages(*contents)
    if not contents[-1].strip():
        with pytest.raises(FieldError, match="no content"):
            rendered(given_messages, template, continue_final_message=True)
        return
    whole = rendered(given_messages, template, add_generation_prompt=False)
    assert rendered(given_messages, template, continue_final_message=True) + "<|end|>" == whole


def test_nothing_opens_a_turn_behind_a_message_that_goes_on() -> None:
    template = WHOLE + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    assert rendered(messages("q"), template) == "<|user|>q<|end|><|assistant|>"
    assert rendered(messages("q"), template, add_generation_prompt=False) == "<|user|>q<|end|>"
    assert rendered(messages("q", "a"), template, continue_final_message=True).endswith("<|assistant|>a")


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "nothing"])
def test_a_template_that_leaves_the_last_message_out(template: str) -> None:
    with pytest.raises(FieldError) as caught:
        rendered(messages("q", "a"), template, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_variables_reach_the_template_and_override_nothing() -> None:
    template = WHOLE + "{% if mood %}({{ mood }}){% endif %}"
    assert rendered(messages("q"), template, variables={"mood": "calm"}).endswith("(calm)")
    for name in ("messages", "tools", "add_generation_prompt", "eos_token", "documents"):
        with pytest.raises(RequestError, match=name):
            rendered(messages("q"), template, variables={name: "x"})


def test_tools_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert '"name": "f"' in rendered(messages("q"), "{{ tools | tojson }}", tools=tools)
    assert rendered(messages("q"), "{{ tools is none }}") == "True"


def test_special_tokens_of_the_template_become_their_ids() -> None:
    tokenizer = byte_level_tokenizer(WHOLE)
    ids = tokenizer.encode_rendered(render_messages(messages("q"), tokenizer))
    assert ids[0] == tokenizer.token_id("<|user|>") and ids[-1] == tokenizer.token_id("<|end|>")


# Messages


def plain(**fields: Any) -> dict[str, Any]:
    return as_template_takes(ChatMessage.model_validate(fields), "messages[0]")


def test_texts_and_parts() -> None:
    assert plain(role="user", content="a") == {"role": "user", "content": "a"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "\nb"}]
    assert plain(role="user", content=parts) == {"role": "user", "content": "a\nb"}
    assert plain(role="user", content=[]) == {"role": "user", "content": ""}
    assert plain(role="user", content="a", tool_calls=None, tool_call_id=None) == {"role": "user", "content": "a"}
    assert plain(role="tool", content="5", tool_call_id="c")["tool_call_id"] == "c"
    assert plain(role="assistant", content="a", reasoning_content="why")["reasoning_content"] == "why"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": None}, "messages[0].content"),
        ({}, "messages[0].content"),
        ({"content": None, "tool_calls": []}, "messages[0].content"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text"}]}, "messages[0].content[1].text"),
        ({"content": [{"type": "x" * 10_000}]}, "messages[0].content[0]"),
    ],
)
def test_what_is_no_text_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as caught:
        plain(role="user", **fields)
    assert caught.value.param == param
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ("", {}),
        (None, {}),
        ("not JSON", "not JSON"),
        ("[" * 100_000, "[" * 100_000),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_arguments_of_calls_are_values(arguments: str | None, found: object) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    message = plain(role="assistant", content=None, tool_calls=calls)
    assert message["content"] == ""
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": found}}]


def test_calls_without_an_id() -> None:
    message = plain(role="assistant", tool_calls=[{"function": {"name": "f"}}])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_arguments_are_not_escaped_twice() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"a": "é"}'}}]
    given_messages = [ChatMessage.model_validate({"role": "assistant", "tool_calls": calls})]
    assert '"arguments": {"a": "é"}' in rendered(given_messages, ECHO)


def test_nesting_that_a_template_cannot_write_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    message = ChatMessage.model_validate({"role": "user", "content": "a", "extra": deep})
    with pytest.raises(RequestError, match="refused these messages"):
        rendered([message], ECHO)
    del message
    while deep:
        deep = deep.pop()


def test_reasoning_by_its_other_name() -> None:
    def taken(**message: Any) -> dict[str, Any]:
        return as_template_takes(ChatMessage.model_validate({"role": "assistant", **message}), "messages[0]")

    assert taken(content="a", reasoning="r")["reasoning_content"] == "r"
    assert taken(content="a", reasoning="r", reasoning_content="s")["reasoning_content"] == "s"
    assert taken(content=None, reasoning_content="s")["content"] == ""


def test_an_answer_that_is_nothing_but_thought_has_no_need_of_content() -> None:
    for fields in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": "hm", "reasoning_content": None}):
        taken = as_template_takes(ChatMessage(role="assistant", content=None, **fields), "messages[0]")
        assert (taken["content"], taken["reasoning_content"]) == ("", "hm")
    with pytest.raises(FieldError, match="has no content"):
        as_template_takes(ChatMessage(role="assistant", content=None, reasoning_content=""), "messages[0]")
