"""Answers to given prompts: what serving would say, whatever the lengths of the prompts in a batch."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiny import tiny_prompts, tiny_target, wrap_target

from paceline.capture.answers import AnswerSettings, answer_prompts
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.errors import RequestError
from paceline.models.loading import LoadedTarget

VOCAB_SIZE, END, MAX_TOKENS = 32, 2, 12


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    """So few ids, a third of them stop ids, that an answer ends by chance now and then; exact per row."""
    stops = tuple(range(END, VOCAB_SIZE, 3))
    return wrap_target(
        tiny_target(vocab_size=VOCAB_SIZE, hidden_size=32, head_size=8, stop_token_ids=stops), "row_invariant"
    )


def settings(**changes: Any) -> AnswerSettings:
    values: dict[str, Any] = {"batch_size": 7, "max_answer_tokens": MAX_TOKENS, "greedy_share": 1.0, "seed": 1}
    return AnswerSettings(**(values | changes))


def prompts() -> list[list[int]]:
    return tiny_prompts([5, 1, 9, 3, 17, 4, 4, 2, 30, 6, 11, 8, 7, 5, 5], seed=3, vocab_size=VOCAB_SIZE)


def test_greedy_answers_are_those_of_serving(target: LoadedTarget) -> None:
    engine = Engine(target, settings=EngineSettings(max_model_len=64))
    served = engine.generate(prompts(), SamplingParameters(max_tokens=MAX_TOKENS))
    expected = {result.prompt_ids: result.token_ids for result in served}
    answered = list(answer_prompts(target, prompts(), settings()))
    assert len(answered) == len(prompts())
    for conversation in answered:
        prompt = tuple(conversation.prompt_ids.tolist())
        assert tuple(conversation.answer_ids.tolist()) == expected[prompt]
    assert {len(result.token_ids) for result in served} != {MAX_TOKENS}, "some answer has to end by itself"


def test_sampled_answers_repeat_with_their_seed_and_differ_without(target: LoadedTarget) -> None:
    def texts(seed: int) -> list[list[int]]:
        sampled = settings(greedy_share=0.0, temperature=1.0, seed=seed)
        return [conversation.answer_ids.tolist() for conversation in answer_prompts(target, prompts(), sampled)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


@pytest.mark.parametrize("length", [0, 60])
def test_prompts_without_room_are_refused_before_any_answer(target: LoadedTarget, length: int) -> None:
    limit = target.model.position_table.shape[0]
    bad = [[3] * (length and limit)]
    with pytest.raises(RequestError, match=r"prompt 2 has \d+ tokens"):
        next(answer_prompts(target, [[3], [4], *bad], settings()))
