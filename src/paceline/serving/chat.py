"""Messages of a chat to a prompt, with the target's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.rendered_chat import RenderedChat
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.errors import shown
from paceline.serving.fields import FieldError
from paceline.serving.protocol import ChatMessage, ToolCall

_MARK = "\u2063paceline:the answer goes on here\u2063"  # between separators that nobody sees, so that no text holds it


def render_messages(
    messages: Sequence[ChatMessage],
    tokenizer: TextTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> RenderedChat:
    """The prompt of a chat, before it is encoded.

    Args:
        messages: of the request.
        tokenizer: the target's.
        tools: functions that the model may call, as the template gets them.
        variables: further ones of the template.
        add_generation_prompt: end with what opens the assistant's turn.
        continue_final_message: end in the last message, so that the answer goes on with it.
    Raises:
        FieldError: a message holds something other than text, or the last one cannot be gone on with.
        RequestError: there is no template, or it refuses the messages.
    """
    plain = [as_template_takes(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if continue_final_message:
        plain = [*plain[:-1], _marked(plain[-1])]
    rendered = tokenizer.render(
        plain,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        tools=tools,
        variables=variables,
    )
    return rendered.cut(len(_cut_at_mark(rendered.text))) if continue_final_message else rendered


def as_template_takes(message: ChatMessage, place: str) -> dict[str, Any]:
    """One message as templates know it: its content one text, arguments of calls as values.

    Args:
        message: of the request.
        place: where it stands, for errors.
    Raises:
        FieldError: it holds something other than text.
    """
    further = dict(message.model_extra or {})
    if further.get("reasoning_content") is None and isinstance(further.get("reasoning"), str):
        further["reasoning_content"] = further["reasoning"]  # what some clients call it
    has_more = bool(message.tool_calls or further.get("reasoning_content"))
    plain: dict[str, Any] = {**further, "role": message.role, "content": _text_of(message, place, has_more=has_more)}
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    return plain


def _text_of(message: ChatMessage, place: str, *, has_more: bool) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if has_more:
            return ""
        raise FieldError(f"{place} has no content", param=f"{place}.content")
    texts = []
    for index, part in enumerate(message.content):
        param = f"{place}.content[{index}]"
        if part.type != "text":
            raise FieldError(f"{param} is of type {shown(part.type)}; only text can be read here", param=param)
        if part.text is None:
            raise FieldError(f"{param} is of type text and has none", param=f"{param}.text")
        texts.append(part.text)
    return "".join(texts)


def _call(call: ToolCall) -> dict[str, Any]:
    """A call; its arguments as values, since templates write them as JSON themselves."""
    arguments: object = call.function.arguments or {}
    if call.function.arguments:
        try:
            arguments = json.loads(call.function.arguments)
        except (ValueError, RecursionError):  # what cannot be read stays the text that the model once wrote
            arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({} if call.id is None else {"id": call.id})}


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The last message with a mark at its end, since what the template writes behind it may repeat its content."""
    if not message["content"].strip():
        raise _nothing_to_continue()
    return {**message, "content": f"{message['content']}{_MARK} "}


def _cut_at_mark(text: str) -> str:
    """A rendered chat up to its mark; white space before it stays, unless the template takes that off at an end."""
    before, found, behind = text.rpartition(_MARK)
    if not found:
        raise _nothing_to_continue()
    return before if behind.startswith(" ") else before.rstrip()


def _nothing_to_continue() -> FieldError:
    return FieldError(
        "continue_final_message is set, but the last message has no content that the chat template repeats",
        param="continue_final_message",
        hint="a last message of the assistant with some text",
    )
