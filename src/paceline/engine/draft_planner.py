"""Who gets how many drafts in a step: each request's own mode, the schedule by batch size, and what pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.engine.alarm import AcceptanceAlarm
from paceline.engine.draft_budget import DraftSchedule
from paceline.engine.draft_length import DraftLengthController, DraftLengthMode, JudgedBlock
from paceline.engine.draft_stopper import DraftPlan
from paceline.engine.kind_costs import CostsByKind
from paceline.engine.step_cost import Costs
from paceline.engine.step_kind import StepAhead, StepKind

_BLOCKS_PER_TRIAL = 16  # one block in so many is verified whole, so that a wrong confidence can be found out


class DraftPlanner:
    """Plans blocks and learns from what becomes of them, on the host.

    Args:
        num_draft_tokens: K.
        schedule: a limit by the number of requests; None for none.
        measure: measures what steps of a kind cost; called by `prepare` or for the first request in "adaptive" mode.
        calibrated_first_position: see `AcceptanceAlarm`.
        holds_back: whether a draft that is not verified saves its row: not where rows are settled before the drafts
            are there.

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
        measure: Callable[[StepKind], Costs],
        calibrated_first_position: float | None = None,
        holds_back: bool = True,
    ) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._schedule, self._measure, self._holds_back = schedule, measure, holds_back
        self.alarm = AcceptanceAlarm(calibrated_first_position)
        self._num_blocks = 0
        self.controller: DraftLengthController | None = None

    def prepare(self) -> DraftLengthController:
        """Measure, unless that is done."""
        if self.controller is None:
            self.controller = DraftLengthController(self.num_draft_tokens, CostsByKind(self._measure))
        return self.controller

    def has_given_up(self, kind: StepKind) -> bool:
        """Whether running requests in "adaptive" mode may lose their context.

        Args:
            kind: of their steps.
        """
        return self.controller is not None and self.controller.has_given_up(kind)

    def limit(self, num_requests: int) -> int:
        """Most drafts per request that a step of so many requests verifies."""
        return self.num_draft_tokens if self._schedule is None else self._schedule.num_drafts(num_requests)

    def plan(self, modes: Sequence[DraftLengthMode], teaches: Sequence[bool], step: StepAhead) -> DraftPlan:
        """Settle the next blocks of some requests.

        Args:
            modes: each request's; "off" also for one that can't be drafted for.
            teaches: each request's, see `DraftPlan`.
            step: that will judge them.
        """
        limit = self.limit(step.num_requests)
        wanted = {"off": 0, "fixed": limit, "adaptive": 0}
        thresholds: tuple[float, ...] | None = None
        if self.has_given_up(step.kind) and "adaptive" not in modes:
            self.prepare().skip_step(step.kind)
        if "adaptive" in modes:
            controller = self.prepare()
            # Not asked where the schedule allows nothing: a probe that is never drawn finds out nothing.
            wanted["adaptive"] = count = min(limit, controller.next_num_drafts(step)) if limit > 0 else 0
            self._num_blocks += 1
            is_trial = controller.is_off(step.kind) or self._num_blocks % _BLOCKS_PER_TRIAL == 0
            # A batch has as many rows as its longest block, so what one of several requests holds back saves nothing.
            if self._holds_back and step.num_requests == 1 and count > 0 and not is_trial:
                behind = self.num_draft_tokens - count
                thresholds = (*controller.thresholds(step, count), *[0.0] * behind)
        return DraftPlan(
            num_drafts=tuple(wanted[mode] for mode in modes),
            thresholds=thresholds,
            is_adaptive=tuple(mode == "adaptive" for mode in modes),
            teaches=tuple(teaches),
        )

    def observe(self, *, num_judged: int, num_accepted: int, is_plain_greedy: bool = False) -> None:
        """Take in one block of one request, whatever its mode, for the alarm.

        Args:
            num_judged: drafts verified.
            num_accepted: of them, kept by verification.
            is_plain_greedy: see `AcceptanceAlarm.observe`.
        """
        self.alarm.observe(num_judged, num_accepted, is_plain_greedy=is_plain_greedy)

    def observe_step(self, kind: StepKind, blocks: Sequence[JudgedBlock]) -> None:
        """Take in all blocks of a step that belong to requests in "adaptive" mode."""
        if self.controller is not None:
            self.controller.observe(kind, blocks)
