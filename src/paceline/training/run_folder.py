"""The folder of a run: one process at a time trains into it, and it says what was asked of whom with which versions."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.checkpoint.weights import disk_full_as_capacity_error, write_text_atomic
from paceline.configuration.load import to_toml
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError
from paceline.training.provenance import versions
from paceline.training.resume import latest_checkpoint, remove_unfinished

_log = logging.getLogger(__name__)


def checkpoint_to_start_from(output: Path, *, resume: bool) -> Path | None:
    """The checkpoint that a run goes on from, or None for a fresh one.

    Raises:
        ConfigError: there is nothing to resume, or something that a fresh run would bury.
    """
    checkpoints = output / "checkpoints"
    latest = latest_checkpoint(checkpoints)
    if resume and latest is None:
        raise ConfigError(f"nothing to resume: no checkpoint in {checkpoints}", hint="start without --resume")
    if not resume and latest is not None:
        raise ConfigError(
            f"{output} already holds a run, saved at {latest.name}",
            hint="--resume to continue it, or another output folder",
        )
    return latest


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep other processes from training into a folder, which is made if need be.

    The lock is the operating system's, on the folder itself: it ends with the process, however that ends, and a process
    that is refused leaves no trace.

    Raises:
        ConfigError: another process has it.
        CapacityError: the disk is full.
    """
    with disk_full_as_capacity_error(output):
        output.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{output} is being trained into by another process",
                hint="waiting for it, stopping it, or another output folder",
            ) from error
        except OSError as error:  # some network file systems
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP):
                raise
            _log.warning("%s: this file system cannot lock a folder; nothing keeps a second process out", output)
        yield
    finally:
        os.close(descriptor)


def prepare_folder(run: TrainRun, command: Sequence[str]) -> None:
    """Write settings, command and versions, and clear away what a killed process left.

    Args:
        run: its settings, resolved.
        command: of this process; a resumed run adds a line.
    Raises:
        CapacityError: the disk is full.
    """
    output = run.output
    _clear_away(output)
    write_text_atomic(output / "config.toml", to_toml(run))
    commands = output / "command.txt"
    earlier = commands.read_text(encoding="utf-8") if commands.is_file() else ""
    write_text_atomic(commands, f"{earlier}{shlex.join(command)}\n")
    write_text_atomic(output / "versions.json", json.dumps(versions(), indent=2) + "\n")


def _clear_away(output: Path) -> None:
    """Remove files and folders of writes that a killed process did not finish."""
    remove_unfinished(output / "checkpoints")
    for folder in (output, output / "exports"):
        for replaced in _ours(folder, "old"):
            if not replaced.is_dir():
                continue
            name, _, _ = replaced.name.rpartition(".old-")
            if (folder / name).exists():
                shutil.rmtree(replaced)
            else:  # it was moved aside for one that never came
                replaced.rename(folder / name)
        for unfinished in _ours(folder, "tmp"):
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            else:
                unfinished.unlink(missing_ok=True)


def _ours(folder: Path, mark: str) -> list[Path]:
    """Entries whose names end in the mark of an unfinished write; other people's names rarely look like that."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return [path for path in entries if re.fullmatch(rf".+\.{mark}-[0-9a-f]{{8}}", path.name)]
