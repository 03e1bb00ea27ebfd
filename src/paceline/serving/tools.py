"""Functions that a model may call: what its prompt and its grammar say of them, and calls found in what it writes.

One way of writing calls is known, that of Hermes, Qwen2.5 and Qwen3: `<tool_call>`, a JSON object with `name` and
`arguments`, `</tool_call>`. A target is taken to write it if its chat template does. Templates that put XML between the
same tags, as those of Qwen3-Coder do, are told apart by its `<function=`.

Source: the chat templates of Qwen2.5, Qwen3 and Qwen3-Coder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.engine.structured import StructuredOutput
from paceline.errors import shown
from paceline.serving.fields import FieldError, as_json
from paceline.serving.protocol import ChatCompletionRequest, NamedTool, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_XML = "<function="
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as such models write JSON


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools come to.

    Attributes:
        for_template: as the chat template gets them; None leaves them out.
        grammar: where a call has to be made, the form that the text must have.
        reads_calls: whether calls are looked for in the answer.
        takes_several: whether an answer may hold more than one.
    """

    for_template: tuple[dict[str, Any], ...] | None = None
    grammar: StructuredOutput | None = None
    reads_calls: bool = False
    takes_several: bool = True


def tool_use(body: ChatCompletionRequest, tokenizer: TextTokenizer) -> ToolUse:
    """Read a request's tools and what it wants of them.

    Raises:
        FieldError: a choice without tools or of an unknown one, two tools of a name, another form besides a call that
            has to be made, or a model whose chat template knows no tools.
    """
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if not body.tools:
        if choice not in ("none", "auto"):
            raise FieldError("tool_choice wants a call, and there are no tools", param="tool_choice")
        return ToolUse()
    names = [tool.function.name for tool in body.tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise FieldError(f"two tools are named {shown(name)}", param=f"tools[{index}].function.name")
    if choice == "none":
        return ToolUse()
    _require_known_form(tokenizer)
    grammar = None
    if choice != "auto":
        if body.structured_outputs is not None or (body.response_format and body.response_format.type != "text"):
            raise FieldError("tool_choice wants a call, and another field says what the text is", param="tool_choice")
        wanted = choice.function.name if isinstance(choice, NamedTool) else None
        grammar = StructuredOutput("grammar", _grammar(body, wanted))
    return ToolUse(
        for_template=for_template(body.tools),
        grammar=grammar,
        reads_calls=True,
        takes_several=body.parallel_tool_calls is not False,
    )


def for_template(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """Tools as a chat template gets them: as they were sent, without what was null."""
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


def _require_known_form(tokenizer: TextTokenizer) -> None:
    """Refuse a model whose calls would not be found in its text."""
    template = tokenizer.chat_template or ""
    is_known = "tools" in template and OPEN in template and _XML not in template
    if not is_known:
        obstacle = "the chat template of this model does not write calls as JSON between"
    elif tokenizer.token_id(OPEN) in tokenizer.special_ids:
        obstacle = "texts leave special tokens out, and this model has them for"
    else:
        return
    raise FieldError(
        f"tools cannot be used: {obstacle} {OPEN} and {CLOSE}, the form that is known here",
        param="tools",
        hint='tool_choice "none", or a model such as Qwen2.5 or Qwen3',
    )


def _grammar(body: ChatCompletionRequest, name: str | None) -> str:
    """Lark for exactly one call, of the function named or of any.

    The arguments of each function are a schema of their own, so that `$ref` in it finds its `$defs`.
    """
    tools = [tool.function for tool in body.tools or () if name in (None, tool.function.name)]
    if not tools:
        raise FieldError(f"tool_choice names {shown(name)}, which is none of the tools", param="tool_choice")
    lines = ["start: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    end = json.dumps(f"}}\n{CLOSE}")
    for index, tool in enumerate(tools):
        begin = json.dumps(f'{OPEN}\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        schema = as_json(_arguments(tool.parameters), f"the parameters of {tool.name}", "tools")
        lines += [f"call_{index}: {begin} arguments_{index} {end}", f"arguments_{index}: %json {schema}"]
    return "\n".join((*lines, ""))


def _arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A schema of objects, also where the caller's leaves that open."""
    return {"x-guidance": _SPACING, "type": "object", **(parameters or {})}


@dataclass(frozen=True)
class FoundCall:
    """One call in an answer.

    Attributes:
        name: of the function.
        arguments: JSON text.
    """

    name: str
    arguments: str


class CallReader:
    """Separates calls from text as an answer comes in; how it is cut into pieces makes no difference.

    What looks like a call and is none stays text. Text that may be the beginning of a call is held back. White space
    behind a call is left out.

    Args:
        takes_several: else what stands behind the first call is left out.
    """

    def __init__(self, *, takes_several: bool = True) -> None:
        self._takes_several = takes_several
        self._held = ""
        self._is_behind_call = False
        self.num_calls = 0

    def feed(self, text: str) -> list[str | FoundCall]:
        """Take in what came, and give what is clear by now, in order."""
        self._held += text
        return self._settled(is_whole=False)

    def finish(self) -> list[str | FoundCall]:
        """The answer has ended: what was held back is text, or a call whose end was cut off."""
        return self._settled(is_whole=True)

    def _settled(self, *, is_whole: bool) -> list[str | FoundCall]:
        found: list[str | FoundCall] = []
        while self._held:
            start = self._held.find(OPEN)
            if start < 0:
                self._release(found, len(self._held) - (0 if is_whole else _length_of_beginning(self._held)))
                break
            self._release(found, start)
            size, call = self._first_call(is_whole=is_whole)
            if size == 0:
                break
            if call is None:
                self._release(found, size)
            else:
                self._take(found, size, call)
        return found

    def _first_call(self, *, is_whole: bool) -> tuple[int, FoundCall | None]:
        """The size of what is held from an opening tag to its end, and the call if it is one; 0 if that is open."""
        first = end = self._held.find(CLOSE)
        while end >= 0:
            call, is_inside = _parse(self._held[len(OPEN) : end])
            if not is_inside:
                return (end if call else first) + len(CLOSE), call
            end = self._held.find(CLOSE, end + 1)  # that one is part of an argument
        if not is_whole:
            return 0, None
        if first < 0:
            return len(self._held), _parse(self._held[len(OPEN) :])[0]
        return first + len(CLOSE), None

    def _release(self, found: list[str | FoundCall], size: int) -> None:
        text, self._held = self._held[:size], self._held[size:]
        if self._is_behind_call:
            text = text.lstrip()
        if text:
            self._is_behind_call = False
            if self._takes_several or self.num_calls == 0:
                found.append(text)

    def _take(self, found: list[str | FoundCall], size: int, call: FoundCall) -> None:
        self._held = self._held[size:]
        self._is_behind_call = True
        if self._takes_several or self.num_calls == 0:
            found.append(call)
        self.num_calls += 1


def _length_of_beginning(text: str) -> int:
    """How many characters at the end of a text may begin a call."""
    sizes: Sequence[int] = range(min(len(OPEN) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(OPEN[:size])), 0)


def _parse(text: str) -> tuple[FoundCall | None, bool]:
    """The call that a text is, if it is one, and whether the text ends inside a string."""
    try:
        call = json.loads(text)
    except json.JSONDecodeError as error:
        return None, error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):  # a number of thousands of digits, or as many brackets
        return None, False
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None, False
    arguments = call.get("arguments", {})
    try:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        (call["name"] + written).encode()
    except (RecursionError, UnicodeEncodeError):  # or an escape of half a surrogate pair, which no answer can carry
        return None, False
    return FoundCall(call["name"], written), False
