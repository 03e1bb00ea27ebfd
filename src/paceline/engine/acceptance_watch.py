"""A drafter that earns nothing should not go unnoticed: the text is right, and only the speed tells."""

from __future__ import annotations

import logging

WINDOW = 200
LOW_LENGTH = 1.2
NO_LENGTH = 1.05

_log = logging.getLogger(__name__)


class AcceptanceWatch:
    """Says once when the acceptance length of 200 blocks in a row is low, and once more when it is next to nothing."""

    def __init__(self) -> None:
        self._num_blocks = self._num_accepted = 0
        self._has_said_low = self._has_said_none = False

    def observe(self, num_judged: int, num_accepted: int) -> None:
        """Take in one block; those without drafts don't count."""
        if num_judged == 0:
            return
        self._num_blocks += 1
        self._num_accepted += num_accepted
        if self._num_blocks < WINDOW:
            return
        length = 1 + self._num_accepted / self._num_blocks
        self._num_blocks = self._num_accepted = 0
        if length < NO_LENGTH and not self._has_said_none:
            self._has_said_none = self._has_said_low = True
            _log.error(
                "the last %d blocks had an acceptance length of %.2f: next to no draft is kept. The text is right, but "
                "drafting only costs time; the drafter may belong to another target, or not fit this text (said once)",
                WINDOW,
                length,
            )
        elif length < LOW_LENGTH and not self._has_said_low:
            self._has_said_low = True
            _log.warning(
                "the last %d blocks had an acceptance length of %.2f, where drafting hardly pays; draft_length="
                "'adaptive' stops where it does not (said once)",
                WINDOW,
                length,
            )
