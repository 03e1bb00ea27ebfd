"""The target's own answers, with and without a chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.fakes import ByteTokenizer
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import chat_target

from paceline.evaluation.contract_search import FEWEST_PROMPTS
from paceline.evaluation.own_text import QUESTIONS, answered, own_questions
from paceline.evaluation.prompts import Prompt, single_prompt
from paceline.models.attends import WholeSequence


class PlainTokenizer(ByteTokenizer):
    has_chat_template = False

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return super().encode(text)


def test_the_built_in_set_is_large_enough_and_has_no_doubles() -> None:
    assert len(set(QUESTIONS)) == len(own_questions()) == 24 > FEWEST_PROMPTS
    shipped = Path(__file__).parents[3] / "prompts" / "first.jsonl"
    assert not shipped.is_file() or not any(question in shipped.read_text() for question in QUESTIONS)


def test_answers_are_greedy_continuations() -> None:
    target = wrap_target(tiny_target(), tokenizer=PlainTokenizer())
    (text,) = answered(target, [single_prompt("hello there")], max_tokens=9)
    assert text.ids[: text.num_prompt_tokens] == tuple(target.tokenizer.encode("hello there", add_special_tokens=True))
    ids = torch.tensor([text.ids])
    with torch.no_grad():
        hidden = target.model(ids, torch.arange(ids.shape[1]).unsqueeze(0), WholeSequence())
    best = target.model.logits(hidden)[0].argmax(-1).tolist()
    assert list(text.ids[text.num_prompt_tokens :]) == best[text.num_prompt_tokens - 1 : -1]


def test_a_chat_template_is_used_where_there_is_one() -> None:
    target = chat_target()
    (text,) = answered(target, [single_prompt("hi")], max_tokens=4)
    assert text.ids[: text.num_prompt_tokens] == tuple(
        target.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    )


def test_very_long_prompts_are_passed_over_and_second_turns_not_asked() -> None:
    target = wrap_target(tiny_target(), tokenizer=PlainTokenizer())
    long = single_prompt("a" * 300)
    assert answered(target, [long]) == []
    two_turns = Prompt(id="two", turns=("b", "c"))
    assert answered(target, [two_turns], max_tokens=3) == answered(target, [single_prompt("b")], max_tokens=3)
    assert len(answered(target, [long, single_prompt("b")], max_tokens=3)) == 1
