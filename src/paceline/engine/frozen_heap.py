"""What was loaded, kept out of garbage collections while an engine serves.

Modules, models and compiled kernels are some hundred thousand objects that live as long as the engine. A full
collection walks all of them, between two tokens of everybody, and finds nothing. Frozen they are not walked.

The price: what is frozen and in a cycle is not collected before an engine ends, so this is for processes that live
with their engines and stop them (`AsyncEngine(freezes_heap=True)`).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# The heap is the process's, and so is the number of those who want it frozen.
_lock = threading.Lock()
_num_holders = 0
_num_frozen: int | None = None  # by us; None where the process has frozen its heap by itself


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Freeze what is alive; at the end it is thawed, and frozen anew for those who still want it.

    Where the process freezes its heap by itself, before or meanwhile, it stays as the process left it.
    """
    global _num_holders, _num_frozen
    gc.collect()  # what is garbage already would be kept
    with _lock:
        if _num_holders == 0:
            _num_frozen = None if gc.get_freeze_count() else _freeze()
        _num_holders += 1
    try:
        yield
    finally:
        with _lock:
            _num_holders -= 1
            if _num_frozen is not None and gc.get_freeze_count() > _num_frozen:
                _num_frozen = None  # somebody else has frozen more
            is_ours = _num_frozen is not None
            if is_ours:
                gc.unfreeze()
                _num_frozen = 0 if _num_holders else None
        if is_ours:
            gc.collect()  # never under the lock: what is collected may be an engine, which ends here, too
            with _lock:
                if _num_holders and _num_frozen is not None:
                    _num_frozen = _freeze()


def _freeze() -> int:
    gc.freeze()
    return gc.get_freeze_count()
