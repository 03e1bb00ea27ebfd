"""Shards written by Ray actors: the same folder as without, whichever process dies, and never too many in flight.

One test starts a cluster and kills a process, since that takes seconds; the rest runs on a stand-in for Ray whose
actors work when they are waited for and die when they are told to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.capture.feature_runs import TinyJob, files_of, make_capture, random_texts, small_target, write_all

from paceline.capture import fan_out as module
from paceline.capture.fan_out import FanOutSettings, fan_out
from paceline.capture.features import finish_capture
from paceline.errors import CapacityError, MissingExtraError, NumericError, PacelineError, ShapeError


@pytest.mark.timeout(300)
def test_a_worker_killed_in_the_middle_of_a_shard_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two real processes, one of which gets SIGKILL: the folder is the one that a single process writes."""
    pytest.importorskip("ray")
    finish_capture(write_all(tmp_path / "alone", make_capture(small_target(), random_texts())))
    shards = make_capture(small_target(), random_texts()).open(tmp_path / "fanned")
    fan_out(TinyJob(tmp_path / "fanned", dies_at=3), shards.missing(), FanOutSettings(2, timeout_s=200.0))
    finish_capture(shards)
    assert (tmp_path / "fanned.died").exists()
    assert "a worker process ended; shards [" in caplog.text
    assert files_of(tmp_path / "fanned") == files_of(tmp_path / "alone")
    assert capfd.readouterr().out == "", "stdout is for data"


class ActorDied(Exception):
    """What Ray raises for every call of an actor whose process is gone."""


class OutOfMemory(Exception):
    """What Ray raises for a call whose process took too much memory."""


class Dies(BaseException):
    """Ends the process that it is raised in, as far as the stand-in goes."""


@dataclass(eq=False)
class Call:
    """One call of an actor, and in time its result."""

    actor: Any
    arguments: tuple[Any, ...]


class StandIn:
    """The part of Ray that is used."""

    exceptions = SimpleNamespace(RayActorError=ActorDied, OutOfMemoryError=OutOfMemory)

    def __init__(self) -> None:
        self.num_actors, self.num_killed, self.is_slow = 0, 0, False

    def is_initialized(self) -> bool:
        return True

    def remote(self, **options: Any) -> Callable[[type], Any]:
        assert options["max_restarts"] == 0, "what a dead actor held is given out again by us"

        def decorated(kind: type) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self._actor(kind(*arguments)))

        return decorated

    def _actor(self, inside: Any) -> Any:
        self.num_actors += 1
        actor = SimpleNamespace(inside=inside, is_dead=False)
        actor.write = SimpleNamespace(remote=lambda *arguments: Call(actor, arguments))
        return actor

    def wait(self, calls: list[Call], *, num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        assert num_returns == 1 and timeout > 0 and calls
        return ([], calls) if self.is_slow else (calls[:1], calls[1:])

    def get(self, call: Call) -> Any:
        try:
            if not call.actor.is_dead:
                return call.actor.inside.write(*call.arguments)
        except Dies:
            call.actor.is_dead = True
        raise ActorDied

    def kill(self, actor: Any) -> None:
        self.num_killed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setattr(module, "require_ray", lambda: stand_in)
    yield stand_in


@dataclass
class Job:
    """Writes down what was written; `act` may end the process or raise before that."""

    act: Callable[[int], None] = lambda index: None
    written: list[int] = field(default_factory=list)
    num_opened: int = 0

    def open(self) -> Callable[[int], object]:
        self.num_opened += 1

        def write(index: int) -> None:
            self.act(index)
            self.written.append(index)

        return write


def _dies_at(shards: list[int]) -> Callable[[int], None]:
    """Once at each of the shards, as often as they are listed."""

    def act(index: int) -> None:
        if index in shards:
            shards.remove(index)
            raise Dies

    return act


def test_every_shard_is_written_once_and_each_process_loads_once(ray: StandIn) -> None:
    job, done = Job(), list[int]()
    fan_out(job, range(20), FanOutSettings(3), done.append)
    assert sorted(job.written) == sorted(done) == list(range(20))
    assert (job.num_opened, ray.num_actors, ray.num_killed) == (3, 3, 3)


def test_the_shards_of_the_dead_are_written_by_others(ray: StandIn) -> None:
    job, done = Job(_dies_at([3, 7, 7])), list[int]()
    fan_out(job, range(20), FanOutSettings(2), done.append)
    assert sorted(job.written) == sorted(done) == list(range(20))
    assert ray.num_actors == 2 + 3 and ray.num_killed == 2


def test_a_fan_out_that_forgets_the_shards_of_the_dead_would_be_seen(
    ray: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault of the test above."""

    def forgetful(crew: Any, number: int, waiting: Any) -> None:
        crew._given = {call: place for call, place in crew._given.items() if place[0] != number}
        crew._workers[number] = crew._hire()

    monkeypatch.setattr(module._Crew, "_replace", forgetful)
    job = Job(_dies_at([3]))
    fan_out(job, range(20), FanOutSettings(2))
    assert 3 not in job.written


def test_a_shard_that_ends_every_process_is_an_error_that_names_it(ray: StandIn) -> None:
    job = Job(_dies_at([5] * 10))
    with pytest.raises(CapacityError, match="ended 3 times while it wrote shard 5"):
        fan_out(job, range(20), FanOutSettings(2))
    assert ray.num_actors == 2 + 2 and ray.num_killed == 2


def test_a_shard_that_merely_waited_behind_the_dying_one_is_not_to_blame(ray: StandIn) -> None:
    job = Job(_dies_at([0, 2, 4, 6, 8, 10]))  # each takes the next of its worker's shards along
    fan_out(job, range(20), FanOutSettings(1, tasks_per_worker=4, max_attempts=2))
    assert sorted(job.written) == list(range(20))


@pytest.mark.parametrize("tasks_per_worker", [1, 3])
def test_only_so_many_shards_are_in_flight(
    ray: StandIn, monkeypatch: pytest.MonkeyPatch, tasks_per_worker: int
) -> None:
    sizes: list[int] = []
    original = ray.wait

    def watched(calls: list[Call], **options: Any) -> Any:
        sizes.append(len(calls))
        return original(calls, **options)

    monkeypatch.setattr(ray, "wait", watched)
    fan_out(Job(), range(40), FanOutSettings(2, tasks_per_worker=tasks_per_worker))
    assert max(sizes) == 2 * tasks_per_worker


ERRORS = [
    NumericError("not a number", origin={"shard": "4"}, hint="another one"),
    ShapeError("taps", expected=[3], found=[4], origin={"shard": "4"}),
]


@pytest.mark.parametrize("error", ERRORS, ids=["plain", "with arguments"])
def test_an_error_of_a_worker_arrives_as_it_was(ray: StandIn, error: PacelineError) -> None:
    def act(index: int) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        fan_out(Job(act), [4], FanOutSettings(1))
    found = caught.value
    assert (found.message, found.hint, found.origin) == (error.message, error.hint, error.origin)
    assert ray.num_killed == 1, "nobody is left behind"


def test_workers_that_never_get_ready_are_an_error(ray: StandIn) -> None:
    ray.is_slow = True
    with pytest.raises(CapacityError, match=r"no worker finished a shard within 0.5 s; in flight: \[7, 8\]"):
        fan_out(Job(), [7, 8, 9], FanOutSettings(1, timeout_s=0.5))
    assert ray.num_killed == 1


def test_without_the_extra_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError) as caught:
        fan_out(Job(), [0], FanOutSettings(2))
    assert "pip install 'paceline[ray]'" in str(caught.value.hint)
    assert "Ray, which is not installed" in caught.value.message
