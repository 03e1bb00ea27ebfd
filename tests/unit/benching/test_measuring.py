"""The order of passes, what a warm-up is, and what is left of a measurement that was cut short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from paceline.benching.measuring import Plan, Watcher, grown, measure
from paceline.benching.records import AnswerRecord, Load, Pass, Question
from paceline.errors import EngineDeadError, ServerError
from paceline.evaluation.prompts import single_prompt
from paceline.trace.acceptance import DraftTotals

QUESTIONS = [Question(index, single_prompt("why", identity=f"p{index}")) for index in range(3)]


class Fake:
    """Answers at once, and writes down that it did."""

    def __init__(self, name: str, log: list[str], error_of: Callable[[int], str | None] = lambda _: None) -> None:
        self.name, self._log, self._error_of = name, log, error_of
        self.num_asked = 0

    async def ask(self, question: Question) -> AnswerRecord:
        self._log.append(self.name)
        self.num_asked += 1
        error = self._error_of(self.num_asked)
        return AnswerRecord(question.index, question.prompt.id, time.perf_counter(), 0.001, error=error)

    async def counters(self) -> DraftTotals | None:
        return DraftTotals(self.num_asked, 2 * self.num_asked, self.num_asked, (self.num_asked, 0), None)


def test_there_and_back_again_after_a_warm_up_of_each() -> None:
    log, passes = list[str](), list[Pass]()
    plan = Plan(QUESTIONS, [Load(1), Load(2)], num_rounds=2, num_warm_ups=1)
    seen: list[Pass] = []
    asyncio.run(measure([Fake("a", log), Fake("b", log)], plan, passes, Watcher(on_pass=seen.append)))
    one_load = ["a", "b", *("a" * 3), *("b" * 3), *("b" * 3), *("a" * 3)]
    assert log == one_load * 2
    assert len(log) == plan.num_requests(2)
    assert seen == passes and all(each.is_whole and len(each.answers) == 3 for each in passes)
    assert [(each.setup, each.round_index) for each in passes[:4]] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert passes[0].drafting == DraftTotals(3, 6, 3, (3, 0), None)  # not those of the warm-up


def test_a_warm_up_is_a_whole_pass_by_default_and_may_be_left_out() -> None:
    for num_warm_ups, num_asked in ((None, 6), (0, 3), (2, 5), (9, 6)):
        log = list[str]()
        plan = Plan(QUESTIONS, [Load(1)], num_rounds=1, num_warm_ups=num_warm_ups)
        asyncio.run(measure([Fake("a", log)], plan, []))
        assert len(log) == num_asked == plan.num_requests(1)


def test_set_ups_meet_the_same_arrivals() -> None:
    passes = list[Pass]()
    plan = Plan(QUESTIONS, [Load(None, request_rate=500.0)], num_rounds=2, num_warm_ups=0)
    asyncio.run(measure([Fake("a", []), Fake("b", [])], plan, passes))
    due = [sorted(record.due_s for record in each.records) for each in passes]
    assert due[0] == due[1] and due[2] == due[3] and due[0] != due[2]
    assert due[0][-1] == pytest.approx(3 / 500)


def test_a_set_up_of_which_nothing_comes_ends_it() -> None:
    passes = list[Pass]()
    broken = Fake("b", [], lambda number: "status 500" if number > 4 else None)
    plan = Plan(QUESTIONS, [Load(1)], num_rounds=3, num_warm_ups=1)
    with pytest.raises(ServerError, match="b: all 3 requests of a pass failed; the first with: status 500"):
        asyncio.run(measure([Fake("a", []), broken], plan, passes))
    assert [each.setup for each in passes] == ["a", "b", "b"]
    with pytest.raises(ServerError, match="refused"):
        asyncio.run(measure([Fake("c", [], lambda _: "refused")], plan, []))


def test_some_failures_do_not_end_it() -> None:
    passes = list[Pass]()
    flaky = Fake("a", [], lambda number: "status 500" if number % 3 == 0 else None)
    asyncio.run(measure([flaky], Plan(QUESTIONS, [Load(1)], num_rounds=2, num_warm_ups=0), passes))
    assert [len(each.answers) for each in passes] == [2, 2]


def test_a_pass_that_is_cut_short_does_not_count() -> None:
    passes = list[Pass]()

    class Dying(Fake):
        async def ask(self, question: Question) -> AnswerRecord:
            if self.num_asked == 4:
                raise EngineDeadError("the engine is dead")
            return await super().ask(question)

    with pytest.raises(EngineDeadError):
        asyncio.run(measure([Dying("a", [])], Plan(QUESTIONS, [Load(1)], num_rounds=2, num_warm_ups=0), passes))
    assert [(each.is_whole, len(each.records)) for each in passes] == [(True, 3), (False, 1)]


def test_counters_that_fall_or_are_missing_say_nothing() -> None:
    early, late = DraftTotals(2, 8, 3, (2,), None), DraftTotals(5, 20, 9, (5, 4), None)
    assert grown(early, late) == DraftTotals(3, 12, 6, (3, 4), None)
    assert grown(late, early) is None and grown(None, late) is None and grown(early, None) is None
