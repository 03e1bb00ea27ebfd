"""What was loaded, kept out of garbage collections while an engine serves.

Modules, models and compiled kernels are some hundred thousand objects that live as long as the engine. A full
collection walks all of them, between two tokens of everybody, and finds nothing. Frozen they are not walked.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# The heap is the process's, and so is the number of those who want it frozen.
_lock = threading.Lock()
_num_holders = 0
_is_ours = False


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Freeze what is alive, until the last of those who asked for it is done.

    Where the process has frozen its heap by itself, it stays as the process left it.
    """
    global _num_holders, _is_ours
    with _lock:
        if _num_holders == 0:
            _is_ours = gc.get_freeze_count() == 0
            if _is_ours:
                gc.collect()  # what is garbage already would be kept
                gc.freeze()
        _num_holders += 1
    try:
        yield
    finally:
        with _lock:
            _num_holders -= 1
            if _num_holders == 0 and _is_ours:
                gc.unfreeze()
