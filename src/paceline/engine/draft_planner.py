"""Who gets how many drafts in a step: each request's own mode, the schedule by batch size, and what pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.engine.alarm import AcceptanceAlarm
from paceline.engine.draft_budget import DraftSchedule
from paceline.engine.draft_length import Costs, DraftLengthController, DraftLengthMode
from paceline.engine.draft_stopper import DraftPlan

_BLOCKS_PER_TRIAL = 16  # one block in so many is verified whole, so that a wrong confidence can be found out


class DraftPlanner:
    """Plans blocks and learns from what becomes of them, on the host.

    Args:
        num_draft_tokens: K.
        schedule: a limit by the number of requests; None for none.
        measure: measures step costs; called once, by `prepare` or for the first request in "adaptive" mode.
        calibrated_first_position: see `AcceptanceAlarm`.

    Attributes:
        num_draft_tokens: K.
        controller: chooses for requests in "adaptive" mode; None before the first of them.
        alarm: says when drafting earns too little.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        *,
        schedule: DraftSchedule | None,
        measure: Callable[[], Costs],
        calibrated_first_position: float | None = None,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._schedule, self._measure = schedule, measure
        self.alarm = AcceptanceAlarm(calibrated_first_position)
        self._num_blocks = 0
        self.controller: DraftLengthController | None = None

    def prepare(self) -> DraftLengthController:
        """Measure, unless that is done."""
        if self.controller is None:
            self.controller = DraftLengthController(self.num_draft_tokens, self._measure())
        return self.controller

    @property
    def has_given_up(self) -> bool:
        """Whether running requests in "adaptive" mode may lose their context."""
        return self.controller is not None and self.controller.has_given_up

    def limit(self, num_requests: int) -> int:
        """Most drafts per request that a step of so many requests verifies."""
        return self.num_draft_tokens if self._schedule is None else self._schedule.num_drafts(num_requests)

    def plan(self, modes: Sequence[DraftLengthMode], teaches: Sequence[bool], *, num_requests: int) -> DraftPlan:
        """Settle the next blocks of some requests.

        Args:
            modes: each request's; "off" also for one that can't be drafted for.
            teaches: each request's, see `DraftPlan`.
            num_requests: of the step that will verify them.
        """
        limit = self.limit(num_requests)
        wanted = {"off": 0, "fixed": limit, "adaptive": 0}
        thresholds: tuple[float, ...] | None = None
        if self.has_given_up and "adaptive" not in modes:
            self.prepare().skip_step()
        if "adaptive" in modes:
            controller = self.prepare()
            # Not asked where the schedule allows nothing: a probe that is never drawn finds out nothing.
            wanted["adaptive"] = count = min(limit, controller.next_num_drafts(num_requests)) if limit > 0 else 0
            self._num_blocks += 1
            is_trial = controller.num_drafts == 0 or self._num_blocks % _BLOCKS_PER_TRIAL == 0
            if count > 0 and not is_trial:
                behind = self.num_draft_tokens - count
                thresholds = (*controller.thresholds(num_requests, count), *[0.0] * behind)
        return DraftPlan(
            num_drafts=tuple(wanted[mode] for mode in modes),
            thresholds=thresholds,
            is_adaptive=tuple(mode == "adaptive" for mode in modes),
            teaches=tuple(teaches),
        )

    def observe(
        self,
        mode: DraftLengthMode,
        *,
        num_drawn: int,
        num_judged: int,
        num_accepted: int,
        is_plain_greedy: bool = False,
    ) -> None:
        """Take in one block of one request.

        Args:
            mode: the request's.
            num_drawn: planned for this block.
            num_judged: of them, verified.
            num_accepted: of them, kept by verification.
            is_plain_greedy: see `AcceptanceAlarm.observe`.
        """
        self.alarm.observe(num_judged, num_accepted, is_plain_greedy=is_plain_greedy)
        if mode == "adaptive" and self.controller is not None:
            self.controller.observe(num_drawn, num_accepted)
