"""Joining the other processes of a run that torchrun started. Its variables are read by torch itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.configuration.run import DistributedSettings
from paceline.errors import ConfigError, PacelineError
from paceline.models.loading import resolve_device
from paceline.training.ranks import Ranks


class LostRankError(PacelineError):
    """A process that shared the run is gone; the run goes on from its newest checkpoint when it is started again."""


@contextlib.contextmanager
def join_ranks(device: str, settings: DistributedSettings) -> Iterator[Ranks]:
    """Be one of the processes that torchrun started, or the only one.

    Each process of a machine takes the GPU of its own number. What the CPU has to say goes through gloo even then, so
    that a step border does not wait for a GPU.

    Args:
        device: "auto", "cpu" or "cuda"; "cuda:1" for a process alone.
        settings: how long to wait for the others.
    Raises:
        ConfigError: there is no GPU for this process.
        LostRankError: another process is gone, or did not answer in time.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield Ranks.alone(resolve_device(device))
        return
    own = _own_device(device, dist.get_node_local_rank())
    backend = "gloo"
    if own.type == "cuda":
        torch.cuda.set_device(own)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=settings.timeout_s))
        yield Ranks(dist.get_rank(), dist.get_world_size(), own)
        dist.destroy_process_group()  # not after a failure: it would wait for a rank that is gone
    except RuntimeError as error:
        if not _is_about_others(error):
            raise
        raise LostRankError(
            f"another process of this run is gone, or silent for {settings.timeout_s} s: {str(error).splitlines()[0]}",
            hint="--resume goes on from the newest checkpoint; distributed.timeout_s, if the others are just slow",
        ) from error


def _is_about_others(error: RuntimeError) -> bool:
    """Whether communication failed; gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _own_device(device: str, local_rank: int) -> torch.device:
    chosen = resolve_device(device)
    if chosen.type != "cuda":
        return chosen
    if chosen.index is not None:
        raise ConfigError(
            f"device {device} is one GPU; torchrun started processes that take one each",
            hint="device=cuda, and CUDA_VISIBLE_DEVICES to choose among them",
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}",
            hint=f"torchrun --nproc-per-node {torch.cuda.device_count()}",
        )
    return torch.device("cuda", local_rank)
