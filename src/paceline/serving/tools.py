"""Functions that a model may call: what its prompt and its grammar say of them, and calls found in what it writes.

One way of writing calls is known, that of Hermes and Qwen: `<tool_call>`, a JSON object with `name` and `arguments`,
`</tool_call>`. A target is taken to write it if its chat template does.

Source: the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.engine.structured import StructuredOutput
from paceline.errors import shown
from paceline.serving.fields import FieldError
from paceline.serving.protocol import ChatCompletionRequest, NamedTool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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
    template = tokenizer.chat_template or ""
    if "tools" not in template or OPEN not in template:
        raise FieldError(
            "tools cannot be used: the chat template of this model does not write calls between "
            f"{OPEN} and {CLOSE}, the form that is known here",
            param="tools",
            hint='tool_choice "none", or a model such as Qwen2.5 or Qwen3',
        )
    grammar = None
    if choice != "auto":
        if body.structured_outputs is not None or (body.response_format and body.response_format.type != "text"):
            raise FieldError("tool_choice wants a call, and another field says what the text is", param="tool_choice")
        wanted = choice.function.name if isinstance(choice, NamedTool) else None
        grammar = StructuredOutput("grammar", _grammar(body, wanted))
    return ToolUse(
        for_template=tuple(tool.model_dump(exclude_none=True) for tool in body.tools),
        grammar=grammar,
        reads_calls=True,
        takes_several=body.parallel_tool_calls is not False,
    )


def _grammar(body: ChatCompletionRequest, name: str | None) -> str:
    """Lark for exactly one call, of the function named or of any."""
    tools = [tool.function for tool in body.tools or () if name in (None, tool.function.name)]
    if not tools:
        raise FieldError(f"tool_choice names {shown(name)}, which is none of the tools", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {json.dumps(schema)}\n'


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
    """Separates calls from text as an answer comes in.

    What looks like a call and is none stays text. Text that may be the beginning of a call is held back.

    Args:
        takes_several: else what stands behind the first call is left out.
    """

    def __init__(self, *, takes_several: bool = True) -> None:
        self._takes_several = takes_several
        self._held = ""
        self.num_calls = 0

    def feed(self, text: str) -> list[str | FoundCall]:
        """Take in what came, and give what is clear by now, in order."""
        self._held += text
        found: list[str | FoundCall] = []
        while self._held:
            start = self._held.find(OPEN)
            if start < 0:
                keep = _length_of_beginning(self._held)
                self._release(found, len(self._held) - keep)
                break
            self._release(found, start)
            end = self._held.find(CLOSE)
            if end < 0:
                break
            self._take_call(found, end + len(CLOSE))
        return found

    def finish(self) -> list[str | FoundCall]:
        """The answer has ended: what was held back is text, or a call whose end was cut off."""
        found: list[str | FoundCall] = []
        if self._held.startswith(OPEN):
            self._take_call(found, len(self._held))
        self._release(found, len(self._held))
        return found

    def _release(self, found: list[str | FoundCall], size: int) -> None:
        text, self._held = self._held[:size], self._held[size:]
        is_between = self.num_calls > 0 and not text.strip()  # the line breaks between calls
        if text and not is_between and (self._takes_several or self.num_calls == 0):
            found.append(text)

    def _take_call(self, found: list[str | FoundCall], size: int) -> None:
        call = _parse(self._held[:size].removeprefix(OPEN).removesuffix(CLOSE))
        if call is None:
            self._release(found, size)
            return
        self._held = self._held[size:]
        if self._takes_several or self.num_calls == 0:
            found.append(call)
        self.num_calls += 1


def _length_of_beginning(text: str) -> int:
    """How many characters at the end of a text may begin a call."""
    sizes: Sequence[int] = range(min(len(OPEN) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(OPEN[:size])), 0)


def _parse(text: str) -> FoundCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    try:
        (call["name"] + written).encode()
    except UnicodeEncodeError:  # an escape of half a surrogate pair, which no answer can carry
        return None
    return FoundCall(call["name"], written)
