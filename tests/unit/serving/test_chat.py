"""Where a prompt ends whose last message is gone on with, and chats that are too long to be worth encoding."""

from __future__ import annotations

import pytest
from tests.served import byte_level_tokenizer

from paceline.serving.chat import as_template_takes, encode_chat
from paceline.serving.fields import FieldError
from paceline.serving.protocol import ChatMessage

QUESTION = ChatMessage(role="user", content="why?")


def test_a_message_is_gone_on_with_at_its_end_whatever_the_template_writes_behind_it() -> None:
    tokenizer = byte_level_tokenizer()
    for content in ("<", "n", "end", "|>", "<|end|>", "because ", " two\nlines", "why?"):
        messages = [QUESTION, ChatMessage(role="assistant", content=content)]
        found = encode_chat(messages, tokenizer, continue_final_message=True)
        assert found == tokenizer.encode(f"<|user|>why?<|end|><|assistant|>{content.rstrip()}"), content


def test_a_message_that_is_not_there_cannot_be_gone_on_with() -> None:
    for template, content in (("{{ messages[0].content }}", "because"), (None, " \n")):
        tokenizer = byte_level_tokenizer() if template is None else byte_level_tokenizer(template)
        messages = [QUESTION, ChatMessage(role="assistant", content=content)]
        with pytest.raises(FieldError, match="no content that the chat template repeats") as caught:
            encode_chat(messages, tokenizer, continue_final_message=True)
        assert caught.value.param == "continue_final_message"


def test_a_chat_is_looked_at_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> None:
        raise FieldError(text, param="messages")

    tokenizer = byte_level_tokenizer()
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: pytest.fail("it was encoded"))
    with pytest.raises(FieldError) as caught:
        encode_chat([QUESTION], tokenizer, check=refuse)
    assert caught.value.message == "<|user|>why?<|end|><|assistant|>"


@pytest.mark.parametrize("arguments", ["[" * 100_000, "1" * 5000, '{"x"', ""])
def test_arguments_that_cannot_be_read_stay_text(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    assert as_template_takes(message, "messages[0]")["tool_calls"][0]["function"]["arguments"] == arguments
