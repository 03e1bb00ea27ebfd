"""Real drafters that are right at times, which random ones hardly ever are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.engine.engine import Engine
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.slots import SlotState
from paceline.models.drafters.proposal import Proposal


class HelpedProposer:
    """The first drafts of a block are a known text's, none to all of them by where the anchor sits.

    The drafter's context is kept and read as ever, and the drafts behind those are its own.

    Args:
        inner: what is helped; its drafts have to be one-hot.
        script_of_slot: prompt and plain text of the request in a slot.
    """

    is_capturable = False  # it asks the host where requests stand

    def __init__(self, inner: Proposer, script_of_slot: Callable[[int], Sequence[int]]) -> None:
        self._inner, self._script_of_slot = inner, script_of_slot

    def __getattr__(self, name: str) -> Any:
        """Everything else is the drafter's."""
        return getattr(self._inner, name)

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """The drafter's own block, its beginning replaced."""
        proposal = self._inner.propose(rows, state, all_greedy=all_greedy, num_drafts=num_drafts)
        ids_BK = proposal.ids_BK.clone()
        num_drafts = ids_BK.shape[1]
        for index, slot in enumerate(rows.slots):
            length = int(state.lengths[slot])
            script = self._script_of_slot(slot)
            num_helped = min(7 * length % 11 % (self._inner.num_draft_tokens + 2), num_drafts)
            for place, token in enumerate(script[length + 1 : length + 1 + num_helped]):
                ids_BK[index, place] = token
        return proposal._replace(ids_BK=ids_BK)


def help_drafts(engine: Engine, scripts: Mapping[str, Sequence[int]]) -> Engine:
    """Help an engine's drafter, before its first request.

    Args:
        engine: with a drafter whose drafts are one-hot.
        scripts: prompt and plain text of every request that it will meet, by name.
    """

    def script_of_slot(slot: int) -> Sequence[int]:
        name = engine.request_in_slot(slot)
        return () if name is None else scripts[name]  # rows of requests that have ended are in nobody's slot

    engine.wrap_proposer(lambda inner: HelpedProposer(inner, script_of_slot))
    return engine
