from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.cli.fakes import FakeEngine, FakeTokenizer

from paceline.errors import CapacityError, NumericError
from paceline.evaluation.acceptance import Answer, Progress, SetAcceptance, evaluate_set, summarise
from paceline.evaluation.prompts import Prompt, single_prompt
from paceline.trace.step import RequestTrace, StepRecord


def _answer(accepted: Sequence[int], drafts: int = 3) -> Answer:
    records = [
        StepRecord("r", index, 0, 0, (1,) * drafts, kept, kept, (1,) * kept + (2,), 2, 1.0)
        for index, kept in enumerate(accepted)
    ]
    trace = RequestTrace("r", 1, first_token_id=0, records=records)
    return Answer("p", 0, cast(Any, SimpleNamespace(token_ids=trace.token_ids, trace=trace)))


def _evaluate(engine: FakeEngine, prompts: Sequence[Prompt], **options: Any) -> SetAcceptance:
    from paceline.engine.request import SamplingParameters

    sampling = options.pop("sampling", SamplingParameters())
    return evaluate_set(cast(Any, engine), cast(Any, FakeTokenizer()), "set", prompts, sampling, **options)


def test_a_ratio_of_sums_and_an_interval_over_prompts() -> None:
    found = summarise("set", [[_answer([3] * 9)], [_answer([0])]])
    assert found.summary.acceptance_length == 1 + 27 / 10  # the mean of the two prompts would be 2.5
    assert (found.low, found.high) == (1.0, 4.0)
    assert found.num_output_tokens == 2 + 36 + 1


def test_turns_of_a_prompt_are_one_unit_of_the_interval() -> None:
    together = summarise("set", [[_answer([3] * 5), _answer([0] * 5)], [_answer([3] * 5), _answer([0] * 5)]])
    apart = summarise("set", [[_answer([3] * 5)], [_answer([0] * 5)], [_answer([3] * 5)], [_answer([0] * 5)]])
    assert together.low == together.high == 2.5
    assert apart.low is not None and apart.low < 2.5


def test_answers_without_a_step_are_valid_json() -> None:
    found = summarise("set", [[_answer([])]])
    assert (found.low, found.high) == (None, None)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["acceptance_length"] is None


def test_every_turn_is_answered_with_the_answers_before_it() -> None:
    seen: list[Progress] = []
    engine = FakeEngine(answer="ok!")
    prompts = [single_prompt("a"), Prompt("b", turns=("x", "y", "z"))]
    found = _evaluate(engine, prompts, on_progress=seen.append)
    assert [(answer.prompt_id, answer.turn) for answer in found.answers] == [
        ("prompt", 0),
        ("b", 0),
        ("b", 1),
        ("b", 2),
    ]
    assert "".join(map(chr, found.answers[-1].result.prompt_ids)) == "xok!yok!z"
    assert (found.num_prompts, found.num_output_tokens) == (2, 12)
    assert [progress.num_answers for progress in seen] == [1, 2, 3, 4]
    assert seen[-1].num_answers_in_all == 4
    assert seen[-1].acceptance_length == found.summary.acceptance_length


def test_a_prompt_that_does_not_fit_is_named() -> None:
    class Full(FakeEngine):
        def add_request(self, prompt_ids: Sequence[int], sampling: Any, request_id: str | None = None) -> str:
            raise CapacityError("too long", hint="less")

    with pytest.raises(CapacityError, match="prompt 'prompt': too long") as caught:
        _evaluate(Full(), [single_prompt("a")])
    assert caught.value.hint == "less"


def test_bad_logits_end_the_evaluation() -> None:
    with pytest.raises(NumericError, match="prompt 'prompt'"):
        _evaluate(FakeEngine(last_reason="error"), [single_prompt("a")])
