"""The chat format of Kimi-K3, whose repository has no template: marks around names, and channels in an answer.

    message = <|open|>message role="user"<|sep|> text <|close|>message<|sep|><|end_of_msg|>
    answer  = message with the channels think, response and tools, each of which is opened and closed like a message

A prompt opens the answer's first channel, so what the target writes begins inside it. Thinking is kept in the history,
also where there was none. Tools and options of a request are system messages with a type.

Source: `encoding_k3.py` and `tokenization_kimi.py` of the model's repository; the report on Kimi K3, appendix F.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.checkpoint.answer_parts import read_whole
from paceline.checkpoint.kimi_k3_answers import KimiK3Answers
from paceline.checkpoint.kimi_k3_marks import CLOSE, END, OPEN, SEPARATOR
from paceline.checkpoint.rendered_chat import RenderedChat, Segment
from paceline.errors import RequestError, shown

EFFORTS = ("low", "high", "max")
VARIABLES = ("thinking", "enable_thinking", "thinking_effort", "reasoning_effort", "tool_choice", "response_format")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_JSON_ONLY = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown code "
    "blocks (```json) or any additional formatting."
)
# Of channels; an answer that tells of marks has none, and is text.
_BORDERS = tuple(f"{mark}{name}{SEPARATOR}" for mark in (OPEN, CLOSE) for name in ("think", "response", "tools"))
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def render_kimi_k3(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> RenderedChat:
    """Render messages.

    Args:
        messages: with `role` and `content`; an assistant's may have `reasoning_content` and `tool_calls`, a tool's has
            `name` or `tool_call_id`, or follows the calls in their order; a system message may declare `tools`.
        add_generation_prompt: end with what opens the answer and its first channel.
        tools: functions that the target may call, in the form of the OpenAI API.
        variables: `thinking` or `enable_thinking`, true unless said otherwise; `thinking_effort` or `reasoning_effort`,
            "max" unless said otherwise and None for no word of it; `tool_choice` and `response_format` as in the API.
    Raises:
        RequestError: a role or a value is not known, or a tool's message belongs to no call.
    """
    options = _options(variables or {})
    writer = _Writer()
    if tools:
        writer.system("tool-declare", _TOOLS + _in_fence(list(tools)))
    if options["thinking"] and options["effort"] is not None:
        writer.system("thinking-effort", _EFFORT.format(options["effort"]))
    history = _History()
    for index, message in enumerate(_in_order_of_calls(messages)):
        _message(writer, history, message, index, thinking=bool(options["thinking"]))
    if (choice := str(options["tool_choice"])) in _CHOICES:
        writer.system("tool-choice", _CHOICES[choice])
    _response_format(writer, options["response_format"])
    if add_generation_prompt:
        writer.opening("message", (("role", "assistant"),))
        writer.opening("think" if options["thinking"] else "response")
    return RenderedChat(tuple(writer.segments))


def _options(variables: Mapping[str, object]) -> dict[str, Any]:
    thinking = variables.get("thinking", variables.get("enable_thinking", True))
    effort = variables.get("thinking_effort", variables.get("reasoning_effort", "max"))
    if not isinstance(thinking, bool):
        raise RequestError(f"thinking is {shown(thinking)}; it is true or false")
    if thinking and effort is not None and effort not in EFFORTS:
        raise RequestError(f"thinking_effort is {shown(effort)}; Kimi-K3 knows {', '.join(EFFORTS)}")
    return {
        "thinking": thinking,
        "effort": effort,
        "tool_choice": variables.get("tool_choice"),
        "response_format": variables.get("response_format"),
    }


class _Writer:
    """Collects segments. Marks stand by themselves, and so does each piece of a name's attributes."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def mark(self, mark: str) -> None:
        self.segments.append(Segment(mark, holds_tokens=True))

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, holds_tokens=False))

    def opening(self, name: str, attributes: Iterable[tuple[str, object]] = ()) -> None:
        self.mark(OPEN)
        self.text(name)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(str(value).replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.mark(SEPARATOR)

    def closing(self, name: str) -> None:
        self.mark(CLOSE)
        self.text(name)
        self.mark(SEPARATOR)

    def end_of_message(self) -> None:
        self.closing("message")
        self.mark(END)

    def system(self, kind: str, text: str) -> None:
        self.opening("message", (("role", "system"), ("type", kind)))
        self.text(text)
        self.end_of_message()


class _History:
    """The calls of the last answer, and how many of their results came."""

    def __init__(self) -> None:
        self.calls: Sequence[Mapping[str, Any]] = ()
        self.num_results = 0


def _message(writer: _Writer, history: _History, message: Mapping[str, Any], index: int, *, thinking: bool) -> None:
    role = message["role"]
    name = (("name", message["name"]),) if message.get("name") else ()
    if role == "system" and message.get("tools"):
        writer.system("tool-declare", _MORE_TOOLS + _in_fence(message["tools"]))
    elif role in ("user", "system"):
        _plain(writer, (("role", role), *name), message)
    elif role == "tool":
        history.num_results += 1
        _plain(
            writer,
            (("role", "tool"), ("tool", _tool_of(message, history, index)), ("index", history.num_results)),
            message,
        )
    elif role == "assistant":
        history.calls, history.num_results = message.get("tool_calls") or (), 0
        writer.opening("message", (("role", "assistant"), *name))
        _channels(writer, message, thinking=thinking)
        writer.end_of_message()
    else:
        raise RequestError(f"message {index} has role {shown(role)}; Kimi-K3 knows system, user, assistant and tool")


def _plain(writer: _Writer, attributes: Iterable[tuple[str, object]], message: Mapping[str, Any]) -> None:
    writer.opening("message", attributes)
    writer.text(message.get("content") or "")
    writer.end_of_message()


def _channels(writer: _Writer, message: Mapping[str, Any], *, thinking: bool) -> None:
    """What an assistant said: in a chat with thinking, that channel is there also where it is empty.

    An answer as the target wrote it, with its marks, is read into its channels first.
    """
    message = _apart(message, thinking=thinking)
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(reasoning, str):
            raise RequestError(f"an assistant's reasoning_content is {shown(reasoning)}, expected a string")
        writer.opening("think")
        writer.text(reasoning if reasoning.strip() else "")
        writer.closing("think")
    writer.opening("response")
    writer.text(message.get("content") or "")
    writer.closing("response")
    calls = message.get("tool_calls") or ()
    if not calls:
        return
    writer.opening("tools")
    for number, call in enumerate(calls, start=1):
        function = _function_of(call)
        writer.opening("call", (("tool", function.get("name")), ("index", number)))
        _arguments(writer, function.get("arguments"))
        writer.closing("call")
    writer.closing("tools")


def _apart(message: Mapping[str, Any], *, thinking: bool) -> Mapping[str, Any]:
    content = message.get("content") or ""
    if message.get("reasoning_content") or message.get("tool_calls") or not any(tag in content for tag in _BORDERS):
        return message
    thought, said, calls = read_whole(KimiK3Answers("think" if thinking else "response", reads_calls=True), content)
    functions = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    return {**message, "content": said, "reasoning_content": thought, "tool_calls": functions}


def _arguments(writer: _Writer, arguments: object) -> None:
    """Of one call: a block each, with its type; text that is no JSON object stands in a block of its own."""
    values = arguments or {}
    if isinstance(values, str):
        try:
            values = json.loads(values) if values.strip() else {}
        except (ValueError, RecursionError):
            writer.opening("json", (("type", "object"),))
            writer.text(str(arguments))
            writer.closing("json")
            return
    if not isinstance(values, Mapping):
        raise RequestError(f"the arguments of a call are {shown(arguments)}; Kimi-K3 takes a JSON object")
    for key, value in values.items():
        writer.opening("argument", (("key", key), ("type", _type_of(value))))
        writer.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        writer.closing("argument")


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):  # which Python takes for a number
        return "null" if value is None else "boolean"
    kinds = {"number": (int, float), "string": (str,), "object": (Mapping,)}
    return next((name for name, types in kinds.items() if isinstance(value, types)), "array")


def _function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _tool_of(message: Mapping[str, Any], history: _History, index: int) -> object:
    """The name of the tool that a message is from: its own, or that of the call in its place."""
    name = message.get("tool") or message.get("name")
    if name:
        return name
    if history.num_results <= len(history.calls):
        return _function_of(history.calls[history.num_results - 1]).get("name")
    raise RequestError(f"message {index} is a tool's, and there is no call before it that it could answer")


def _in_order_of_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages with each run of results in the order of their calls, which they are numbered by.

    A run in which one belongs to no call stays as it is.
    """
    ordered: list[Mapping[str, Any]] = []
    places: dict[str, tuple[int, object]] = {}
    run: list[Mapping[str, Any]] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            run.append(message)
            continue
        ordered += _sorted_run(run, places)
        run = []
        if message is None:
            break
        if message["role"] == "assistant":
            places = {}
            for place, call in enumerate(message.get("tool_calls") or ()):
                if call.get("id") is not None:
                    places.setdefault(str(call["id"]), (place, _function_of(call).get("name")))
        ordered.append(message)
    return ordered


def _sorted_run(
    run: Sequence[Mapping[str, Any]], places: Mapping[str, tuple[int, object]]
) -> Sequence[Mapping[str, Any]]:
    found = [places.get(str(message.get("tool_call_id", message.get("id")))) for message in run]
    if any(place is None for place in found):
        return run
    pairs = sorted(zip(found, range(len(run)), run, strict=True), key=lambda pair: (pair[0][0], pair[1]))  # type: ignore[index]
    return [
        message if place is None or place[1] is None else {**message, "tool": place[1]} for place, _, message in pairs
    ]


def _response_format(writer: _Writer, wanted: object) -> None:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind == "json_object":
        writer.system("response-format", _JSON_ONLY.format(kind))
    elif kind == "json_schema":
        described = wanted.get("json_schema") if isinstance(wanted, Mapping) else None
        schema = described.get("schema", described) if isinstance(described, Mapping) else described
        writer.system("response-format", _JSON_ONLY.format(kind) + _SCHEMA + _in_fence(schema))


def _in_fence(value: object) -> str:
    """Compact JSON with the keys of every object in order."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return f"```json\n{text}\n```"
