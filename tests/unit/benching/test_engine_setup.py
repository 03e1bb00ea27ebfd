"""Engines as set-ups: times of every delta, tokens and drafting as the engine itself counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.served import MAX_MODEL_LEN, models_of

from paceline.benching.engine_setup import EngineSetUp, TimedEngine
from paceline.benching.records import AnswerRecord, Question
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.request import SamplingParameters
from paceline.engine.settings import EngineSettings
from paceline.errors import EngineDeadError
from paceline.evaluation.prompts import Prompt


def asked(
    prompts: Sequence[Sequence[int]], *, with_drafter: bool, max_tokens: int = 12, fails_at: int | None = None
) -> list[AnswerRecord]:
    """All prompts, asked at once."""
    target, drafter = models_of()
    made: list[TimedEngine] = []

    class Failing(TimedEngine):
        num_steps = 0

        def step(self):  # type: ignore[no-untyped-def]
            self.num_steps += 1
            if fails_at is not None and self.num_steps >= fails_at:
                raise ZeroDivisionError("planted")
            return super().step()

    def make() -> TimedEngine:
        settings = EngineSettings(max_num_seqs=4, max_model_len=MAX_MODEL_LEN, prefix_cache=False)
        made.append(Failing(target, drafter if with_drafter else None, settings))
        return made[0]

    sampling = SamplingParameters(max_tokens=12, ignore_eos=True)

    async def ask() -> list[AnswerRecord]:
        async with AsyncEngine(make, canary="off") as engine:
            setup = EngineSetUp("here", engine, lambda: made[0], lambda _: sampling)
            questions = [
                Question(index, Prompt(f"p{index}", token_ids=tuple(ids))) for index, ids in enumerate(prompts)
            ]
            found = await asyncio.gather(*map(setup.ask, questions))
            assert made[0].deltas == {} and await setup.counters() is None
            return list(found)

    return asyncio.run(ask())


@pytest.mark.parametrize("with_drafter", [False, True])
def test_an_answer(with_drafter: bool) -> None:
    (record,) = asked([[9, 10, 11]], with_drafter=with_drafter)
    assert record.error is None and record.finish_reason == "length"
    assert (record.num_prompt_tokens, record.num_tokens) == (3, 12)
    assert record.delta_tokens is not None and sum(record.delta_tokens) == 12 and record.delta_tokens[0] == 1
    assert len(record.delta_s) == len(record.delta_tokens) and list(record.delta_s) == sorted(record.delta_s)
    assert record.first_s == record.delta_s[0] > 0 and record.total_s == record.delta_s[-1]
    assert record.drafting is not None
    if with_drafter:  # every step is a delta of its accepted drafts and one token more
        steps = len(record.delta_tokens) - 1
        assert record.drafting.num_steps in (steps, steps - 1)  # the last one may have had no room for drafts
        assert record.drafting.num_accepted + steps >= sum(record.delta_tokens[1:])
    else:
        assert record.drafting.num_steps == 0 and set(record.delta_tokens) == {1}


def test_drafting_leaves_greedy_answers_as_they_are() -> None:
    prompts = [[9, 10, 11], [20, 21], [30]]
    plain, drafted = (asked(prompts, with_drafter=each) for each in (False, True))
    assert [one.output_sha256 for one in plain] == [one.output_sha256 for one in drafted]
    assert len({one.output_sha256 for one in plain}) == 3


def test_a_request_that_is_refused_fails_alone() -> None:
    good, bad = asked([[9, 10], [10**6]], with_drafter=True)
    assert good.is_whole and not bad.is_whole
    assert bad.error is not None and "vocabulary" in bad.error and bad.num_tokens is None


def test_an_engine_that_dies_is_no_record() -> None:
    with pytest.raises(EngineDeadError, match="planted"):
        asked([[9, 10, 11]], with_drafter=False, fails_at=1)
