"""Shards written by many processes: Ray actors, each of which loads what it needs once and then writes shard by shard.

A shard's bytes are a function of plan and index. So it does not matter who writes a shard, and when a process dies its
shards are simply given to another: none is lost, none is written differently.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.errors import CapacityError, ConfigError, MissingExtraError, PacelineError

_log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least is 75 MiB; shards go to the disk, not through the store


class ShardJob(Protocol):
    """What a worker process is given: small, picklable, and of a module that the process can import."""

    def open(self) -> Callable[[int], object]:
        """Load models and data, once per process; returns what writes one shard. Its result is dropped."""
        ...


@dataclass(frozen=True)
class FanOutSettings:
    """How many processes, and what they may hold.

    Attributes:
        num_workers: processes.
        num_gpus_per_worker: GPUs that each sees alone.
        num_threads: of torch in each process; the bits of a CPU's products may depend on it.
        tasks_per_worker: shards handed to a process at a time: the one it writes, and the next.
        max_attempts: processes that may die over one shard before that is an error.
        timeout_s: if no shard becomes ready for so long, that is an error.
    """

    num_workers: int
    num_gpus_per_worker: float = 0.0
    num_threads: int = 1
    tasks_per_worker: int = 2
    max_attempts: int = 3
    timeout_s: float = 3600.0


def fan_out(
    job: ShardJob, indices: Sequence[int], settings: FanOutSettings, on_done: Callable[[int], None] | None = None
) -> None:
    """Write shards in worker processes; returns when all of them are written.

    At most `num_workers * tasks_per_worker` shards are in flight. A process that dies is replaced and its shards are
    given out again. A cluster that `ray.init` connected this process to is used; otherwise one of this machine is
    started, and stopped at the end.

    Args:
        job: what to do.
        indices: shards.
        settings: see above.
        on_done: told of every shard that is written.
    Raises:
        MissingExtraError: Ray is not installed.
        CapacityError: processes keep dying over a shard, or none gets ready in time.
        ConfigError: there are fewer GPUs than the workers need.
        PacelineError: what a worker raised.
    """
    ray = require_ray()
    with _cluster(ray, settings):
        _require_gpus(ray, settings)
        crew = _Crew(ray, job, settings)
        try:
            crew.work(deque(indices), on_done)
        finally:
            crew.dismiss()


def require_ray() -> Any:
    """The `ray` module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError(
            f"several workers need Ray, which is not installed ({error})",
            hint="pip install 'paceline[ray]', or one worker",
        ) from error


@contextlib.contextmanager
def _cluster(ray: Any, settings: FanOutSettings) -> Iterator[None]:
    """A small quiet cluster on this machine, unless there is one."""
    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):  # where Ray tells of workers that die; stdout is for data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # hints about future defaults, none of which matters here
            ray.init(
                address="local",
                num_cpus=settings.num_workers,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
            )
        try:
            yield
        finally:
            ray.shutdown()


def _require_gpus(ray: Any, settings: FanOutSettings) -> None:
    """Actors that wait for a GPU that is not there wait for ever."""
    wanted = settings.num_workers * settings.num_gpus_per_worker
    there = float(ray.cluster_resources().get("GPU", 0.0)) if wanted else 0.0
    if wanted > there:
        raise ConfigError(
            f"{settings.num_workers} workers need {wanted:g} GPUs; there are {there:g}",
            hint=f"--workers {max(1, int(there / settings.num_gpus_per_worker))}",
        )


class _Failure:
    """An error of ours on its way between processes; not every exception survives pickling."""

    def __init__(self, error: PacelineError) -> None:
        self.kind, self.message, self.origin, self.hint = type(error), error.message, error.origin, error.hint

    def restored(self) -> PacelineError:
        error = self.kind.__new__(self.kind)
        PacelineError.__init__(error, self.message, origin=self.origin, hint=self.hint)
        return error


class _Worker:
    """The actor. It loads with its first shard, so that an error of loading comes back as one."""

    def __init__(self, job: ShardJob, num_threads: int) -> None:
        self._job, self._num_threads = job, num_threads
        self._write: Callable[[int], object] | None = None

    def write(self, index: int) -> _Failure | None:
        """Write one shard."""
        try:
            if self._write is None:
                import torch

                torch.set_num_threads(self._num_threads)
                self._write = self._job.open()
            self._write(index)
        except PacelineError as error:
            return _Failure(error)
        return None


class _Crew:
    """The actors, and who of them has which shards."""

    def __init__(self, ray: Any, job: ShardJob, settings: FanOutSettings) -> None:
        self._ray, self._job, self._settings = ray, job, settings
        self._actor = ray.remote(num_cpus=1, num_gpus=settings.num_gpus_per_worker, max_restarts=0)(_Worker)
        self._workers: dict[int, Any] = {number: self._hire() for number in range(settings.num_workers)}
        self._given: dict[Any, tuple[int, int]] = {}  # reference: worker's number, shard
        self._deaths: Counter[int] = Counter()

    def work(self, waiting: deque[int], on_done: Callable[[int], None] | None) -> None:
        """Until nothing waits and nothing is in flight."""
        while waiting or self._given:
            self._give_out(waiting)
            ready, _ = self._ray.wait(list(self._given), num_returns=1, timeout=self._settings.timeout_s)
            if not ready:
                raise CapacityError(
                    f"no worker finished a shard within {self._settings.timeout_s:g} s; in flight: "
                    f"{sorted(shard for _, shard in self._given.values())}",
                    hint="the same command once more goes on from there",
                )
            number, shard = self._given[ready[0]]
            try:
                failure = self._ray.get(ready[0])
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.OutOfMemoryError):
                self._replace(number, waiting)
                continue
            del self._given[ready[0]]
            if failure is not None:
                raise failure.restored()
            if on_done is not None:
                on_done(shard)

    def dismiss(self) -> None:
        """End the processes."""
        for worker in self._workers.values():
            self._ray.kill(worker)

    def _hire(self) -> Any:
        return self._actor.remote(self._job, self._settings.num_threads)

    def _give_out(self, waiting: deque[int]) -> None:
        """Fill every worker up, evenly."""
        load = Counter({number: 0 for number in self._workers})
        load.update(number for number, _ in self._given.values())
        while waiting and (number := min(load, key=lambda one: load[one])) is not None:
            if load[number] >= self._settings.tasks_per_worker:
                return
            shard = waiting.popleft()
            self._given[self._workers[number].write.remote(shard)] = (number, shard)
            load[number] += 1

    def _replace(self, number: int, waiting: deque[int]) -> None:
        """A process died: its shards wait again, before all others, and a new one takes its place."""
        lost = {reference: shard for reference, (worker, shard) in self._given.items() if worker == number}
        for reference in lost:
            del self._given[reference]
        shards = list(lost.values())  # in the order of giving: the first is the one that it was at
        waiting.extendleft(reversed(shards))
        self._deaths[shards[0]] += 1
        if self._deaths[shards[0]] >= self._settings.max_attempts:
            raise CapacityError(
                f"a worker process ended {self._deaths[shards[0]]} times while it wrote shard {shards[0]}",
                hint="fewer workers, if memory ran out; what is written stays, and the same command goes on",
            )
        _log.warning("a worker process ended; shards %s are given to another", shards)
        self._workers[number] = self._hire()
