"""Drafting from given anchors by the serving engine's own parts, and a record of what happened inside.

The text is not generated but fed: pass after pass through the target's cache, each up to the next anchor and a few
wrong tokens beyond it, as a verification step feeds drafts that it then refuses. So context is written piece by piece,
stale rows lie in both caches, and every block is drafted alone: nothing of how training drafts is repeated here.

A anchors, S tokens, K drafts, D width, V scored ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.make_proposer import make_proposer, spare_positions_of
from paceline.engine.proposal import Rows
from paceline.engine.settings import EngineSettings
from paceline.engine.slots import SlotState
from paceline.engine.step import run_rows
from paceline.engine.target_cache import begin_text, commit_rows, make_target_cache
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.loading import LoadedDrafter, LoadedTarget

_SLOT = 0


@dataclass(frozen=True)
class ServedText:
    """What serving made of one text.

    Attributes:
        taps: each [S, D], of the tokens before the last anchor, in the order of the drafter's list.
        context: per layer, keys and values of the drafter's context, each [M, S, H]; empty where a family has none
            that depends on the target alone.
        hidden_AKD: the state behind every draft.
        ids_AK: int64, the drafts.
    """

    taps: list[Tensor]
    context: list[tuple[Tensor, Tensor]]
    hidden_AKD: Tensor
    ids_AK: Tensor


class ServingPass:
    """Target and drafter with caches of their own, for one text at a time.

    Args:
        target: as it serves.
        drafter: as it serves.
        max_tokens: of the longest text.
    """

    def __init__(self, target: LoadedTarget, drafter: LoadedDrafter, *, max_tokens: int) -> None:
        self._target, self._drafter = target, drafter
        weight = target.model.norm.weight
        self._num_drafts = drafter.num_draft_tokens
        self._choice = AttentionChoice.for_device(weight.device, is_row_invariant=target.linear_mode == "row_invariant")
        capacity = max_tokens + 2 * self._num_drafts + 1 + spare_positions_of(drafter, self._num_drafts)
        tables = BlockTables.fixed(1, capacity=capacity, device=weight.device)
        settings = EngineSettings(max_num_seqs=1, draft_sample_method="greedy")
        self._proposer = make_proposer(
            target, drafter, self._choice, settings, num_draft_tokens=self._num_drafts, tables=tables
        )
        self._cache = make_target_cache(target, tables, max_rows=capacity)
        self._state = SlotState(1, num_draft_tokens=self._num_drafts, num_candidates=0, device=weight.device)

    @torch.no_grad()
    def __call__(self, ids: Sequence[int], anchors: Sequence[int]) -> ServedText:
        """Feed a text and draft behind every anchor.

        Args:
            ids: of the whole text.
            anchors: rising positions in it, none at 0.
        """
        taps: list[list[Tensor]] = []
        hidden_AKD, ids_AK = [], []
        begin_text(self._cache, _SLOT)
        start = 0
        for anchor in anchors:
            with self._recorded() as (of_target, of_drafter):
                ids_AK.append(self._draft(ids, start, anchor))
            taps.append([tap[0, : anchor - start] for tap in of_target[0]])
            hidden_AKD.append(self._states(of_drafter, anchor - start))
            start = anchor
        joined = [torch.cat(parts) for parts in zip(*taps, strict=True)]
        return ServedText(joined, self._context(start), torch.stack(hidden_AKD), torch.stack(ids_AK))

    def _draft(self, ids: Sequence[int], start: int, anchor: int) -> Tensor:
        """One step: rows from the last anchor up to this one, wrong tokens behind, and the block drafted."""
        device = self._state.device
        refused = [(token + 1) % self._target.contract.vocab_size for token in ids[anchor : anchor + self._num_drafts]]
        token_ids_BT = torch.tensor([[*ids[start:anchor], *refused]], device=device)
        slots_B, starts_B = torch.tensor([_SLOT], device=device), torch.tensor([start], device=device)
        rows = Rows([_SLOT], slots_B, [start], starts_B, token_ids_BT.shape[1])
        run_rows(self._target.model, self._proposer, self._cache, self._choice, rows, token_ids_BT, all_count=False)
        commit_rows(self._cache, rows, torch.full_like(starts_B, anchor - start))
        self._state.restore(_SLOT, length=anchor, anchor=ids[anchor], step=0)
        next_ids_B = torch.tensor([ids[anchor]], device=device)
        self._proposer.settle(rows, token_ids_BT, torch.full_like(starts_B, anchor), next_ids_B)
        return self._proposer.propose(rows, self._state, all_greedy=True).ids_BK[0]

    @contextmanager
    def _recorded(self) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
        """Taps of the target's pass, and what the drafter's passes gave, for as long as the context lasts."""
        of_target: list[list[Tensor]] = []
        of_drafter: list[Tensor] = []
        model = self._drafter.model
        network = model if isinstance(model, Eagle3Drafter) else model.backbone

        def keep_taps(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
            of_target.append(arguments[3].collected())

        def keep_states(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
            of_drafter.append(output[0] if isinstance(output, tuple) else output)

        hooks = [self._target.model.register_forward_hook(keep_taps), network.register_forward_hook(keep_states)]
        try:
            yield of_target, of_drafter
        finally:
            for hook in hooks:
                hook.remove()

    def _states(self, passes: list[Tensor], num_settled: int) -> Tensor:
        """[K, D]: of a block's one pass, or of the last settled row and each pass of one row behind it."""
        model = self._drafter.model
        if isinstance(model, Eagle3Drafter):
            return torch.cat((passes[0][0, num_settled - 1 : num_settled], *(rows[0] for rows in passes[1:])))
        (rows_BQD,) = passes
        return model.predicted_rows(rows_BQD)[0]

    def _context(self, length: int) -> list[tuple[Tensor, Tensor]]:
        if isinstance(self._drafter.model, Eagle3Drafter) or self._proposer.cache is None:
            return []
        cache = self._proposer.cache
        pairs = [cache.context(layer, _SLOT, length) for layer in range(self._drafter.contract.num_layers)]
        return [(keys[0].clone(), values[0].clone()) for keys, values in pairs]
