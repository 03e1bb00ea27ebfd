"""Per-slot state on the device: where each request stands, how it samples, and what was drafted for it.

What the host has to say of a slot is kept until the arrays are read or a pass is about to be launched, and then written
for all slots at once: one small transfer from pinned memory, however many requests came or were set back.

S slots plus one trash row that padding rows, and rows of requests that have ended, read and write. B requests of a
step, K draft tokens, C candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.engine.admission import TokenLimits
from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.token_state import TokenState
from paceline.engine.transfers import is_capturing, to_device
from paceline.models.drafters.proposal import Proposal
from paceline.ops.block_rows import BlockRows, block_rows
from paceline.ops.commit_step import Committed, commit_step, retire_reference
from paceline.ops.finalise_block import Verdict
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.slot_columns import (
    ANCHOR,
    FIRST_STOP,
    IS_ALIVE,
    LENGTH,
    LIMIT,
    NUM_FRACTIONS,
    NUM_STOPS,
    NUM_WHOLE,
    SEED,
    STEP,
    TEMPERATURE,
    TOP_K,
    SamplingRows,
    SlotColumns,
    sampling_rows,
)
from paceline.ops.step_rows import CacheCells, StepRows, WaitingDrafts, step_rows
from paceline.ops.store_drafts import store_drafts
from paceline.ops.target_distribution import effective_temperature

__all__ = ["SamplingFlags", "SamplingRows", "SlotState"]


_NO_LIMIT = 2**62  # a position that no request reaches


def _neutral() -> tuple[list[int], list[float]]:
    """What the host knows of a slot that nobody had: whole numbers and fractions."""
    whole = [0] * FIRST_STOP + [NO_TOKEN] * NUM_STOPS
    whole[IS_ALIVE], whole[LIMIT] = 1, _NO_LIMIT
    return whole, [0.0, 1.0, 0.0]


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
        whole_SX = torch.zeros(rows, NUM_WHOLE, dtype=torch.int64, device=device)
        self._columns = SlotColumns(whole_SX, torch.zeros(rows, NUM_FRACTIONS, dtype=torch.float32, device=device))
        self._draft_ids = torch.full((rows, num_draft_tokens), NO_TOKEN, dtype=torch.int64, device=device)
        shape = (rows, num_draft_tokens, num_candidates)
        self.candidate_ids = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)
        self.log_q = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        self.tokens = TokenState(num_slots, vocab_size=vocab_size, device=device)
        self._host = [_neutral() for _ in range(rows)]
        self._unflushed = set(range(rows))
        self.empty_trash()
        self.flush()

    @property
    def lengths(self) -> Tensor:
        """int64 [S + 1], n: positions whose target and context keys are final. The anchor sits at position n."""
        return self._column(LENGTH)

    @property
    def anchors(self) -> Tensor:
        """int64 [S + 1], the last emitted token, not yet run through the target."""
        return self._column(ANCHOR)

    @property
    def steps(self) -> Tensor:
        """int64 [S + 1], the request's own step counter: the drafts waiting in `draft_ids` were drawn with it."""
        return self._column(STEP)

    @property
    def is_alive(self) -> Tensor:
        """int64 [S + 1], 0 once a pass saw the request's end; the host learns of it when it reads that pass."""
        return self._column(IS_ALIVE)

    @property
    def temperatures(self) -> Tensor:
        """float32 [S + 1]; 0 is greedy."""
        self.flush()
        return self._columns.fractions_SX[:, TEMPERATURE]

    @property
    def draft_ids(self) -> Tensor:
        """int64 [S + 1, K]; -1 where there is no draft."""
        self.flush()
        return self._draft_ids

    def tensors(self) -> tuple[Tensor, ...]:
        """What a step reads and writes; none of it is ever replaced."""
        return (*self._columns, self._draft_ids, self.candidate_ids, self.log_q)

    def _column(self, index: int) -> Tensor:
        self.flush()
        return self._columns.whole_SX[:, index]

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
        whole[TOP_K] = min(sampling.top_k, 2**31)
        whole[SEED] = seed
        whole[LIMIT] = _NO_LIMIT if end is None else end
        kept = sorted(set(stop_ids)) if len(set(stop_ids)) <= NUM_STOPS else []
        whole[FIRST_STOP:] = kept + [NO_TOKEN] * (NUM_STOPS - len(kept))
        # -inf / inf would be NaN, so even an absurd temperature stays a float32.
        temperature = min(float(effective_temperature(sampling.temperature)), torch.finfo(torch.float32).max)
        fractions[:] = temperature, sampling.top_p, sampling.min_p
        self.tokens.admit(slot, limits or TokenLimits(), prompt_ids)
        self.restore(slot, length=0, anchor=0, step=0)

    def restore(self, slot: int, *, length: int, anchor: int, step: int) -> None:
        """Set a slot to what the host knows; drafts are dropped, which costs speed and never changes the output."""
        whole = self._host[slot][0]
        whole[LENGTH], whole[ANCHOR], whole[STEP], whole[IS_ALIVE] = length, anchor, step, 1
        self._unflushed.add(slot)

    def empty_trash(self) -> None:
        """Make the trash slot, which trial steps may use, nobody's again: greedy, and ended.

        Padding runs there: if it were alive, it would get on with every step, and read an ever longer context.
        """
        self._host[self.trash_slot] = _neutral()
        self._host[self.trash_slot][0][IS_ALIVE] = 0
        self._unflushed.add(self.trash_slot)

    def flush(self) -> None:
        """Write what the host has to say, in one transfer that waits for nothing."""
        if not self._unflushed:
            return
        assert not is_capturing(self.device), "a recorded step would write the same again and again"
        slots = sorted(self._unflushed)
        packed = np.empty((len(slots), 1 + NUM_WHOLE + NUM_FRACTIONS), dtype=np.int64)
        packed[:, 0] = slots
        packed[:, 1 : 1 + NUM_WHOLE] = [self._host[slot][0] for slot in slots]
        fractions = np.array([self._host[slot][1] for slot in slots], dtype=np.float32)
        packed[:, 1 + NUM_WHOLE :] = fractions.view(np.int32)  # their bits
        update = to_device(torch.from_numpy(packed), self.device)
        slots_N, whole, bits = update.split((1, NUM_WHOLE, NUM_FRACTIONS), dim=1)
        slots_N = slots_N.flatten()
        self._columns.whole_SX.index_copy_(0, slots_N, whole)
        self._columns.fractions_SX.index_copy_(0, slots_N, bits.int().view(torch.float32))
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
        retire_reference(self._columns.whole_SX, slots_B, lengths_B, tokens_BL, fault_B)

    def sampling_rows(self, slots_B: Tensor) -> SamplingRows:
        """Settings of the given slots."""
        self.flush()
        return sampling_rows(self._columns, slots_B)

    # A step

    def step_rows(
        self,
        slots_B: Tensor,
        num_drafts: int,
        *,
        vocab_size: int,
        num_positions: int,
        reads_q: bool,
        context_starts_B: Tensor | None = None,
        cells: CacheCells | None = None,
    ) -> StepRows:
        """The rows of a step over the first `num_drafts` waiting drafts; see `ops.step_rows`."""
        self.flush()
        return step_rows(
            self._columns,
            self._waiting(with_q=reads_q),
            slots_B,
            num_drafts=num_drafts,
            vocab_size=vocab_size,
            num_positions=num_positions,
            context_starts_B=context_starts_B,
            cells=cells,
        )

    def commit(self, rows: StepRows, verdict: Verdict) -> Committed:
        """Take in what was decided on a step's rows.

        They become readable: lengths, anchors and step counters move together, and waiting drafts are used up. Requests
        whose end the device can see are retired, so that a step launched before the host knows writes nothing; how a
        faulty one goes on is for the host to decide, which revives it if it does.
        """
        return commit_step(
            self._columns,
            self._draft_ids,
            rows.slots_B,
            starts_B=rows.starts_B,
            positions_B=rows.positions_B,
            draft_ids_BK=rows.draft_ids_BK,
            verdict=verdict,
        )

    def block_rows(
        self, slots_B: Tensor, *, num_rows: int, mask_id: int, vocab_size: int, max_positions: int
    ) -> BlockRows:
        """The rows of the draft blocks behind the anchors; see `ops.block_rows`."""
        self.flush()
        return block_rows(
            self._columns,
            slots_B,
            num_rows=num_rows,
            mask_id=mask_id,
            vocab_size=vocab_size,
            max_positions=max_positions,
        )

    def store_proposal(
        self,
        slots_B: Tensor,
        proposal: Proposal,
        *,
        wanted_B: Tensor | None = None,
        waiting_B: Tensor | None = None,
    ) -> Tensor:
        """Keep a proposal for the next step; beyond its length nothing stays drafted.

        Args:
            slots_B: int64.
            proposal: as drawn.
            wanted_B: int64, drafts to keep of each block; None keeps all.
            waiting_B: int64, written to; None makes one.

        Returns:
            Drafts that wait for the next step, int64 [B].
        """
        self.flush()
        if waiting_B is None:
            waiting_B = torch.empty_like(slots_B)
        store_drafts(
            self._waiting(with_q=self.log_q.shape[2] > 0),
            slots_B,
            proposal.ids_BK,
            waiting_B=waiting_B,
            candidate_ids_BKC=proposal.candidate_ids_BKC,
            log_q_BKC=proposal.log_q_BKC,
            wanted_B=wanted_B,
        )
        return waiting_B

    def proposal(self, slots_B: Tensor, num_drafts: int, *, with_q: bool) -> Proposal:
        """The first `num_drafts` waiting drafts of the given slots, for whoever looks at them outside of a step."""
        self.flush()
        waiting = (None if each is None else each[slots_B, :num_drafts] for each in self._waiting(with_q=with_q))
        ids_BK, candidate_ids_BKC, log_q_BKC = waiting
        assert ids_BK is not None, "every slot has room for ids"
        return Proposal(ids_BK, candidate_ids_BKC, log_q_BKC)

    def _waiting(self, *, with_q: bool) -> WaitingDrafts:
        return WaitingDrafts(self._draft_ids, *((self.candidate_ids, self.log_q) if with_q else (None, None)))
