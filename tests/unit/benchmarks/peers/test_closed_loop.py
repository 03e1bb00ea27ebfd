"""The loop that times both sides, with an engine that gives one token per step to everybody and a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.peers.closed_loop import Piece, TimedAnswer, closed_loop


class Engine:
    """Request i wants i + 1 tokens; each step takes a second, the first of a request gives nothing."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.left: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.most = 0

    def add(self, index: int) -> None:
        self.left[index] = index + 1
        self.waiting.add(index)
        self.most = max(self.most, len(self.left))

    def step(self) -> Iterator[Piece]:
        self.now_s += 1.0
        for index in list(self.left):
            if index in self.waiting:
                self.waiting.remove(index)
                yield index, (), False
                continue
            self.left[index] -= 1
            yield index, (10 * index,), self.left[index] == 0
            if self.left[index] == 0:
                del self.left[index]


def loop(num_requests: int, concurrency: int) -> tuple[Engine, list[TimedAnswer]]:
    engine = Engine()
    return engine, closed_loop(num_requests, concurrency, engine.add, engine.step, lambda: engine.now_s)


@pytest.mark.parametrize("concurrency", [1, 2, 9])
def test_so_many_are_in_flight_and_no_more(concurrency: int) -> None:
    engine, answers = loop(5, concurrency)
    assert engine.most == min(5, concurrency)
    assert [answer.token_ids for answer in answers] == [[10 * index] * (index + 1) for index in range(5)]


def test_times_are_those_after_the_step() -> None:
    _, answers = loop(3, 2)
    assert [(one.added_s, one.first_s, one.last_s) for one in answers] == [(0, 2, 2), (0, 2, 3), (2, 4, 6)]


def test_answers_cross_between_processes() -> None:
    answer = TimedAnswer([1, 2], 0.5, 1.5, 2.5)
    assert TimedAnswer.from_json(answer.to_json()) == answer
