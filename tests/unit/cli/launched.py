"""paceline as torchrun starts it: in a process that a test gives work to, and under torchrun itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.unit.training.shared_runs import after_step, nothing


def launched(rank: int, port: int, folder: Path, arguments: Sequence[str], dies_at: int | None) -> None:
    """One of two processes; what it says goes to files named after its rank.

    Args:
        rank: of this process.
        port: where the processes meet.
        folder: for the files.
        arguments: of the command line.
        dies_at: a step at which this rank kills itself.
    """
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        stream.flush()
        os.dup2(file, stream.fileno())
    from paceline.cli.main import main

    def act(count: int) -> None:
        if count == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with after_step(nothing if dies_at is None else act):
        main(arguments)


def under_torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Two processes that tell which threads are left when they leave; see `threads_at_exit.py`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["tests.unit.cli.threads_at_exit", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
