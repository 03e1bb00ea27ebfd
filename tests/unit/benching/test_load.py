"""Closed and open loops over something that answers after a set time."""

from __future__ import annotations

import asyncio
import time

import pytest

from paceline.benching.load import run_load
from paceline.benching.records import AnswerRecord, Question
from paceline.evaluation.prompts import single_prompt

QUESTIONS = [Question(index, single_prompt("why", identity=f"p{index}")) for index in range(6)]


class Answers:
    """Takes `seconds` for each answer, and counts how many it is asked for at once."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds, self.num_running, self.most_running = seconds, 0, 0
        self.order: list[int] = []

    async def ask(self, question: Question) -> AnswerRecord:
        sent_s = time.perf_counter()
        self.order.append(question.index)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.num_running -= 1
        return AnswerRecord(question.index, question.prompt.id, sent_s, self.seconds, first_s=self.seconds / 2)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (None, 6), (50, 6)])
def test_a_closed_loop_keeps_so_many_in_flight(concurrency: int | None, most: int) -> None:
    answers, finished = Answers(), list[AnswerRecord]()
    total_s = asyncio.run(run_load(QUESTIONS, answers.ask, finished, concurrency=concurrency))
    assert answers.most_running == most and answers.order == list(range(6))
    assert sorted(record.index for record in finished) == list(range(6))
    assert all(record.due_s == record.sent_s >= 0 and record.total_s == 0.01 for record in finished)
    assert total_s >= 0.01 * 6 / most


def test_an_open_loop_does_not_wait_for_answers() -> None:
    answers, finished = Answers(0.1), list[AnswerRecord]()
    arrivals_s = [0.01 * index for index in range(6)]
    asyncio.run(run_load(QUESTIONS, answers.ask, finished, concurrency=None, arrivals_s=arrivals_s))
    assert answers.most_running == 6
    assert [record.due_s for record in sorted(finished, key=lambda each: each.index)] == arrivals_s
    assert all(record.sent_s >= record.due_s for record in finished)


def test_waiting_for_a_place_counts() -> None:
    """An open loop with a limit that left it out would call an overloaded server fast."""
    answers, finished = Answers(0.05), list[AnswerRecord]()
    asyncio.run(run_load(QUESTIONS[:3], answers.ask, finished, concurrency=1, arrivals_s=[0.0, 0.0, 0.0]))
    totals = sorted(record.total_s for record in finished)
    assert answers.most_running == 1
    assert totals[0] < 0.09 and totals[1] >= 0.1 and totals[2] >= 0.15
    assert all(record.first_s is not None and record.first_s < record.total_s for record in finished)


def test_an_error_ends_the_loop_and_leaves_nobody_behind() -> None:
    answers, finished = Answers(0.05), list[AnswerRecord]()

    async def ask(question: Question) -> AnswerRecord:
        if question.index == 2:
            raise ZeroDivisionError
        return await answers.ask(question)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_load(QUESTIONS, ask, finished, concurrency=2))
    assert answers.num_running == 0 and {record.index for record in finished} <= {0, 1}


def test_what_had_ended_is_there_when_it_is_cancelled() -> None:
    finished = list[AnswerRecord]()

    async def interrupted() -> None:
        await asyncio.wait_for(run_load(QUESTIONS, Answers(0.03).ask, finished, concurrency=1), 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(interrupted())
    assert 1 <= len(finished) < 6
