"""Holding drafts back on the device: where a block's survival falls below what a row costs, the rest is not verified.

Each draft's chance comes from its row's features (`ops/draft_chances.py`), never from the draft itself, so that the
output stays the target's own (`draft_budget.py`).

S slots plus one trash row, B requests, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.engine.acceptance_estimator import AcceptanceEstimator
from paceline.engine.transfers import to_device
from paceline.models.drafters.proposal import Proposal
from paceline.ops.draft_chances import KnownFeatures, hold_back_drafts
from paceline.ops.observe_drafts import observe_drafts


@dataclass(frozen=True)
class DraftPlan:
    """How many drafts a step draws for the next one, settled before any of them is drawn.

    Attributes:
        num_drafts: per request; 0 leaves it without.
        thresholds: the survival that each draft of a block needs to be verified; None holds nothing back.
        is_adaptive: per request, whether thresholds apply to it.
        teaches: per request, whether its blocks say something about the others': rules on tokens or a grammar refuse
            drafts for reasons of their own.
        num_drawn: drafts that the batch draws at least, where steps are padded to fixed sizes; those beyond
            `num_drafts` are left out again.
    """

    num_drafts: tuple[int, ...]
    thresholds: tuple[float, ...] | None = None
    is_adaptive: tuple[bool, ...] = ()
    teaches: tuple[bool, ...] = ()
    num_drawn: int = 0

    @property
    def most(self) -> int:
        """Drafts that the batch as a whole draws."""
        return max(self.num_drawn, *self.num_drafts) if self.num_drafts else 0

    def on(self, device: torch.device) -> DevicePlan:
        """Copy it to a device, before a step's work: a recorded step can't take a copy along."""

        def copied(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        return DevicePlan(
            self.most,
            copied(self.num_drafts, torch.int64) if min(self.num_drafts, default=0) < self.most else None,
            None if self.thresholds is None else copied(self.thresholds, torch.float64),
            None if self.thresholds is None or all(self.is_adaptive) else copied(self.is_adaptive, torch.bool),
            None if all(self.teaches) else copied(self.teaches, torch.bool),
        )


class DevicePlan(NamedTuple):
    """A `DraftPlan` where its step reads it.

    Attributes:
        most: drafts that the batch as a whole draws.
        num_drafts_B: int64; None where all requests get the most.
        thresholds_K: float64; None holds nothing back.
        is_adaptive_B: bool; None where thresholds apply to all requests, or to none as there are no thresholds.
        teaches_B: bool; None where all teach.
    """

    most: int
    num_drafts_B: Tensor | None
    thresholds_K: Tensor | None
    is_adaptive_B: Tensor | None
    teaches_B: Tensor | None

    def on(self, device: torch.device) -> DevicePlan:
        """Itself: it is there, and a recorded step reads it where it is."""
        assert self.num_drafts_B is None or self.num_drafts_B.device.type == device.type, "made where it is read"
        return self


class DraftStopper:
    """What is known of waiting drafts' chances, and the estimator that learns from what becomes of them.

    Args:
        num_slots: S.
        num_draft_tokens: K.
        device: of the slots' state.
    """

    def __init__(self, num_slots: int, num_draft_tokens: int, device: torch.device) -> None:
        self.estimator: AcceptanceEstimator | None = None
        self._num_slots, self._num_draft_tokens = num_slots, num_draft_tokens
        self._known = KnownFeatures(
            torch.zeros(num_slots + 1, num_draft_tokens, device=device),
            torch.zeros(num_slots + 1, dtype=torch.bool, device=device),
        )

    def beside(self) -> DraftStopper:
        """Another one for the same slots, which learns for itself: for steps of another kind."""
        other = DraftStopper(self._num_slots, self._num_draft_tokens, self._known.features_SK.device)
        other._known = self._known  # of drafts, whichever step drew them
        return other

    def observe(self, slots_B: Tensor, draft_ids_BK: Tensor, accepted_B: Tensor, plan: DevicePlan) -> None:
        """Learn from a step's verification; has to come before `hold_back` of the next blocks.

        Args:
            slots_B: int64.
            draft_ids_BK: int64, what was verified; -1 where there was none.
            accepted_B: int64.
            plan: of this step; says who teaches.
        """
        if self.estimator is None or draft_ids_BK.shape[1] == 0:
            return
        observe_drafts(
            self.estimator.sums_6K,
            self._known,
            self.estimator.coefficients,
            slots_B,
            draft_ids_BK,
            accepted_B,
            teaches_B=plan.teaches_B,
        )

    def advance(self) -> None:
        """Count a step that was launched, outside of any recording; now and then the estimator learns here."""
        if self.estimator is not None:
            self.estimator.advance()

    def hold_back(self, slots_B: Tensor, proposal: Proposal, plan: DevicePlan) -> Proposal:
        """Take out drafts that are not worth a row; with nothing known of the rows, none are.

        Args:
            slots_B: int64.
            proposal: as drawn; its features are kept for `observe`.
            plan: says whose drafts may be held back, and below which survival.
        """
        says_something = proposal.confidence_BK is not None or proposal.log_q_BKC is not None
        if says_something and self.estimator is None:
            self.estimator = AcceptanceEstimator(
                self._num_draft_tokens,
                has_confidence_head=proposal.confidence_BK is not None,
                device=proposal.ids_BK.device,
            )
        kept_BK = hold_back_drafts(
            self._known,
            None if self.estimator is None else self.estimator.coefficients,
            slots_B,
            proposal.ids_BK,
            log_q_BKC=proposal.log_q_BKC,
            confidence_BK=proposal.confidence_BK,
            thresholds_K=plan.thresholds_K,
            is_adaptive_B=plan.is_adaptive_B,
        )
        return proposal._replace(ids_BK=kept_BK)
