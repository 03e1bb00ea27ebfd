"""How many drafts the next block gets: the three modes, and the rule behind "adaptive".

What decides the draft length must not look at the drafts it decides about (`draft_budget.py` says why). The rule here
looks at the past alone: at how often drafts were kept in finished steps, and at what a step costs. It is asked before
the drafts are drawn.

With c_i the chance that draft i is kept if those before it are, n drafts give tau(n) = 1 + c_0 + c_0 c_1 + ... tokens
per request, and n is the number with the largest tau(n) / cost(requests, n), from 0 to K. At 0 nothing is drafted, and
now and then a probe finds out whether it would pay again. Where several probes in a row did not, not even the context
is worth its time: running requests go on without, and from time to time a new one is drafted for again.
"""

from __future__ import annotations

import itertools
import math
from typing import Final, Literal, Protocol, get_args

from paceline.engine.draft_budget import expected_acceptance
from paceline.errors import RequestError, shown

DraftLengthMode = Literal["off", "fixed", "adaptive"]
DRAFT_LENGTH_MODES: Final[tuple[DraftLengthMode, ...]] = get_args(DraftLengthMode)

_PRIOR_WEIGHT = 2.0
_MEMORY = 0.98  # weight that an observation keeps when the next comes in: the last 50 count
_PROBE_MEMORY = 0.7  # probes are rare, and the last few have to be enough to come back
_PROBE_SHARE = 0.02  # of the time, at most, goes into probing
_MIN_PROBE_INTERVAL = 16
_MAX_BACKOFF = 4
_PROBES_TO_GIVE_UP = 3


def checked_draft_length(value: object) -> DraftLengthMode:
    """Return `value` if it names a mode.

    Raises:
        RequestError: it does not.
    """
    if value not in DRAFT_LENGTH_MODES:
        known = ", ".join(repr(mode) for mode in DRAFT_LENGTH_MODES)
        raise RequestError(f"draft_length has to be one of {known}, got {shown(value)}")
    return value


class Costs(Protocol):
    """What `StepCosts` knows."""

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        """A step that verifies and draws that many drafts per request."""
        ...

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        """The part of it that can still be saved once the drafts are there."""
        ...


class AcceptanceRates:
    """Chances that each draft is kept if those before it are, from recent blocks.

    The first position starts from certainty, which fades like any observation. Each other one leans on the position
    before it, and old blocks fade whether or not new ones reach as far: positions that are not drafted any more don't
    hold on to what they once were.

    Args:
        num_draft_tokens: K.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._judged = [_PRIOR_WEIGHT] + [0.0] * (num_draft_tokens - 1)
        self._kept = list(self._judged)

    def observe(self, num_judged: int, num_accepted: int, memory: float = _MEMORY) -> None:
        """Take in one block: its kept drafts and, if one was refused, the first of these."""
        for position in range(len(self._judged)):
            self._judged[position] *= memory
            self._kept[position] *= memory
        for position in range(min(num_judged, num_accepted + 1)):
            self._judged[position] += 1
            self._kept[position] += position < num_accepted

    def rates(self) -> list[float]:
        """One per position."""
        rates = [self._kept[0] / self._judged[0]]
        for judged, kept in zip(self._judged[1:], self._kept[1:], strict=True):
            rates.append((kept + _PRIOR_WEIGHT * rates[-1]) / (judged + _PRIOR_WEIGHT))
        return rates


class DraftLengthController:
    """Chooses the number of drafts for the requests in "adaptive" mode.

    Args:
        num_draft_tokens: K.
        costs: measured.

    Attributes:
        num_drafts: the last choice, probes aside.
        num_switched_off: how often drafting stopped paying.
        num_probes: blocks drafted to find out whether it pays again.
    """

    def __init__(self, num_draft_tokens: int, costs: Costs) -> None:
        self._num_draft_tokens, self._costs = num_draft_tokens, costs
        self._rates = AcceptanceRates(num_draft_tokens)
        self._num_requests = 1
        self._backoff = 1
        self._steps_to_probe = 0
        self._num_unpaid = 0  # probes since one paid
        self.num_drafts = num_draft_tokens
        self.num_switched_off = 0
        self.num_probes = 0

    @property
    def has_given_up(self) -> bool:
        """Whether running requests may lose their context; a step for them is then a plain one."""
        return self._num_unpaid >= _PROBES_TO_GIVE_UP

    @property
    def wants_another_request(self) -> bool:
        """Whether a new request should be drafted for; always, unless it was given up and the next probe is not due."""
        return not self.has_given_up or self._steps_to_probe <= 1

    def skip_step(self) -> None:
        """Count a step in which nobody could be drafted for."""
        self._steps_to_probe -= 1

    def next_num_drafts(self, num_requests: int) -> int:
        """Drafts per request for the next block of a step with that many requests; call it once per block."""
        self._num_requests = num_requests
        was_off = self.num_drafts == 0
        self.num_drafts = self._best(num_requests)
        if self.num_drafts > 0:
            self._backoff, self._num_unpaid = 1, 0
            return self.num_drafts
        if not was_off:
            self.num_switched_off += 1
            self._steps_to_probe = self._probe_interval()
        self._steps_to_probe -= 1
        if self._steps_to_probe > 0:
            return 0
        self.num_probes += 1
        self._num_unpaid += 1
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
        self._steps_to_probe = self._backoff * self._probe_interval()
        return self._num_draft_tokens

    def observe(self, num_judged: int, num_accepted: int) -> None:
        """Take in one block of one request.

        Args:
            num_judged: drafts drawn for it. Those that were held back (`thresholds`) are among them and count as
                refused: the question is what drawing this many gives.
            num_accepted: of them, kept.
        """
        if num_judged == 0:
            return
        self._rates.observe(num_judged, num_accepted, _PROBE_MEMORY if self.num_drafts == 0 else _MEMORY)
        if self.num_drafts == 0 and 1 + num_accepted > self._cost_ratio():
            self._backoff, self._steps_to_probe, self._num_unpaid = 1, 0, 0  # that one paid, so the next may

    def thresholds(self, num_requests: int, num_drafts: int) -> list[float]:
        """The survival from which on each of the drawn drafts is worth verifying.

        One more row costs some ms, in which a step makes so many tokens per request at its usual pace; below that, the
        row is better left out. The pace is that of the past.

        Args:
            num_requests: of the step that verifies.
            num_drafts: drawn per request.
        Returns:
            One per draft, for `usable_prefix`.
        """
        pace = (1 + expected_acceptance(self._rates.rates()[:num_drafts])) / self._costs.step_ms(
            num_requests, num_drafts
        )
        costs_ms = [self._costs.verify_ms(num_requests, count) for count in range(num_drafts + 1)]
        return [min(1.0, pace * (more - less)) for less, more in itertools.pairwise(costs_ms)]

    def _best(self, num_requests: int) -> int:
        rates = self._rates.rates()
        paces = [
            (1 + expected_acceptance(rates[:count])) / self._costs.step_ms(num_requests, count)
            for count in range(self._num_draft_tokens + 1)
        ]
        return paces.index(max(paces))

    def _cost_ratio(self) -> float:
        """What a step with all drafts costs, in plain steps."""
        costs = self._costs
        return costs.step_ms(self._num_requests, self._num_draft_tokens) / costs.step_ms(self._num_requests, 0)

    def _probe_interval(self) -> int:
        return max(_MIN_PROBE_INTERVAL, math.ceil((self._cost_ratio() - 1) / _PROBE_SHARE))
