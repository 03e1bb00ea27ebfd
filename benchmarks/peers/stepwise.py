"""Two runs of the same prompt, compared draft step by draft step.

A step is known by its anchor's position. Both runs are greedy, so where the texts agree every step of one has its twin
in the other, and a step without one is a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.results import Row

if TYPE_CHECKING:
    from paceline.engine.request import RequestResult


@dataclass(frozen=True)
class DraftStep:
    """One block that was drafted and judged.

    Attributes:
        anchor_position: of the last committed token, in prompt and text together.
        proposed_ids: the drafts.
        num_accepted: how many of them the target agreed with, before any stop.
    """

    anchor_position: int
    proposed_ids: tuple[int, ...]
    num_accepted: int


@dataclass(frozen=True)
class Agreement:
    """How the steps of one or more prompts compare; counts of the peer's steps.

    Attributes:
        num_prompts: compared.
        num_steps: of the peer, full blocks whose outcome is known.
        num_same_proposals: with the same drafts on our side.
        num_same_accepted: with the same number accepted.
        num_ours: steps of ours that were looked up; fewer than `num_steps` where ours had no anchor there.
        accepted_ours: drafts accepted in these.
        accepted_theirs: drafts accepted in the peer's steps.
    """

    num_prompts: int = 0
    num_steps: int = 0
    num_same_proposals: int = 0
    num_same_accepted: int = 0
    num_ours: int = 0
    accepted_ours: int = 0
    accepted_theirs: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def is_complete(self) -> bool:
        """Whether every step is the same on both sides, and there was one."""
        return 0 < self.num_steps == self.num_same_proposals == self.num_same_accepted


def our_steps(result: RequestResult) -> list[DraftStep]:
    """The steps of a request that the engine served."""
    return [
        DraftStep(record.anchor_position, record.proposed_ids, record.num_verified_accepted)
        for record in result.trace.records
    ]


def steps_of_drafts(drafts: Sequence[tuple[int, tuple[int, ...]]], num_draft_tokens: int) -> list[DraftStep]:
    """Steps from what a peer drafted: how far the next anchor moved says how much was accepted.

    Args:
        drafts: (anchor position, drafted ids), in order. Blocks that were cut short at the budget's end are left out:
            a block of fewer rows is another input to the drafter. So is the last one, whose outcome nothing shows.
        num_draft_tokens: ids of a full block.
    """
    return [
        DraftStep(anchor, ids, next_anchor - anchor - 1)
        for (anchor, ids), (next_anchor, _) in pairwise(drafts)
        if len(ids) == num_draft_tokens
    ]


def compare_steps(ours: Sequence[DraftStep], theirs: Sequence[DraftStep]) -> Agreement:
    """Look up every step of the peer on our side."""
    by_anchor = {step.anchor_position: step for step in ours}
    twins = [(by_anchor.get(step.anchor_position), step) for step in theirs]
    found = [(one, other) for one, other in twins if one is not None]
    return Agreement(
        num_prompts=1,
        num_steps=len(theirs),
        num_same_proposals=sum(one.proposed_ids == other.proposed_ids for one, other in found),
        num_same_accepted=sum(one.num_accepted == other.num_accepted for one, other in found),
        num_ours=len(found),
        accepted_ours=sum(one.num_accepted for one, _ in found),
        accepted_theirs=sum(step.num_accepted for step in theirs),
    )


def agreement_row(agreement: Agreement, *, peer: str, version: str, drafter: str, target: str) -> Row:
    """The row of one drafter on one target."""
    return {
        "peer": peer,
        "version": version,
        "drafter": drafter,
        "target": target,
        "num_prompts": agreement.num_prompts,
        "num_steps": agreement.num_steps,
        "num_same_proposals": agreement.num_same_proposals,
        "same_proposals": agreement.num_same_proposals == agreement.num_steps > 0,
        "same_accepted": agreement.num_same_accepted == agreement.num_steps > 0,
        "acceptance_ours": 1 + agreement.accepted_ours / max(1, agreement.num_ours),
        "acceptance_peer": 1 + agreement.accepted_theirs / max(1, agreement.num_steps),
        "as_expected": agreement.is_complete,
    }
