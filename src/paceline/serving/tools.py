"""Functions that a model may call: what its prompt and its grammar say of them.

How calls are written follows from the chat template (`call_forms.py`). Kimi-K3, which has channels, is told when it has
to call and is not forced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.engine.structured import StructuredOutput
from paceline.errors import shown
from paceline.serving.call_forms import CallForm, form_of
from paceline.serving.fields import FieldError, as_json
from paceline.serving.protocol import ChatCompletionRequest, NamedTool, Tool

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as such models write JSON


@dataclass(frozen=True)
class ToolUse:
    """What a request's tools come to.

    Attributes:
        for_template: as the chat template gets them; None leaves them out.
        variables: further ones of the template.
        grammar: where a call has to be made, the form that the text must have.
        reads_calls: whether calls are looked for in the answer.
        form: how they are written; None in channels.
        takes_several: whether an answer may hold more than one.
    """

    for_template: tuple[dict[str, Any], ...] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    grammar: StructuredOutput | None = None
    reads_calls: bool = False
    form: CallForm | None = None
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
    form = None if tokenizer.has_channels else _known_form(tokenizer)
    grammar = None
    if choice != "auto":
        if body.structured_outputs is not None or (body.response_format and body.response_format.type != "text"):
            raise FieldError("tool_choice wants a call, and another field says what the text is", param="tool_choice")
        wanted = choice.function.name if isinstance(choice, NamedTool) else None
        if form is not None:
            grammar = StructuredOutput("grammar", _grammar(body, form, wanted))
        elif wanted is not None:
            raise FieldError(
                "tool_choice names a function; this model can be told to call, and not which function",
                param="tool_choice",
                hint='tool_choice "required", with that one tool',
            )
    return ToolUse(
        for_template=for_template(body.tools),
        variables={"tool_choice": choice} if form is None else {},
        grammar=grammar,
        reads_calls=True,
        form=form,
        takes_several=body.parallel_tool_calls is not False,
    )


def for_template(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """Tools as a chat template gets them: as they were sent, without what was null."""
    return tuple(tool.model_dump(exclude_none=True) for tool in tools)


def _known_form(tokenizer: TextTokenizer) -> CallForm:
    """How a model writes calls; one whose calls would not be found in its text is refused."""
    form = form_of(tokenizer.chat_template or "")
    if form is None:
        reason = "the chat template of this model does not write calls in a form that is known here"
    elif hidden := [mark for mark in form.marks if tokenizer.token_id(mark) in tokenizer.special_ids]:
        reason = f"texts leave special tokens out, and for this model {hidden[0]} is one"
    else:
        return form
    raise FieldError(
        f"tools cannot be used: {reason}",
        param="tools",
        hint='tool_choice "none", or a model such as Qwen2.5, Qwen3, Llama 3 or Kimi-Linear',
    )


def _grammar(body: ChatCompletionRequest, form: CallForm, name: str | None) -> str:
    """Lark for exactly one call, of the function named or of any.

    The arguments of each function are a schema of their own, so that `$ref` in it finds its `$defs`.
    """
    tools = [tool.function for tool in body.tools or () if name in (None, tool.function.name)]
    if not tools:
        raise FieldError(f"tool_choice names {shown(name)}, which is none of the tools", param="tool_choice")
    num_before = sum(len(message.tool_calls or ()) for message in body.messages)
    lines = ["start: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    end = json.dumps(form.behind)
    for index, tool in enumerate(tools):
        begin = json.dumps(form.before(tool.name, num_before))
        schema = as_json(_arguments(tool.parameters), f"the parameters of {tool.name}", "tools")
        lines += [f"call_{index}: {begin} arguments_{index} {end}", f"arguments_{index}: %json {schema}"]
    return "\n".join((*lines, ""))


def _arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A schema of objects, also where the caller's leaves that open."""
    return {"x-guidance": _SPACING, "type": "object", **(parameters or {})}
