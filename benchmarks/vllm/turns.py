"""Measuring on a machine that several processes share: start together, then one at a time.

Whoever measures first waits until the start of all others is over, as compiling and capturing disturb any timing, and
then holds a lock while it measures. All of it is files in one folder; the standard library has to do.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOCK = "turn.lock"
_PAUSE_S = 0.2


def say_ready(folder: Path, name: str) -> None:
    """The start of `name` is over."""
    (folder / f"{name}.ready").touch()


def say_failed(folder: Path, name: str) -> None:
    """`name` will not measure; nobody need wait for it."""
    (folder / f"{name}.failed").touch()


def still_starting(folder: Path, names: Sequence[str]) -> list[str]:
    """Names of those that have said neither."""
    return [name for name in names if not any((folder / f"{name}.{end}").exists() for end in ("ready", "failed"))]


def wait_for_all(
    folder: Path,
    names: Sequence[str],
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Wait until the start of all is over.

    Args:
        folder: where they say so.
        names: of all.
        timeout_s: after which they are no longer waited for.
        clock: in seconds.
        pause: sleeps.

    Returns:
        Names of those that are still starting, which may disturb what follows.
    """
    began_s = clock()
    while starting := still_starting(folder, names):
        if clock() - began_s > timeout_s:
            return starting
        pause(_PAUSE_S)
    return []


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Hold the machine: nobody else who asks measures meanwhile. It is given back even if the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
