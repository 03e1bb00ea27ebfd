"""Rows of metrics as a file that tensorboard reads; only the package's message classes are used, never tensorflow.

A record is its length (8 bytes, little endian), a checksum of these, the message, a checksum of it; both checksums have
four bytes.
"""

from __future__ import annotations

import importlib.util
import io
import math
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.checkpoint.weights import replacing, sync_to_disk
from paceline.errors import MissingExtraError
from paceline.training.appending import append_whole

_NAME = "events.out.tfevents.paceline"  # tensorboard takes every file with tfevents in its name
_NO_SCALARS = ("kind", "step")


def require_tensorboard() -> None:
    """Fail before anything is loaded or written.

    Raises:
        MissingExtraError: the package is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError(
            "tracking.tensorboard needs the package tensorboard, which is not installed",
            hint='`pip install "paceline[train]"`, or tracking.tensorboard=false: metrics.jsonl holds the same numbers',
        )


def scalars(row: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a row by tag: nested names are joined by a slash, entries of a list are numbered from 1."""
    return dict(_flat(str(row.get("kind", "row")), {k: v for k, v in row.items() if k not in _NO_SCALARS}))


def _flat(tag: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(f"{tag}/{name}", part)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value, start=1):
            yield from _flat(f"{tag}/{number}", part)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield tag, float(value)


class EventFile:
    """One event file in a folder of its own, written row by row.

    Args:
        folder: made if it does not exist.
        resume_step: keep only events up to this step of an earlier attempt; None starts afresh.
    Raises:
        MissingExtraError: tensorboard is not installed.
        CapacityError: the disk is full.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        require_tensorboard()
        from tensorboard.compat.proto.event_pb2 import Event

        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _NAME
        kept = [] if resume_step is None else _messages_up_to(self._path, resume_step)
        if not kept:
            kept = [Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()]
        with replacing(self._path) as temporary:
            temporary.write_bytes(b"".join(_record(message) for message in kept))

    def append(self, row: Mapping[str, object]) -> None:
        """Write the numbers of a row at its step.

        Raises:
            CapacityError: the disk is full.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        event = Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values))
        append_whole(self._path, _record(event.SerializeToString()))

    def close(self) -> None:
        """Have the events on the disk itself."""
        sync_to_disk(self._path)


def _record(message: bytes) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(message)
    return buffer.getvalue()


def _messages_up_to(path: Path, step: int) -> list[bytes]:
    """Whole messages of an earlier attempt; a torn end is left out."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    if not path.is_file():
        return []
    data, at, kept = path.read_bytes(), 0, []
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length + 4
        if end > len(data):
            break
        message = data[at + 12 : end - 4]
        try:
            if Event.FromString(message).step <= step:
                kept.append(message)
        except DecodeError:  # damaged, and so is what follows; metrics.jsonl has the same numbers
            break
        at = end
    return kept
