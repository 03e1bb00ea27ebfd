"""The alarm: a drafter that earns nothing should not go unnoticed, since the text is right and only the speed tells.

Two rules, each over the last 200 blocks that it counts:

* `length`: the acceptance length of all blocks is below 1.2, where drafting pays nowhere.
* `first_position`: of greedy blocks, fewer than half as many keep their first draft as where the drafter was
  calibrated. Requests that sample, or have rules on tokens, are left out: they keep fewer drafts without any fault.

An episode begins when a rule trips and ends when 200 further blocks are clearly above its limit. It is logged once as a
fault and once when it is over; `EngineStats.alarm` has the state at any time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 200  # blocks
LOW_LENGTH = 1.2
LOW_SHARE = 0.5  # of the calibrated first-position acceptance
_RECOVERY = 1.1  # an episode ends this much above the limit, so that a value near it is not said again and again

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RuleState:
    """Where one rule stands.

    Attributes:
        is_raised: it has tripped, and has not cleared.
        value: mean of the last 200 blocks that it counts; None before there were as many.
        limit: what the mean must not fall below; None for a rule that never trips.
        num_episodes: how often it has tripped.
        last_raised_s: when it last did, in seconds since the epoch; None if it never has.
    """

    is_raised: bool = False
    value: float | None = None
    limit: float | None = None
    num_episodes: int = 0
    last_raised_s: float | None = None


@dataclass(frozen=True)
class AlarmState:
    """What the alarm says at a moment.

    Attributes:
        length: rule on the acceptance length of all blocks.
        first_position: rule on the share of greedy blocks that kept their first draft; its limit is None where the
            drafter has no calibration.
    """

    length: RuleState = RuleState()
    first_position: RuleState = RuleState()

    @property
    def is_raised(self) -> bool:
        """Whether any rule holds now."""
        return self.length.is_raised or self.first_position.is_raised


class _Rule:
    """A mean over a window, its limit, and whether it is below.

    Args:
        limit: of the mean; None for a rule that never trips.
        offset: of the limit and of the mean, for `_RECOVERY`: an acceptance length of 1 is nothing, not 1.
    """

    def __init__(self, limit: float | None, *, offset: float = 0.0) -> None:
        self.limit, self._offset = limit, offset
        self.is_raised, self.num_episodes = False, 0
        self.last_raised_s: float | None = None
        self._window: deque[int] = deque(maxlen=WINDOW)
        self._total = self._num_fresh = 0

    @property
    def mean(self) -> float | None:
        """Of the last 200; None before there were as many."""
        return self._offset + self._total / WINDOW if len(self._window) == WINDOW else None

    @property
    def state(self) -> RuleState:
        """Where it stands."""
        return RuleState(self.is_raised, self.mean, self.limit, self.num_episodes, self.last_raised_s)

    def observe(self, value: int, now: Callable[[], float]) -> bool:
        """Take in one block; returns whether the rule has tripped or cleared with it."""
        window = self._window
        self._total += value - window[0] if len(window) == WINDOW else value
        window.append(value)
        self._num_fresh += 1
        if self.limit is None or self._num_fresh < WINDOW:  # what was judged before is not judged again
            return False
        mean = self._offset + self._total / WINDOW  # there were as many
        if self.is_raised and mean >= self._offset + (self.limit - self._offset) * _RECOVERY:
            self.is_raised, self._num_fresh = False, 0
            return True
        if not self.is_raised and mean < self.limit:
            self.is_raised, self._num_fresh = True, 0
            self.num_episodes, self.last_raised_s = self.num_episodes + 1, now()
            return True
        return False


class AcceptanceAlarm:
    """Watches what becomes of drafts, block by block.

    Args:
        calibrated_first_position: share of greedy blocks that kept their first draft where the drafter was measured;
            None where nobody did, and only the first rule applies.
        now: seconds since the epoch.
    """

    def __init__(self, calibrated_first_position: float | None = None, *, now: Callable[[], float] = time.time) -> None:
        self._calibrated, self._now = calibrated_first_position, now
        self._length = _Rule(LOW_LENGTH, offset=1.0)
        self._first = _Rule(None if calibrated_first_position is None else LOW_SHARE * calibrated_first_position)

    def observe(self, num_judged: int, num_accepted: int, *, is_plain_greedy: bool) -> None:
        """Take in one block; those without drafts don't count.

        Args:
            num_judged: drafts that were verified.
            num_accepted: of them, kept.
            is_plain_greedy: the request takes the most likely token at every position, and no rule is in the way.
        """
        if num_judged == 0:
            return
        if self._length.observe(num_accepted, self._now):
            self._say_length()
        if is_plain_greedy and self._first.observe(int(num_accepted > 0), self._now):
            self._say_first_position()

    @property
    def state(self) -> AlarmState:
        """What it says now."""
        return AlarmState(length=self._length.state, first_position=self._first.state)

    def _say_length(self) -> None:
        if not self._length.is_raised:
            _log.info("acceptance is back: the last %d blocks had a length of %.2f", WINDOW, self._length.mean)
            return
        _log.error(
            "the last %d blocks had an acceptance length of %.2f, below %.1f, where drafting does not pay. The text is "
            "right; the drafter may belong to another target or not fit this text (`paceline check` compares them, "
            "draft_length='adaptive' stops what does not pay). Said once until it recovers",
            WINDOW,
            self._length.mean,
            LOW_LENGTH,
        )

    def _say_first_position(self) -> None:
        if not self._first.is_raised:
            _log.info("first drafts are kept again: %.3f of the last %d greedy blocks", self._first.mean, WINDOW)
            return
        _log.error(
            "of the last %d greedy blocks %.3f kept their first draft, less than half of the %.3f that the drafter was "
            "calibrated with. The text is right; the drafter's context may be stale or shifted (the canary finds out), "
            "or the text is of another kind. Said once until it recovers",
            WINDOW,
            self._first.mean,
            self._calibrated,
        )
