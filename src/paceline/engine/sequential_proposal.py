"""Drafting with EAGLE-3: one pass of the drafter per draft, the first of them over everything the target just settled.

Row p of the drafter reads the target's state at p and the token at p + 1, so the last settled row needs the token that
verification chooses. Hence two halves: `write_context` keeps the features of the rows; `settle` learns what follows
them and runs the drafter. With T rows at n..n+T-1 of which e are settled:

1. settle: row n+i gets the token at n+i+1; the last, n+e-1, gets the new anchor. Its keys and values are stored, its
   output scores draft 1. Rows from n+e on are stored too, over zeros; the next step overwrites them before it reads.
2. propose: draft k > 1 comes from one more row at n+e-2+k, made of draft k-1 and the recycled state. Its keys lie
   beyond the settled rows, where the next step writes as well.

So there is nothing to roll back, and a step that is done again starts from keys that the host knows to be final.

B requests, T rows of a target pass, K draft tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, DraftSampleMethod
from paceline.engine.attends import AttentionChoice, write_then_attend
from paceline.engine.cache import KeyValueCache
from paceline.engine.proposal import Rows
from paceline.engine.slots import SlotState
from paceline.engine.step_watch import StepWatch
from paceline.models.drafters.draw import draw_rows, join_rows
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.proposal import MAX_CANDIDATES, DraftSampling, Proposal
from paceline.models.targets.target import Target
from paceline.ops.sample_tokens import NO_TOKEN


@dataclass(frozen=True)
class _Settled:
    """The last settled row of every request: what the head reads, and what the next row starts from, [B, 1, D]."""

    rows: Rows
    out_B1D: Tensor
    recycled_B1D: Tensor


def spare_positions(num_draft_tokens: int) -> int:
    """Positions that a slot needs beyond the target's own rows: drafting goes on from the last row of a block."""
    return num_draft_tokens


class SequentialProposer:
    """An EAGLE-3 drafter served from a cache of its own.

    Args:
        target: lends embedding and head.
        drafter: prepared for serving.
        cache: the drafter's planes, addressed by the same tables as the target's; slots have `spare_positions` more.
        choice: form of attention.
        num_draft_tokens: K, any number; more than trained costs time and is seldom accepted.
        method: how drafts are drawn from the drafter's logits.
        is_coupled: draw with the target's own noise, for verification by equality.

    Attributes:
        watch: is shown every block, for a trace with details; None for nobody.
    """

    is_capturable = True
    is_parallel = False

    def __init__(
        self,
        target: Target,
        drafter: Eagle3Drafter,
        cache: KeyValueCache,
        choice: AttentionChoice,
        *,
        num_draft_tokens: int,
        method: DraftSampleMethod,
        is_coupled: bool = False,
    ) -> None:
        contract = drafter.contract
        self._target, self._drafter, self._cache, self._choice = target, drafter, cache, choice
        self._method: DraftSampleMethod = method
        self._is_coupled = is_coupled
        self.name = f"{contract.family}/{method}"
        self.num_draft_tokens = num_draft_tokens
        self.num_candidates = min(MAX_CANDIDATES, contract.draft_vocab_size) if method == "probabilistic" else 0
        self.max_positions = min(contract.max_position_embeddings, drafter.position_table.shape[0])
        self.target_layer_ids = contract.target_layer_ids
        self.aux_hidden_stream: AuxHiddenStream = contract.aux_hidden_stream
        self._features_BTD: Tensor | None = None
        self._settled: _Settled | None = None
        self.watch: StepWatch | None = None

    @property
    def cache(self) -> KeyValueCache:
        """The drafter's own keys and values of every slot."""
        return self._cache

    def write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        """Keep the features of these rows until `settle` says what follows them."""
        self._features_BTD = self._drafter.features(taps)

    def settle(self, rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        """Run the drafter over the settled rows, each beside the token after it."""
        assert self._features_BTD is not None, "settle follows write_context of the same rows"
        last_B1 = (ends_B - rows.starts_B - 1).unsqueeze(1)
        next_ids_B1 = next_ids_B.clamp(min=0).unsqueeze(1)  # -1 after numbers that say nothing; no one drafts from it
        following_BT = torch.cat((token_ids_BT[:, 1:], next_ids_B1), dim=1).scatter(1, last_B1, next_ids_B1)
        # Zeros for refused rows: a draft whose state overflowed must not reach the others through a masked key.
        is_refused_BT = torch.arange(rows.num_rows, device=last_B1.device) > last_B1
        features_BTD = self._features_BTD.masked_fill(is_refused_BT.unsqueeze(2), 0.0)
        self._features_BTD = None
        out_BTD, recycled_BTD = self._run(rows, following_BT, features_BTD)
        index_B1D = last_B1.unsqueeze(2).expand(-1, 1, out_BTD.shape[2])
        self._settled = _Settled(rows, out_BTD.gather(1, index_B1D), recycled_BTD.gather(1, index_B1D))

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """One pass per draft, each drawn before the next is scored; the first pass was `settle`'s."""
        num_drafts = self.num_draft_tokens if num_drafts is None else num_drafts
        settled = self._settled
        assert settled is not None and list(settled.rows.slots) == list(rows.slots), (
            "propose follows settle of the same rows"
        )
        lengths_B = state.lengths[rows.slots_B]
        settings = state.sampling_rows(rows.slots_B)
        sampling = DraftSampling(
            method="greedy" if all_greedy else self._method,
            temperature_B=settings.temperature_B,
            seed_B=settings.seed_B,
            position_B=lengths_B,
            step_B=state.steps[rows.slots_B],
            is_coupled=self._is_coupled,
        )
        out_B1D, hidden_B1D = settled.out_B1D, settled.recycled_B1D
        row = self._last_rows(rows, lengths_B)
        drafts: list[Proposal] = []
        scores: list[Tensor] = []
        for k in range(num_drafts):
            if k > 0:
                row = replace(row, starts=[start + 1 for start in row.starts], starts_B=row.starts_B + 1)
                out_B1D, hidden_B1D = self._run(row, drafts[-1].ids_BK, hidden_B1D)
            logits_B1V = self._drafter.logits(out_B1D.to(self._target.norm.weight.dtype), self._target)
            drafts.append(draw_rows(logits_B1V, sampling, self._drafter.vocabulary, first=k))
            if self.watch is not None:
                scores.append(logits_B1V)
        proposal = join_rows(drafts)
        if self.watch is not None:
            self.watch.drafted(rows.slots, proposal, torch.cat(scores, dim=1), self._drafter.vocabulary.target_ids_V)
        fits_B = lengths_B + num_drafts < self.max_positions  # the engine's own limit, see BlockProposer
        return proposal._replace(ids_BK=proposal.ids_BK.masked_fill(~fits_B.unsqueeze(1), NO_TOKEN))

    def _last_rows(self, rows: Rows, lengths_B: Tensor) -> Rows:
        """The last settled row of each request."""
        if self._choice.is_batched:  # without asking the device: a bound does
            starts = [start + rows.num_rows - 1 for start in rows.starts]
        else:
            starts = [int(length) - 1 for length in lengths_B.tolist()]
        return replace(rows, starts=starts, starts_B=lengths_B - 1, num_rows=1)

    def _run(self, rows: Rows, token_ids_BT: Tensor, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """One pass of the drafter; stores the rows' keys and values."""
        positions_BT = rows.starts_B.unsqueeze(1) + torch.arange(rows.num_rows, device=rows.starts_B.device)
        attend = write_then_attend(
            self._cache,
            self._choice,
            slots=rows.slots,
            slots_B=rows.slots_B,
            starts=rows.starts,
            starts_B=rows.starts_B,
            num_rows=rows.num_rows,
            windows=self._drafter.contract.layer_windows,
            context_starts=rows.context_starts,
            context_starts_B=rows.context_starts_B,
        )
        embeddings_BTD = self._drafter.embed(token_ids_BT, self._target)
        # A request beyond the drafter's positions drafts no more; its rows are run only to keep the batch uniform.
        turned_as_BT = positions_BT.clamp(max=self.max_positions - 1)
        result: tuple[Tensor, Tensor] = self._drafter(embeddings_BTD, hidden_BTD, turned_as_BT, attend)
        return result
