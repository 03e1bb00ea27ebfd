"""The processes of a run that torchrun started, and what they must agree on before any of them loads a weight.

A rank that goes on alone leaves the others waiting for it. So whatever may fail at set-up runs on every rank, all learn
who failed, and all leave with an error of their own. Variables of torchrun are read by torch itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from paceline.distributed.process_group import is_about_others, is_launched, joined, own_device
from paceline.errors import EXIT_FAILED, CompatibilityError, PacelineError
from paceline.models.loading import resolve_device

T = TypeVar("T")


class LostRankError(PacelineError):
    """A process that shared the run is gone, or silent for too long."""


class OtherRankFailedError(PacelineError):
    """Another rank failed; it says how, and this one leaves with the same exit code."""

    def __init__(self, rank: int, exit_code: int, told: str) -> None:
        super().__init__(f"rank {rank} failed: {told}")
        self.exit_code = exit_code


class DisagreementError(CompatibilityError):
    """The ranks were not started alike; every one of them says so."""


@dataclass(frozen=True)
class World:
    """This process among all of its run.

    Attributes:
        rank: from 0.
        size: number of processes; with 1, nothing here communicates.
        device: where this process computes.
    """

    rank: int
    size: int
    device: torch.device

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return cast(list[T], values)

    def given_by(self, rank: int, value: T | None) -> T:
        """What one rank has, on every rank; the others' values are not looked at."""
        if self.size == 1:
            return cast(T, value)
        box = [value]
        dist.broadcast_object_list(box, src=rank)
        return cast(T, box[0])

    def together(self, act: Callable[[], T]) -> T:
        """Run what may fail, on every rank; a failure anywhere is one everywhere.

        Args:
            act: talks to no other rank.
        Raises:
            OtherRankFailedError: this rank did not fail, or of nothing else than an earlier one. Those that did raise
                their own errors.
        """
        failure: Exception | None = None
        result: list[T] = []
        try:
            result.append(act())
        except Exception as error:
            failure = error
        told = None if failure is None else (getattr(failure, "exit_code", EXIT_FAILED), str(failure))
        failures = [(rank, one) for rank, one in enumerate(self.gathered(told)) if one is not None]
        if not failures:
            return result[0]
        rank, (exit_code, message) = failures[0]
        if failure is not None and (rank == self.rank or str(failure) != message):
            raise failure
        raise OtherRankFailedError(rank, exit_code, message)

    def agree(self, make_facts: Callable[[], Mapping[str, str]]) -> None:
        """Refuse to go on unless every rank was started with the same; a collective call.

        Args:
            make_facts: what must be alike, by the name that an error gives it; may fail, as in `together`.
        Raises:
            DisagreementError: on every rank; names what differs, and who has what.
        """
        everyone = self.gathered(dict(self.together(make_facts)))
        names = list(dict.fromkeys(name for facts in everyone for name in facts))
        lines = [
            f"{name}: {_who_has([facts.get(name, 'nothing') for facts in everyone])}"
            for name in names
            if len({facts.get(name) for facts in everyone}) > 1
        ]
        if lines:
            raise DisagreementError(
                f"the {self.size} processes were not started alike; they disagree on " + "; ".join(lines),
                hint="the same files and the same arguments on every machine",
            )


def _who_has(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' if len(held) > 1 else ''} {' '.join(map(str, held))}" for value, held in ranks.items()
    )


@contextlib.contextmanager
def join_world(device: str = "auto", *, timeout_s: int = 600) -> Iterator[World]:
    """Be one of the processes that torchrun started, or the only one.

    Args:
        device: "auto", "cpu" or "cuda"; "cuda:1" for a process alone.
        timeout_s: how long to wait for the others.
    Raises:
        ConfigError: there is no GPU for this process.
        LostRankError: another process is gone, or did not answer in time.
    """
    if not is_launched():
        yield World(0, 1, resolve_device(device))
        return
    own = own_device(device)
    try:
        with joined(own, timeout_s=timeout_s):
            yield World(dist.get_rank(), dist.get_world_size(), own)
    except RuntimeError as error:
        if not is_about_others(error):
            raise
        raise LostRankError(
            f"another process of this run is gone, or silent for {timeout_s} s: {str(error).splitlines()[0]}",
            hint="its own message says how; a longer timeout, if it is just slow",
        ) from error
