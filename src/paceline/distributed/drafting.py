"""The decider's drafter: its context follows what counts, and it drafts behind every anchor.

The engine's proposers do the work, over tables in which each place has its own blocks for good. Drafts are judged by
equality with the target's own choice, so that the text of a seed is that of plain decoding; sampled ones are therefore
drawn with the target's noise, which makes them agree more often. B places of a pass, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.distributed.places import Place
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.make_proposer import make_proposer, spare_positions_of
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.settings import EngineSettings
from paceline.engine.slots import SlotState
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.ops.sample_tokens import NO_TOKEN


class Drafting:
    """A drafter over the places of a run.

    Args:
        target: lends its embedding and head.
        drafter: of any family.
        num_places: B.
        max_model_len: tokens of a place.
        max_rows: of a place and pass.
    """

    def __init__(
        self, target: LoadedTarget, drafter: LoadedDrafter, *, num_places: int, max_model_len: int, max_rows: int
    ) -> None:
        device = target.model.norm.weight.device
        num_drafts = drafter.num_draft_tokens
        spare = max_rows + num_drafts + spare_positions_of(drafter, num_drafts)
        tables = BlockTables.fixed(num_places, capacity=max_model_len + spare, device=device)
        choice = AttentionChoice.for_device(device, is_row_invariant=target.linear_mode == "row_invariant")
        settings = EngineSettings(verify_method="coupled")
        self._proposer: Proposer = make_proposer(
            target, drafter, choice, settings, num_draft_tokens=num_drafts, tables=tables
        )
        self._state = SlotState(num_places, num_draft_tokens=num_drafts, num_candidates=0, device=device)
        self._device = device

    def begin(self, number: int, place: Place) -> None:
        """A place changes hands."""
        self._state.admit(number, place.request.sampling(), place.request.seed)

    @torch.no_grad()
    def follow(
        self,
        places: Sequence[Place | None],
        counts: Sequence[int],
        token_ids_BT: Tensor,
        taps: Sequence[Tensor],
    ) -> None:
        """Take in a pass that was judged, and draft for the places that stand at an anchor.

        Args:
            places: of the batch, with the text as it is now; None where a request ended.
            counts: rows of the pass that count.
            token_ids_BT: int64, what was run.
            taps: of all places and rows.
        """
        going = [(number, place) for number, place in enumerate(places) if place is not None]
        if not going:
            return
        numbers = [number for number, _ in going]
        slots_B = torch.tensor(numbers, device=self._device)
        ends_B = torch.tensor([place.num_run for _, place in going], device=self._device)
        starts = [place.num_run - counts[number] for number, place in going]
        starts_B = torch.tensor(starts, device=self._device)
        next_ids_B = torch.tensor([place.text[place.num_run] for _, place in going], device=self._device)
        num_rows = token_ids_BT.shape[1]
        rows = Rows(numbers, slots_B, starts, starts_B, num_rows)
        positions_BT = starts_B.unsqueeze(1) + torch.arange(num_rows, device=self._device)
        self._proposer.write_context(rows, [tap[slots_B] for tap in taps], positions_BT)
        self._proposer.settle(rows, token_ids_BT.to(self._device)[slots_B], ends_B, next_ids_B)
        self._state.lengths[slots_B] = ends_B
        self._state.anchors[slots_B] = next_ids_B
        self._state.steps[slots_B] += 1
        wanting = [place.is_at_anchor and place.request.is_drafted and place.num_left > 1 for _, place in going]
        if not any(wanting):
            return
        all_greedy = not any(place.request.temperature > 0 for _, place in going)
        drafted = self._proposer.propose(rows, self._state, all_greedy=all_greedy).ids_BK.tolist()
        for (_, place), wants, drafts in zip(going, wanting, drafted, strict=True):
            if wants:
                place.drafts = drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts
