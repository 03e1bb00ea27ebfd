"""How an answer is read: which part of it was thought, which is said, and which is a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.checkpoint import think_tags
from paceline.checkpoint.answer_parts import AnswerReader, PlainText
from paceline.checkpoint.kimi_k3_answers import KimiK3Answers
from paceline.checkpoint.kimi_k3_marks import OPEN, SEPARATOR
from paceline.checkpoint.think_tags import ThinkTags
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.serving.tools import ToolUse


@dataclass(frozen=True)
class AnswerForm:
    """Of the answers to one prompt.

    Attributes:
        make_reader: makes a reader of an answer.
        structure_begins_after: where the prompt lets the target think first, the text behind which a form that was
            asked for begins.
    """

    make_reader: Callable[[], AnswerReader] = PlainText
    structure_begins_after: str | None = None


def answer_form(
    tokenizer: TextTokenizer, prompt: str, tools: ToolUse, *, tells_reasoning: bool, begun: str = ""
) -> AnswerForm:
    """How answers to a chat are read.

    Args:
        tokenizer: of the target; its template or its marks say how it writes.
        prompt: the rendered chat, which may have opened a part of the answer.
        tools: of the request.
        tells_reasoning: else what was thought stays in the text.
        begun: the message that the answer goes on with, if it is no new one.
    """
    if tokenizer.has_channels and tells_reasoning:
        begins_in = "think" if prompt.endswith(f"{OPEN}think{SEPARATOR}") else "response"
        return AnswerForm(
            lambda: KimiK3Answers(begins_in, reads_calls=tools.reads_calls, takes_several=tools.takes_several),
            f"{OPEN}response{SEPARATOR}" if begins_in == "think" else None,
        )

    def said() -> AnswerReader:
        if tools.reads_calls and tools.form is not None:
            return tools.form.make_reader(tools.takes_several)
        return PlainText()

    is_hidden = tokenizer.token_id(think_tags.CLOSE) in tokenizer.special_ids  # texts leave special tokens out
    if not tells_reasoning or is_hidden or think_tags.CLOSE not in (tokenizer.chat_template or ""):
        return AnswerForm(said)
    is_begun = begun.lstrip().startswith(think_tags.OPEN) and think_tags.CLOSE not in begun
    begins_inside = is_begun or prompt.rstrip().endswith(think_tags.OPEN)
    return AnswerForm(
        lambda: ThinkTags(said(), begins_inside=begins_inside), think_tags.CLOSE if begins_inside else None
    )
