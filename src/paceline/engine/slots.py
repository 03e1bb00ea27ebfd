"""Per-slot state on the device: where each request stands, how it samples, and what was drafted for it.

S slots plus one trash row that padding rows read and write. B requests of a step, K draft tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.engine.admission import TokenLimits
from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.token_state import TokenState
from paceline.models.drafters.proposal import Proposal
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.target_distribution import effective_temperature

__all__ = ["SamplingFlags", "SamplingRows", "SlotState"]


class SamplingRows(NamedTuple):
    """Sampling settings of the requests of one step."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor


class SlotState:
    """Device arrays with one row per slot and a trash row at index `num_slots`.

    Attributes:
        lengths: int64, n: positions whose target and context keys are final. The anchor sits at position n.
        anchors: int64, the last emitted token, not yet run through the target.
        steps: int64, the request's own step counter: the drafts waiting in `draft_ids` were drawn with it.
        draft_ids: int64 [S + 1, K]; -1 where there is no draft.
        candidate_ids: int64 [S + 1, K, C], with `log_q`: the distribution the drafts were drawn from; C is 0 where
            drafts are one-hot.
        tokens: what the rules on tokens read.

    Args:
        num_slots: S.
        num_draft_tokens: K; 0 without a drafter.
        num_candidates: C.
        device: where the arrays live.
        vocab_size: of the target; 0 where no request has rules on tokens.
    """

    def __init__(
        self, num_slots: int, *, num_draft_tokens: int, num_candidates: int, device: torch.device, vocab_size: int = 0
    ) -> None:
        rows = num_slots + 1
        self.device = device
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.anchors = torch.zeros(rows, dtype=torch.int64, device=device)
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_ks = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_ps = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_ps = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draft_ids = torch.full((rows, num_draft_tokens), NO_TOKEN, dtype=torch.int64, device=device)
        shape = (rows, num_draft_tokens, num_candidates)
        self.candidate_ids = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)
        self.log_q = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        self.tokens = TokenState(num_slots, vocab_size=vocab_size, device=device)

    def admit(
        self,
        slot: int,
        sampling: SamplingParameters,
        seed: int,
        *,
        limits: TokenLimits | None = None,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Give a slot to a request: nothing of the one before stays readable.

        Args:
            slot: which.
            sampling: the request's.
            seed: of its noise.
            limits: its rules on tokens; None for none.
            prompt_ids: its prompt, read by rules alone.
        """
        # -inf / inf would be NaN, so even an absurd temperature stays a float32.
        self.temperatures[slot] = min(
            float(effective_temperature(sampling.temperature)), torch.finfo(torch.float32).max
        )
        self.top_ks[slot] = min(sampling.top_k, 2**31)
        self.top_ps[slot] = sampling.top_p
        self.min_ps[slot] = sampling.min_p
        self.seeds[slot] = seed
        self.tokens.admit(slot, limits or TokenLimits(), prompt_ids)
        self.restore(slot, length=0, anchor=0, step=0)

    def restore(self, slot: int, *, length: int, anchor: int, step: int) -> None:
        """Set a slot to what the host knows; drafts are dropped, which costs speed and never changes the output."""
        self.lengths[slot] = length
        self.anchors[slot] = anchor
        self.steps[slot] = step
        self.draft_ids[slot] = NO_TOKEN

    def sampling_rows(self, slots_B: Tensor) -> SamplingRows:
        """Settings of the given slots."""
        arrays = (self.temperatures, self.top_ks, self.top_ps, self.min_ps, self.seeds)
        return SamplingRows(*(array[slots_B] for array in arrays))

    def store_proposal(self, slots_B: Tensor, proposal: Proposal) -> None:
        """Keep a proposal for the next step; beyond its length nothing stays drafted."""
        num_drafts = proposal.ids_BK.shape[1]
        self.draft_ids[slots_B, :num_drafts] = proposal.ids_BK
        self.draft_ids[slots_B, num_drafts:] = NO_TOKEN
        if self.log_q.shape[2] == 0:
            return
        if proposal.candidate_ids_BKC is not None and proposal.log_q_BKC is not None:
            self.candidate_ids[slots_B, :num_drafts] = proposal.candidate_ids_BKC
            self.log_q[slots_B, :num_drafts] = proposal.log_q_BKC
        else:  # one-hot drafts beside sampled ones: all mass on the one candidate
            self.candidate_ids[slots_B] = NO_TOKEN
            self.candidate_ids[slots_B, :num_drafts, 0] = proposal.ids_BK
            self.log_q[slots_B] = -torch.inf
            self.log_q[slots_B, :num_drafts, 0] = 0.0

    def proposal(self, slots_B: Tensor, num_drafts: int, *, with_q: bool) -> Proposal:
        """The first `num_drafts` waiting drafts of the given slots."""
        ids_BK = self.draft_ids[slots_B, :num_drafts]
        if not with_q:
            return Proposal(ids_BK)
        return Proposal(ids_BK, self.candidate_ids[slots_B, :num_drafts], self.log_q[slots_B, :num_drafts])
