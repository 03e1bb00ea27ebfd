"""Test work in processes of its own: ranks of a process group on the CPU, and processes that are killed.

Processes are forked from a server that has torch loaded already, so that each costs a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.training.ranks import Ranks

_CONTEXT = multiprocessing.get_context("forkserver")
# What a run imports on its way is loaded beforehand, too.
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "numpy.random",
        "safetensors.torch",
        "tests.unit.training.shared_steps",
        "tests.unit.training.killed_runs",
    ]
)


@dataclass(frozen=True)
class Ended:
    """How a rank ended: `value` is what its work returned, `error` what it raised."""

    exit_code: int | None
    value: Any = None
    error: str = ""


def start(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Run a module's function in another process."""
    process = _CONTEXT.Process(target=work, args=arguments)
    process.start()
    return process


def run_ranks(
    work: Callable[..., object],
    folder: Path,
    *arguments: object,
    size: int = 2,
    timeout_s: float = 30.0,
    on_start: Callable[[Sequence[BaseProcess]], None] | None = None,
) -> list[Ended]:
    """Run a module's function on every rank of a gloo group; it gets `Ranks` and the arguments.

    Args:
        work: what every rank does.
        folder: for the meeting point and the results; used once.
        arguments: of every rank.
        size: number of ranks.
        timeout_s: after which a rank gives up on the others.
        on_start: may signal the processes.
    """
    folder.mkdir(parents=True)
    processes = [start(_on_rank, folder, rank, size, timeout_s, work, arguments) for rank in range(size)]
    try:
        if on_start is not None:
            on_start(processes)
        for process in processes:
            process.join(60)
        return [_ended(process, folder / f"result-{rank}") for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def values(ended: Sequence[Ended]) -> list[Any]:
    """What every rank returned; none may have failed."""
    assert not [end.error for end in ended if end.error], "\n".join(end.error for end in ended)
    assert [end.exit_code for end in ended] == [0] * len(ended)
    return [end.value for end in ended]


def _ended(process: BaseProcess, result: Path) -> Ended:
    if not result.is_file():
        return Ended(process.exitcode)
    value, error = pickle.loads(result.read_bytes())
    return Ended(process.exitcode, value, error)


def _on_rank(
    folder: Path, rank: int, size: int, timeout_s: float, work: Callable[..., object], arguments: Sequence[object]
) -> None:
    torch.set_num_threads(1)
    value, error = None, ""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meet'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = work(Ranks(rank, size, torch.device("cpu")), *arguments)
        dist.destroy_process_group()
    except Exception:
        error = traceback.format_exc()
    (folder / f"result-{rank}").write_bytes(pickle.dumps((value, error)))
