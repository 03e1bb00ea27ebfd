"""How many drafts the next block gets: the three modes, and the rule behind "adaptive".

What decides the draft length must not look at the drafts it decides about (`draft_budget.py` says why). The rule here
looks at the past alone: at how often drafts were kept in finished steps, and at what a step costs. It is asked before
the drafts are drawn.

With c_i the chance that draft i is kept if those before it are, n drafts give tau(n) = 1 + c_0 + c_0 c_1 + ... tokens
to a request, and n is the number for which all requests of the step get the most tokens per ms, from 0 to K. Chances
are held apart for each kind of text, costs for each kind of step (`step_kind.py`), and 0 drafts cost what an engine
without a drafter pays. At 0 nothing is drafted, and soon a probe finds out whether it would pay again. Where three of
its blocks did not, not even the context is worth its time: running requests go on without, and from time to time a new
one is drafted for again.

Everything is learned by the step, not by the block: what 32 requests say in one step is one observation that is 32
times as sure, and a probe pays if its blocks do on average.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from paceline.engine.kind_costs import CostsByKind
from paceline.engine.step_kind import StepAhead, StepKind, TextKind
from paceline.errors import RequestError, shown

DraftLengthMode = Literal["off", "fixed", "adaptive"]
DRAFT_LENGTH_MODES: Final[tuple[DraftLengthMode, ...]] = get_args(DraftLengthMode)

_PRIOR_WEIGHT = 2.0
_MEMORY = 0.98  # weight that a step keeps when the next comes in: the last 50 count
_PROBE_MEMORY = 0.7  # probes are rare, and the last few have to be enough to come back
_MARGIN = 0.02  # what another length has to gain, or the choice would follow noise from step to step
_PROBE_INTERVAL = 16  # steps, until it is given up or pays again
_PROBE_SHARE = 0.02  # of the time, at most, goes into probing after that
_MOST_STEPS_TO_PROBE = 1000  # times the backoff; a trial step that was disturbed must not end drafting for good
_MAX_BACKOFF = 4
_BLOCKS_TO_GIVE_UP = 3  # that were probes and did not pay: those of one step with many requests, or of three with one


def checked_draft_length(value: object) -> DraftLengthMode:
    """Return `value` if it names a mode.

    Raises:
        RequestError: it does not.
    """
    if value not in DRAFT_LENGTH_MODES:
        known = ", ".join(repr(mode) for mode in DRAFT_LENGTH_MODES)
        raise RequestError(f"draft_length has to be one of {known}, got {shown(value)}")
    return value


class JudgedBlock(NamedTuple):
    """What became of one request's block.

    Attributes:
        text: kind of the request's text.
        num_drawn: drafts drawn for it. Those that were held back (`DraftLengthController.thresholds`) are among them
            and count as refused: the question is what drawing this many gives.
        num_accepted: of them, kept.
    """

    text: TextKind
    num_drawn: int
    num_accepted: int


class BelievedStep(NamedTuple):
    """What a choice is believed to come to.

    Attributes:
        num_drafts: per request.
        step_ms: of the step; with 0 drafts, of one that keeps no context.
        tokens: that it gives each request, on average.
    """

    num_drafts: int
    step_ms: float
    tokens: float


class AcceptanceRates:
    """Chances that each draft is kept if those before it are, from recent steps.

    The first position starts from certainty, which fades like any observation. Each other one leans on the position
    before it, and old steps fade whether or not new ones reach as far: positions that are not drafted any more don't
    hold on to what they once were.

    Args:
        num_draft_tokens: K.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._judged = [_PRIOR_WEIGHT] + [0.0] * (num_draft_tokens - 1)
        self._kept = list(self._judged)

    def observe(self, blocks: Sequence[tuple[int, int]], memory: float = _MEMORY) -> None:
        """Take in the blocks of one step: of each, its kept drafts and, if one was refused, the first of these.

        Args:
            blocks: drafts judged and drafts kept of each.
            memory: weight that what was known before keeps.
        """
        for position in range(len(self._judged)):
            self._judged[position] *= memory
            self._kept[position] *= memory
        for num_judged, num_accepted in blocks:
            for position in range(num_accepted):
                self._judged[position] += 1
                self._kept[position] += 1
            if num_accepted < num_judged:
                self._judged[num_accepted] += 1

    def rates(self) -> list[float]:
        """One per position."""
        rates = [self._kept[0] / self._judged[0]]
        for judged, kept in zip(self._judged[1:], self._kept[1:], strict=True):
            rates.append((kept + _PRIOR_WEIGHT * rates[-1]) / (judged + _PRIOR_WEIGHT))
        return rates


@dataclass
class _Switch:
    """Whether steps of one kind draft, and what their probes said.

    Attributes:
        num_drafts: the last choice, probes aside.
        num_requests: of the last step that was planned.
        backoff: how much longer than usual the next probe is waited for.
        steps_to_probe: how long that still is.
        num_unpaid: blocks of probes since one paid.
        has_probed: whether a block was drawn as a probe since drafting stopped; those judged before were not.
    """

    num_drafts: int
    num_requests: int = 1
    backoff: int = 1
    steps_to_probe: int = 0
    num_unpaid: int = 0
    has_probed: bool = False


class DraftLengthController:
    """Chooses the number of drafts for the requests in "adaptive" mode.

    Args:
        num_draft_tokens: K.
        costs: of steps.

    Attributes:
        costs: as given.
        num_drafts: the last choice, probes aside.
        num_switched_off: how often drafting stopped paying.
        num_probes: blocks drafted to find out whether it pays again.
    """

    def __init__(self, num_draft_tokens: int, costs: CostsByKind) -> None:
        self._num_draft_tokens, self.costs = num_draft_tokens, costs
        self._rates: defaultdict[TextKind, AcceptanceRates] = defaultdict(lambda: AcceptanceRates(num_draft_tokens))
        self._switches: defaultdict[StepKind, _Switch] = defaultdict(lambda: _Switch(num_draft_tokens))
        self.num_drafts = num_draft_tokens
        self.num_switched_off = 0
        self.num_probes = 0

    def has_given_up(self, kind: StepKind) -> bool:
        """Whether running requests may lose their context; a step for them is then a plain one."""
        return self._switches[kind].num_unpaid >= _BLOCKS_TO_GIVE_UP

    def wants_another_request(self, step: StepAhead) -> bool:
        """Whether a new request should be drafted for; always, unless it was given up and the next probe is not due.

        What was given up with many requests may pay with few, or the other way round, and is then given up no more.

        Args:
            step: like those that the request will be in, if all of them adapted.
        """
        switch = self._switches[step.kind]
        if self.has_given_up(step.kind) and self._best(step, 0) > 0:
            switch.backoff, switch.num_unpaid = 1, 0
        return not self.has_given_up(step.kind) or switch.steps_to_probe <= 1

    def skip_step(self, kind: StepKind) -> None:
        """Count a step in which nobody could be drafted for."""
        self._switches[kind].steps_to_probe -= 1

    def is_off(self, kind: StepKind) -> bool:
        """Whether drafting does not pay in such steps, so that what is drafted there is a probe."""
        return self._switches[kind].num_drafts == 0

    def next_num_drafts(self, step: StepAhead) -> int:
        """Drafts per request for the next block; call it once per block.

        Args:
            step: the one that will judge it.
        """
        switch = self._switches[step.kind]
        switch.num_requests = step.num_requests
        was_off = switch.num_drafts == 0
        switch.num_drafts = self.num_drafts = self._best(step, switch.num_drafts)
        if switch.num_drafts > 0:
            switch.backoff, switch.num_unpaid = 1, 0
            return switch.num_drafts
        if not was_off:
            self.num_switched_off += 1
            switch.steps_to_probe, switch.has_probed = _PROBE_INTERVAL, False
        switch.steps_to_probe -= 1
        if switch.steps_to_probe > 0:
            return 0
        self.num_probes += 1
        switch.has_probed, switch.steps_to_probe = True, self._probe_interval(step.kind)
        return self._num_draft_tokens

    def observe(self, kind: StepKind, blocks: Sequence[JudgedBlock]) -> None:
        """Take in what one step judged for requests in "adaptive" mode.

        Args:
            kind: of the step.
            blocks: one per request; those without drafts tell nothing.
        """
        drafted = [block for block in blocks if block.num_drawn > 0]
        if not drafted:
            return
        switch = self._switches[kind]
        is_probe = switch.num_drafts == 0 and switch.has_probed
        for text in {block.text for block in drafted}:
            judged = [(block.num_drawn, block.num_accepted) for block in drafted if block.text == text]
            self._rates[text].observe(judged, _PROBE_MEMORY if is_probe else _MEMORY)
        if is_probe:
            num_accepted, cost_ratio = sum(block.num_accepted for block in drafted), self._cost_ratio(kind)
            if 1 + num_accepted / max(len(drafted), switch.num_requests) > cost_ratio:
                switch.steps_to_probe = 0  # that step paid, so the next may
            if 1 + num_accepted / len(drafted) > cost_ratio:  # it would, were all requests drafted for
                switch.backoff, switch.num_unpaid = 1, 0
                return
            switch.num_unpaid += len(drafted)
            if self.has_given_up(kind):
                switch.steps_to_probe = self._probe_interval(kind)
                switch.backoff = min(2 * switch.backoff, _MAX_BACKOFF)

    def pays_behind_prompts(self, step: StepAhead, newcomers: StepAhead) -> bool:
        """Whether first blocks are worth a pass of their own, right behind their prompts.

        All other requests wait for it. Without it, the first step of these requests gives each of them one token, and
        drafts for them together with everybody else. What the pass takes is what drafts add to a step of the newcomers;
        where steps are one piece, their rows are part of that, and the pass seems dearer than it is.

        Args:
            step: the one that would judge them.
            newcomers: the same, if those whose prompts have just been run were alone in it.
        """
        num_drafts = self._switches[step.kind].num_drafts
        if num_drafts == 0:
            return True  # whatever is drawn now is a probe, and these have a pace of their own
        costs = self.costs.of(step.kind)
        count = newcomers.num_requests
        rows_ms = costs.verify_ms(count, num_drafts) - costs.verify_ms(count, 0)
        pass_ms = costs.step_ms(count, num_drafts) - costs.step_ms(count, 0) - rows_ms
        gained = self.expected_tokens(newcomers)[num_drafts] - count
        pace = self.expected_tokens(step)[num_drafts] / costs.step_ms(step.num_requests, num_drafts)
        return pass_ms * pace <= gained

    def thresholds(self, step: StepAhead, num_drafts: int) -> list[float]:
        """The survival from which on each of the drawn drafts is worth verifying.

        One more row costs some ms, in which a step makes so many tokens per request at its usual pace; below that, the
        row is better left out. The pace is that of the past.

        Args:
            step: that verifies.
            num_drafts: drawn per request.
        Returns:
            One per draft, for `usable_prefix`.
        """
        costs = self.costs.of(step.kind)
        tokens = self.expected_tokens(step)[num_drafts] / step.num_requests
        pace = tokens / costs.step_ms(step.num_requests, num_drafts)
        costs_ms = [costs.verify_ms(step.num_requests, count) for count in range(num_drafts + 1)]
        return [max(0.0, min(1.0, pace * (more - less))) for less, more in itertools.pairwise(costs_ms)]

    def expected_tokens(self, step: StepAhead) -> list[float]:
        """What a step gives all its requests with 0, 1, ... K drafts for each that adapts.

        Requests that do not adapt count as one token: whatever they get, they get with any choice.
        """
        tokens = [float(step.num_requests)] * (self._num_draft_tokens + 1)
        for text, count in step.num_adaptive:
            survivals = itertools.accumulate(self._rates[text].rates(), operator.mul)
            for num_drafts, accepted in enumerate(itertools.accumulate(survivals), start=1):
                tokens[num_drafts] += count * accepted
        return tokens

    def believed_ms(self, step: StepAhead) -> list[float]:
        """What a step is believed to cost with 0, 1, ... K drafts for each request that adapts."""
        costs = self.costs.of(step.kind)
        drafted = [max(count, step.num_fixed) for count in range(self._num_draft_tokens + 1)]
        plain_ms = costs.plain_ms(step.num_requests)
        return [costs.step_ms(step.num_requests, count) if count > 0 else plain_ms for count in drafted]

    def believed(self, step: StepAhead) -> list[BelievedStep]:
        """All choices for a step, for whoever wants to understand one."""
        each = zip(self.believed_ms(step), self.expected_tokens(step), strict=True)
        return [BelievedStep(count, ms, tokens / step.num_requests) for count, (ms, tokens) in enumerate(each)]

    def _best(self, step: StepAhead, last: int) -> int:
        """The length with the best pace; the last one, unless another is clearly better."""
        paces = [tokens / ms for tokens, ms in zip(self.expected_tokens(step), self.believed_ms(step), strict=True)]
        best = max(paces)
        return last if paces[last] * (1 + _MARGIN) >= best else paces.index(best)

    def _cost_ratio(self, kind: StepKind) -> float:
        """What a step with all drafts costs, in plain steps."""
        costs, num_requests = self.costs.of(kind), self._switches[kind].num_requests
        return costs.step_ms(num_requests, self._num_draft_tokens) / costs.plain_ms(num_requests)

    def _probe_interval(self, kind: StepKind) -> int:
        """Steps to the next probe: until it is clear, soon, as the context is kept for nothing all the while."""
        if not self.has_given_up(kind):
            return _PROBE_INTERVAL
        # A block is drawn in one step and judged in the next, and both may be as large as its rows.
        share = math.ceil(2 * (self._cost_ratio(kind) - 1) / _PROBE_SHARE)
        return self._switches[kind].backoff * max(_PROBE_INTERVAL, min(share, _MOST_STEPS_TO_PROBE))
