"""Recordings of work that several processes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.engine.recordings import Record, Recording
from paceline.errors import EngineFaultError


def recorded_everywhere(record: Record, all_did: Callable[[bool], bool]) -> Record:
    """Recordings that exist in all processes or in none.

    Work that is shared holds collectives, and one that is played back in one process and launched in another is no
    collective: whoever plays back waits for playbacks.

    Args:
        record: makes this process's.
        all_did: whether it worked in all processes; a collective call that every one of them makes.
    """

    def make(body: Callable[[], Any]) -> Recording:
        recording, failure = None, None
        try:
            recording = record(body)
        except Exception as error:  # whatever it is, the others have to know
            failure = error
        if all_did(recording is not None) and recording is not None:
            return recording
        raise failure or EngineFaultError("another process could not record it")

    return make
