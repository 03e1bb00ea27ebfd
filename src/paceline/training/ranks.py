"""The processes of one run, and what they tell each other. A run in a single process asks nobody.

Whatever decides how a run goes on (a stop, a failure, a step that is not finite) is decided by all ranks together:
one that turns off alone leaves the others waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import EXIT_FAILED, ConfigError, PacelineError

T = TypeVar("T")


class OtherRankFailedError(PacelineError):
    """Another rank failed; it says how, and this one leaves with the same exit code."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} failed; its own message says how")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run.

    Attributes:
        rank: index of this process, from 0.
        size: number of processes; with 1, nothing here communicates.
        device: where this process computes.
    """

    rank: int
    size: int
    device: torch.device

    @staticmethod
    def alone(device: torch.device) -> Ranks:
        """The only process of a run."""
        return Ranks(0, 1, device)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on every rank the same bits; any device and dtype."""
        if self.size == 1:
            return tensor
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        return bool(self.total(torch.tensor(int(flag)))) if self.size > 1 else flag

    def wait(self) -> None:
        """Go on when every rank has come here."""
        self.any(False)

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return cast(list[T], values)

    def together(self, act: Callable[[], T]) -> T:
        """Run what may fail, on every rank; a failure anywhere is one everywhere.

        Args:
            act: talks to no other rank.
        Raises:
            OtherRankFailedError: this rank did not fail, or not as the first. The first raises its own error.
        """
        if self.size == 1:
            return act()
        failure: Exception | None = None
        result: list[T] = []
        try:
            result.append(act())
        except Exception as error:
            failure = error
        codes = self.gathered(0 if failure is None else getattr(failure, "exit_code", EXIT_FAILED))
        first = next((rank for rank, code in enumerate(codes) if code), None)
        if first is None:
            return result[0]
        if failure is not None and first == self.rank:
            raise failure
        raise OtherRankFailedError(first, codes[first])

    def first_only(self, act: Callable[[], T]) -> T:
        """Run something on the first rank alone and give its result to all.

        Args:
            act: talks to no other rank; its result can be pickled.
        Raises:
            OtherRankFailedError: on the other ranks, where the first one raises its own error.
        """
        if self.size == 1:
            return act()
        box = [self.together(lambda: act() if self.is_first else None)]
        dist.broadcast_object_list(box, src=0)
        return cast(T, box[0])

    def rows(self, num_rows: int) -> slice:
        """Which rows of a batch are this rank's.

        Args:
            num_rows: of the whole batch, a multiple of the number of ranks.
        """
        share = num_rows // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def require_even(self, batch_size: int) -> None:
        """Refuse a batch that cannot be shared out evenly.

        Raises:
            ConfigError: says which sizes would do.
        """
        if batch_size % self.size:
            below = batch_size - batch_size % self.size
            sizes = [str(size) for size in (below, below + self.size) if size]
            raise ConfigError(
                f"schedule.batch_size {batch_size} cannot be shared evenly among {self.size} processes",
                origin={"processes": "torchrun"},
                hint=f"schedule.batch_size={' or '.join(sizes)}",
            )
