"""Per-slot state on the device: where each request stands, how it samples, and what was drafted for it.

What the host has to say of a slot is kept until the arrays are read or a pass is about to be launched, and then written
for all slots at once: one small transfer from pinned memory, however many requests came or were set back.

S slots plus one trash row that padding rows, and rows of requests that have ended, read and write. B requests of a
step, K draft tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.engine.admission import TokenLimits
from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.token_state import TokenState
from paceline.engine.transfers import to_device
from paceline.models.drafters.proposal import Proposal
from paceline.ops.finalise_block import SOUND
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


# Columns of what is kept of a slot: whole numbers first, then fractions.
_LENGTH, _ANCHOR, _STEP, _IS_ALIVE, _LIMIT, _TOP_K, _SEED, _FIRST_STOP = range(8)
_NUM_STOPS = 8
_NUM_WHOLE = _FIRST_STOP + _NUM_STOPS
_TEMPERATURE, _TOP_P, _MIN_P = range(3)
_NO_LIMIT = 2**62  # a position that no request reaches


class SlotState:
    """Device arrays with one row per slot and a trash row at index `num_slots`.

    Args:
        num_slots: S.
        num_draft_tokens: K; 0 without a drafter.
        num_candidates: C.
        device: where the arrays live.
        vocab_size: of the target; 0 where no request has rules on tokens.

    Attributes:
        trash_slot: S.
        candidate_ids: int64 [S + 1, K, C], with `log_q`: the distribution that the drafts were drawn from; C is 0
            where they are one-hot.
        tokens: what the rules on tokens read.
    """

    def __init__(
        self, num_slots: int, *, num_draft_tokens: int, num_candidates: int, device: torch.device, vocab_size: int = 0
    ) -> None:
        rows = num_slots + 1
        self.device, self.trash_slot = device, num_slots
        self._whole = torch.zeros(rows, _NUM_WHOLE, dtype=torch.int64, device=device)
        self._fractions = torch.zeros(rows, 3, dtype=torch.float32, device=device)
        self._draft_ids = torch.full((rows, num_draft_tokens), NO_TOKEN, dtype=torch.int64, device=device)
        shape = (rows, num_draft_tokens, num_candidates)
        self.candidate_ids = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)
        self.log_q = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        self.tokens = TokenState(num_slots, vocab_size=vocab_size, device=device)
        neutral = [0] * _FIRST_STOP + [NO_TOKEN] * _NUM_STOPS
        neutral[_IS_ALIVE], neutral[_LIMIT] = 1, _NO_LIMIT
        self._host = [(list(neutral), [0.0, 1.0, 0.0]) for _ in range(rows)]
        self._host[num_slots][0][_IS_ALIVE] = 0
        self._unflushed = set(range(rows))
        self.flush()

    @property
    def lengths(self) -> Tensor:
        """int64 [S + 1], n: positions whose target and context keys are final. The anchor sits at position n."""
        return self._column(_LENGTH)

    @property
    def anchors(self) -> Tensor:
        """int64 [S + 1], the last emitted token, not yet run through the target."""
        return self._column(_ANCHOR)

    @property
    def steps(self) -> Tensor:
        """int64 [S + 1], the request's own step counter: the drafts waiting in `draft_ids` were drawn with it."""
        return self._column(_STEP)

    @property
    def is_alive(self) -> Tensor:
        """int64 [S + 1], 0 once a pass saw the request's end; the host learns of it when it reads that pass."""
        return self._column(_IS_ALIVE)

    @property
    def temperatures(self) -> Tensor:
        """float32 [S + 1]; 0 is greedy."""
        self.flush()
        return self._fractions[:, _TEMPERATURE]

    @property
    def draft_ids(self) -> Tensor:
        """int64 [S + 1, K]; -1 where there is no draft."""
        self.flush()
        return self._draft_ids

    def tensors(self) -> tuple[Tensor, ...]:
        """What a step reads and writes; none of it is ever replaced."""
        return self._whole, self._fractions, self._draft_ids, self.candidate_ids, self.log_q

    def _column(self, index: int) -> Tensor:
        self.flush()
        return self._whole[:, index]

    def admit(
        self,
        slot: int,
        sampling: SamplingParameters,
        seed: int,
        *,
        limits: TokenLimits | None = None,
        prompt_ids: Sequence[int] = (),
        end: int | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        """Give a slot to a request: nothing of the one before stays readable.

        Args:
            slot: which.
            sampling: the request's.
            seed: of its noise.
            limits: its rules on tokens; None for none.
            prompt_ids: its prompt, read by rules alone.
            end: the position of its last token, where its budget ends; None where the device need not know.
            stop_ids: tokens that end it. Eight fit; with more the device goes on until the host has seen the end.
        """
        whole, fractions = self._host[slot]
        whole[_TOP_K] = min(sampling.top_k, 2**31)
        whole[_SEED] = seed
        whole[_LIMIT] = _NO_LIMIT if end is None else end
        kept = sorted(set(stop_ids)) if len(set(stop_ids)) <= _NUM_STOPS else []
        whole[_FIRST_STOP:] = kept + [NO_TOKEN] * (_NUM_STOPS - len(kept))
        # -inf / inf would be NaN, so even an absurd temperature stays a float32.
        temperature = min(float(effective_temperature(sampling.temperature)), torch.finfo(torch.float32).max)
        fractions[:] = temperature, sampling.top_p, sampling.min_p
        self.tokens.admit(slot, limits or TokenLimits(), prompt_ids)
        self.restore(slot, length=0, anchor=0, step=0)

    def restore(self, slot: int, *, length: int, anchor: int, step: int) -> None:
        """Set a slot to what the host knows; drafts are dropped, which costs speed and never changes the output."""
        whole = self._host[slot][0]
        whole[_LENGTH], whole[_ANCHOR], whole[_STEP], whole[_IS_ALIVE] = length, anchor, step, 1
        self._unflushed.add(slot)

    def flush(self) -> None:
        """Write what the host has to say, in one transfer that waits for nothing."""
        if not self._unflushed:
            return
        slots = sorted(self._unflushed)
        packed = np.empty((len(slots), 1 + _NUM_WHOLE + 3), dtype=np.int64)
        packed[:, 0] = slots
        packed[:, 1 : 1 + _NUM_WHOLE] = [self._host[slot][0] for slot in slots]
        fractions = np.array([self._host[slot][1] for slot in slots], dtype=np.float32)
        packed[:, 1 + _NUM_WHOLE :] = fractions.view(np.int32)  # their bits
        update = to_device(torch.from_numpy(packed), self.device)
        slots_N, whole, bits = update.split((1, _NUM_WHOLE, 3), dim=1)
        slots_N = slots_N.flatten()
        self._whole.index_copy_(0, slots_N, whole)
        self._fractions.index_copy_(0, slots_N, bits.int().view(torch.float32))
        self._draft_ids.index_fill_(0, slots_N, NO_TOKEN)
        self._unflushed.clear()

    def retire(self, slots_B: Tensor, lengths_B: Tensor, tokens_BL: Tensor, fault_B: Tensor) -> None:
        """Mark requests whose end the device can see, so that a step launched before the host knows writes nothing.

        Args:
            slots_B: int64.
            lengths_B: int64, committed.
            tokens_BL: int64, what was emitted; -1 behind.
            fault_B: int64; the host decides how a faulty request goes on, and revives it if it does.
        """
        self.flush()
        stop_ids_BS = self._whole[slots_B, _FIRST_STOP:]
        is_stop_BLS = (tokens_BL.unsqueeze(2) == stop_ids_BS.unsqueeze(1)) & (tokens_BL != NO_TOKEN).unsqueeze(2)
        goes_on_B = (lengths_B < self._whole[slots_B, _LIMIT]) & ~is_stop_BLS.flatten(1).any(1) & (fault_B == SOUND)
        self._whole[slots_B, _IS_ALIVE] *= goes_on_B

    def sampling_rows(self, slots_B: Tensor) -> SamplingRows:
        """Settings of the given slots."""
        self.flush()
        whole, fractions = self._whole, self._fractions
        arrays = (
            fractions[:, _TEMPERATURE],
            whole[:, _TOP_K],
            fractions[:, _TOP_P],
            fractions[:, _MIN_P],
            whole[:, _SEED],
        )
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
