"""The process group of a run that torchrun started: how a process joins it, and how it ends. Training uses it, too.

A group that something still refers to outlives its `destroy`, threads and all. Such a thread may still have a tensor of
the last message to let go of when the interpreter ends; the tensor is a Python object, too, and the process dies of
SIGABRT with its work done. So nothing of ours keeps a group: see the import below, and `TensorGroup.leave`. Torch's
caches of sharded tensors do, and a failed run has nobody to wait for: the command line leaves without the interpreter's
clean-up.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions keep the default group of the moment of this import as a default argument, so it must come before there
# is one. Torch's compiler imports it on the way, at a time of its own.
import torch.distributed.nn.functional

from paceline.errors import ConfigError
from paceline.models.loading import resolve_device


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def own_device(device: str) -> torch.device:
    """The device of a process that torchrun started; each process of a machine takes the GPU of its own number.

    Args:
        device: "auto", "cpu" or "cuda".
    Raises:
        ConfigError: there is no GPU for this process, or the device is one GPU for all of them.
    """
    chosen = resolve_device(device)
    if chosen.type != "cuda":
        return chosen
    if chosen.index is not None:
        raise ConfigError(
            f"device {device} is one GPU; torchrun started processes that take one each",
            hint="the device cuda, and CUDA_VISIBLE_DEVICES to choose among them",
        )
    local_rank = dist.get_node_local_rank()
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}",
            hint=f"torchrun --nproc-per-node {torch.cuda.device_count()}",
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def joined(device: torch.device, *, timeout_s: int) -> Iterator[None]:
    """Be in the group of all processes; what the CPU has to say goes through gloo even where GPUs compute.

    After a failure the group stays: destroying it would wait for a rank that may be gone.

    Args:
        device: of this process.
        timeout_s: how long to wait for the others.
    """
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    yield
    gc.collect()  # models and meshes in circles may refer to groups
    dist.destroy_process_group()


def is_about_others(error: RuntimeError) -> bool:
    """Whether communication failed; gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
