"""Work that is recorded at its second time, and work that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from paceline.engine.counters import Counters
from paceline.engine.recordings import Recorded, Repeated, make_recorder
from paceline.errors import ConfigError


def test_graphs_are_refused_where_there_are_none() -> None:
    assert make_recorder(torch.device("cpu"), wanted=None) is None
    with pytest.raises(ConfigError, match="cuda_graphs is on"):
        make_recorder(torch.device("cpu"), wanted=True)


class Written:
    """A recording that can be told from its work."""

    def replay(self) -> str:
        return "played back"


def test_work_is_recorded_at_its_second_time() -> None:
    counters, bodies = Counters(num_draft_tokens=3), list[Callable[[], str]]()

    def record(body: Callable[[], str]) -> Written:
        bodies.append(body)
        return Written()

    work = Recorded(lambda: "done", "some work")
    assert work.do(record, counters) == "done" and not work.is_recorded
    assert [work.do(record, counters) for _ in range(2)] == ["played back"] * 2 and work.is_recorded
    assert len(bodies) == counters.num_recordings == 1 and bodies[0]() == "done"


def test_work_that_cannot_be_recorded_is_tried_once_and_done_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    counters, tried = Counters(num_draft_tokens=3), []

    def record(body: Callable[[], str]) -> Written:
        tried.append(body)
        raise RuntimeError("not permitted while a stream is capturing")

    work = Recorded(lambda: "done", "some work")
    with caplog.at_level(logging.ERROR, logger="paceline"):
        assert [work.do(record, counters) for _ in range(4)] == ["done"] * 4
    assert len(tried) == counters.num_failed_recordings == 1 and counters.num_recordings == 0
    assert [record.message for record in caplog.records] == [
        "some work cannot be recorded: not permitted while a stream is capturing"
    ]


def test_a_repeated_body_is_done_at_every_playback() -> None:
    calls = []
    recording = Repeated(lambda: calls.append(1))
    assert not calls
    recording.replay()
    recording.replay()
    assert len(calls) == 2
