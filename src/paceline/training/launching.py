"""Joining the other processes of a run that torchrun started. Its variables are read by torch itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from paceline.configuration.run import DistributedSettings
from paceline.distributed.process_group import is_about_others, is_launched, joined, own_device
from paceline.errors import PacelineError
from paceline.models.loading import resolve_device
from paceline.training.ranks import Ranks


class LostRankError(PacelineError):
    """A process that shared the run is gone; the run goes on from its newest checkpoint when it is started again."""


@contextlib.contextmanager
def join_ranks(device: str, settings: DistributedSettings) -> Iterator[Ranks]:
    """Be one of the processes that torchrun started, or the only one.

    Args:
        device: "auto", "cpu" or "cuda"; "cuda:1" for a process alone.
        settings: how long to wait for the others.
    Raises:
        ConfigError: there is no GPU for this process.
        LostRankError: another process is gone, or did not answer in time.
    """
    if not is_launched():
        yield Ranks.alone(resolve_device(device))
        return
    own = own_device(device)
    try:
        with joined(own, timeout_s=settings.timeout_s):
            yield Ranks(dist.get_rank(), dist.get_world_size(), own)
    except RuntimeError as error:
        if not is_about_others(error):
            raise
        raise LostRankError(
            f"another process of this run is gone, or silent for {settings.timeout_s} s: {str(error).splitlines()[0]}",
            hint="--resume goes on from the newest checkpoint; distributed.timeout_s, if the others are just slow",
        ) from error
