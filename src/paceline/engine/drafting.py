"""Whether a request is drafted for, how many drafts the next blocks get, and what is learnt from those judged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from paceline.engine.counters import Counters
from paceline.engine.draft_budget import DraftSchedule
from paceline.engine.draft_length import DraftLengthController, JudgedBlock
from paceline.engine.draft_planner import DraftPlanner
from paceline.engine.draft_stopper import DraftPlan, DraftStopper
from paceline.engine.proposal import Proposer
from paceline.engine.running import RunningRequest
from paceline.engine.settings import EngineSettings
from paceline.engine.step import HostStep
from paceline.engine.step_cost import Costs
from paceline.engine.step_kind import StepAhead, StepKind, StepSize, TextKind
from paceline.ops.finalise_block import NOT_A_NUMBER

_log = logging.getLogger(__name__)


class Drafting:
    """Decides about drafts on the host.

    Args:
        proposer: what drafts; None decodes plainly.
        settings: of the engine.
        counters: of the engine.
        measure: measures what steps of a kind cost, for the first request in "adaptive" mode.
        calibrated_first_position: see `AcceptanceAlarm`.
        holds_back: as for `DraftPlanner`.
        device: of the slots' state.

    Attributes:
        planner: who gets how many drafts.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        settings: EngineSettings,
        counters: Counters,
        *,
        measure: Callable[[StepKind], Costs],
        calibrated_first_position: float | None,
        holds_back: bool,
        device: torch.device,
    ) -> None:
        self._proposer, self._settings, self._counters, self._device = proposer, settings, counters, device
        num_draft_tokens = proposer.num_draft_tokens if proposer is not None else 0
        ranges = settings.num_drafts_by_batch_size
        self.planner = DraftPlanner(
            num_draft_tokens,
            schedule=None if ranges is None else DraftSchedule(ranges, num_draft_tokens),
            measure=measure,
            calibrated_first_position=calibrated_first_position,
            holds_back=holds_back,
        )
        self._holds_back = holds_back
        self._ahead: StepAhead | None = None
        self._judged: list[JudgedBlock] = []
        self._stoppers: dict[bool, DraftStopper] = {}  # by whether a step is sampled

    def settle(self, request: RunningRequest, running: Sequence[RunningRequest] = (), *, num_waiting: int = 1) -> None:
        """Settle a request's mode, and whether drafts are made for it, before it is admitted for the first time.

        Args:
            request: not admitted yet.
            running: those that it will share steps with.
            num_waiting: requests that want to join them, this one included: they will share steps, too.
        """
        request.step_kind = StepKind.of(request.flags, has_grammar=request.grammar is not None)
        request.text_kind = TextKind(not request.flags.all_greedy, request.has_token_rules)
        request.draft_length = request.sampling.draft_length or self._settings.draft_length
        request.is_drafted = self._proposer is not None and request.draft_length != "off"
        if request.is_drafted and request.draft_length == "adaptive":
            count = min(len(running) + num_waiting, self._settings.max_num_seqs)
            kind = StepKind.joined({each.step_kind for each in (request, *running)})
            step = StepAhead(kind, count, ((request.text_kind, count),))
            request.is_drafted = self._prepare_adapting().wants_another_request(step)

    def _prepare_adapting(self) -> DraftLengthController:
        if not self._stoppers and self._holds_back:
            greedy = DraftStopper(self._settings.max_num_seqs, self.planner.num_draft_tokens, self._device)
            self._stoppers = {False: greedy, True: greedy.beside()}
        return self.planner.prepare()

    def stopper_of(self, requests: Sequence[RunningRequest]) -> DraftStopper | None:
        """What holds back drafts of a step of these requests, on the device.

        Sampled drafts are kept less often than greedy ones of which the drafter is as sure, so each learns apart.

        Returns:
            None before the first request in "adaptive" mode, and where nothing is saved by holding back.
        """
        if not self._stoppers:
            return None
        return self._stoppers[any(request.text_kind.is_sampled for request in requests)]

    def plan(self, requests: Sequence[RunningRequest], running: Sequence[RunningRequest]) -> DraftPlan:
        """Plan the next blocks of some requests.

        Args:
            requests: whose.
            running: all that are in slots; those that decode are in the step that verifies.
        """
        if self._proposer is None:
            return DraftPlan((0,) * len(requests))
        self._ahead = step = self._step_ahead(requests, running)
        return self.planner.plan(
            [request.draft_length if request.is_drafted else "off" for request in requests],
            [not request.has_token_rules for request in requests],
            step,
        )

    def plan_first(self, requests: Sequence[RunningRequest], running: Sequence[RunningRequest]) -> DraftPlan:
        """Plan the first blocks of requests whose prompts are being run: none where a pass for them alone loses time.

        Arguments as for `plan`.
        """
        modes = {request.draft_length for request in requests if request.is_drafted}
        controller = self.planner.controller
        if controller is None or modes != {"adaptive"}:
            return self.plan(requests, running)
        newcomers = self._step_ahead(requests, requests)
        pays = controller.pays_behind_prompts(self._step_ahead(requests, running), newcomers)
        return self.plan(requests, running) if pays else DraftPlan((0,) * len(requests))

    def _step_ahead(self, requests: Sequence[RunningRequest], running: Sequence[RunningRequest]) -> StepAhead:
        """The step that will judge the next blocks of some requests."""
        batch = [request for request in running if request.is_decoding or request in requests]
        drafted = [request for request in batch if request.is_drafted]
        texts = Counter(request.text_kind for request in drafted if request.draft_length == "adaptive")
        is_any_fixed = any(request.draft_length == "fixed" for request in drafted)
        return StepAhead(
            kind=StepKind.joined({request.step_kind for request in batch}),
            num_requests=len(batch),
            num_adaptive=tuple(texts.items()),
            num_fixed=self.planner.limit(len(batch)) if is_any_fixed else 0,
        )

    def size_of(self, plan: DraftPlan, *, writes_context: bool) -> StepSize | None:
        """The size, as costs are known by it, of a step that judges as many drafts as it draws; None if nobody adapts.

        Args:
            plan: that was made last, for the blocks behind this step.
            writes_context: whether it keeps the drafter's context current.
        """
        step = self._ahead
        if step is None or self.planner.controller is None:
            return None
        return StepSize(step.kind, len(plan.num_drafts), plan.most, writes_context)

    def observe(self, request: RunningRequest, step: HostStep) -> None:
        """Learn from a block that was judged; a step without drafts says something in "adaptive" mode alone."""
        num_judged = len(step.draft_ids)
        if num_judged == 0 and request.draft_length != "adaptive":
            return
        self._counters.num_impossible_drafts += step.num_zero_q
        if step.fault == NOT_A_NUMBER and num_judged > 0:
            return  # it is run again without drafts
        if request.draft_length == "adaptive":
            self._counters.num_held_back += request.num_drawn - request.num_waiting
            self._judged.append(JudgedBlock(request.text_kind, request.num_drawn, step.num_accepted))
        self.planner.observe(
            num_judged=num_judged, num_accepted=step.num_accepted, is_plain_greedy=request.is_plain_greedy
        )

    def observe_step(
        self, requests: Sequence[RunningRequest], size: StepSize | None, *, step_ms: float, host_ms: float
    ) -> None:
        """Learn from a step as a whole, behind what its requests had to say one by one.

        Args:
            requests: of the step.
            size: as `size_of` said; None where the time says nothing about it.
            step_ms: what it took.
            host_ms: how long of it the host was busy beside the device.
        """
        judged, self._judged = self._judged, []
        controller = self.planner.controller
        if controller is None:
            return
        if judged:
            self.planner.observe_step(StepKind.joined({request.step_kind for request in requests}), judged)
        if size is not None:
            controller.costs.of(size.kind).observe(size, step_ms, host_ms)

    def stop_beyond(self, request: RunningRequest, length: int, *, context_end: int) -> None:
        """Go on without drafts once a block after `length` cached positions would leave the drafter's positions.

        Args:
            request: in a slot.
            length: positions that are final, or will be.
            context_end: those of them that have draft context.
        """
        proposer = self._proposer
        if proposer is None or not request.is_drafted or length + proposer.num_draft_tokens < proposer.max_positions:
            return
        request.is_drafted = False
        request.held.end_context(context_end)
        self._counters.num_undrafted += 1
        if self._counters.num_undrafted == 1:
            _log.warning(
                "request %s reached position %d; the drafter ends at %d, so it goes on without drafts "
                "(said once; stats count further ones)",
                request.request_id,
                length,
                proposer.max_positions,
            )

    def give_up(self, requests: Sequence[RunningRequest]) -> None:
        """Where drafting has not paid for long, let requests lose their context: their steps are plain ones then."""
        if self.planner.controller is None:
            return
        if not self.planner.has_given_up(StepKind.joined({request.step_kind for request in requests})):
            return
        for request in requests:
            if request.draft_length == "adaptive" and request.num_waiting == 0 and request.is_drafted:
                request.is_drafted = False
                request.held.end_context(request.num_cached)
