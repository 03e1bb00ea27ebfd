"""Adding to a file so that what is there is whole, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from paceline.checkpoint.weights import disk_full_as_capacity_error


def append_whole(path: Path, data: bytes) -> None:
    """Add bytes to the end of a file, all or none; they are on their way to disk when this returns.

    Args:
        path: made if it does not exist.
        data: one record.
    Raises:
        CapacityError: the disk is full; the file is as it was.
    """
    with disk_full_as_capacity_error(path), path.open("ab", buffering=0) as file:
        whole = file.tell()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            with contextlib.suppress(OSError):  # a device cannot be cut back
                file.truncate(whole)
            raise
