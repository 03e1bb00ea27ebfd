"""The forms in which targets write calls of functions, and how a target is known to use one.

    hermes   <tool_call> {"name": ..., "arguments": {...}} </tool_call>                     Hermes, Qwen2.5, Qwen3
    kimi     <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>, all calls between
             <|tool_calls_section_begin|> and <|tool_calls_section_end|>                    Kimi-K2, Kimi-Linear
    llama    {"name": ..., "parameters": {...}}, which is all of the answer                  Llama 3.1 to 3.3

Kimi-K3 has channels instead; its reader is `checkpoint/kimi_k3_answers.py`. Templates that put XML between the tags of
Hermes, as those of Qwen3-Coder and GLM-4.5 do, are told apart by `<function=` and `<arg_key>`; Hunyuan's have
`<tool_sep>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.checkpoint.answer_parts import AnswerReader
from paceline.serving.call_reader import KIMI_ARGUMENTS, CallReader, CallTags, parse_hermes, parse_kimi
from paceline.serving.llama_calls import LlamaCallReader

HERMES_TAGS = CallTags("<tool_call>", "</tool_call>", parse_hermes)
KIMI_TAGS = CallTags(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    parse_kimi,
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)


@dataclass(frozen=True)
class CallForm:
    """How a target writes calls.

    Attributes:
        name: of the form.
        shown_by: all of these stand in a chat template that has tools in this form.
        marks: must be part of an answer's text.
        make_reader: makes a reader of an answer; told whether it takes several calls.
        before: what a grammar has before the arguments of a call, given the function's name and how many calls there
            were before it in the chat.
        behind: what it has behind them.
    """

    name: str
    shown_by: tuple[str, ...]
    marks: tuple[str, ...]
    make_reader: Callable[[bool], AnswerReader]
    before: Callable[[str, int], str]
    behind: str


HERMES = CallForm(
    name="hermes",
    shown_by=("tools", HERMES_TAGS.opening),
    marks=(HERMES_TAGS.opening, HERMES_TAGS.closing),
    make_reader=lambda takes_several: CallReader(HERMES_TAGS, takes_several=takes_several),
    before=lambda name, _: f'{HERMES_TAGS.opening}\n{{"name": {json.dumps(name)}, "arguments": ',
    behind=f"}}\n{HERMES_TAGS.closing}",
)
KIMI = CallForm(
    name="kimi",
    shown_by=("tools", KIMI_TAGS.opening),
    marks=(KIMI_TAGS.opening, KIMI_ARGUMENTS, KIMI_TAGS.closing),
    make_reader=lambda takes_several: CallReader(KIMI_TAGS, takes_several=takes_several),
    before=lambda name, index: f"{KIMI_TAGS.around[0]}{KIMI_TAGS.opening}functions.{name}:{index}{KIMI_ARGUMENTS}",
    behind=f"{KIMI_TAGS.closing}{KIMI_TAGS.around[1]}",
)
LLAMA = CallForm(
    name="llama",
    shown_by=("tools", "<|start_header_id|>ipython<|end_header_id|>", '"parameters": '),  # 3.2 has no <|python_tag|>
    marks=(),
    make_reader=lambda takes_several: LlamaCallReader(takes_several=takes_several),
    before=lambda name, _: f'{{"name": {json.dumps(name)}, "parameters": ',
    behind="}",
)
_OTHERS = ("<function=", "<arg_key>", "<tool_sep>")


def form_of(template: str) -> CallForm | None:
    """The form that a chat template has tools in; None for templates without tools, and for other forms."""
    if any(mark in template for mark in _OTHERS):
        return None
    forms: Sequence[CallForm] = (HERMES, KIMI, LLAMA)
    return next((form for form in forms if all(text in template for text in form.shown_by)), None)
