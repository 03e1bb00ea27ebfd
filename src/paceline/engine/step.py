"""One decode step for CPU and GPU: verify the waiting drafts, commit, keep the context current, draft again.

Timeline of a request. Before the step its target keys and context keys are final for positions 0..n-1, and the anchor
sits at position n: emitted, not yet run.

1. Rows i = 0..T-1 hold the anchor and T-1 drafts at positions n..n+T-1; row i predicts position n+i+1.
2. Verification keeps a drafts; row a supplies one token more. e = a + 1.
3. Commit: n' = n + e, and the last token becomes the anchor at n'.
4. Context keys of rows n..n+T-1 are written from the taps; those at n' and beyond are unreadable and will be
   overwritten, exactly like the target's own.
5. The drafter runs over the anchor and masks at n'..n'+K with context 0..n'-1.

A drafter that goes token by token reads the token after each row, so its own keys are written in between, once the
rows are settled (`sequential_proposal.py`).

B requests, T rows per request, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice, write_then_attend
from paceline.engine.cache import KeyValueCache
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.verifier import judge
from paceline.models.taps import TapCollector
from paceline.models.targets.dense import DenseTarget
from paceline.ops.sample_tokens import NO_TOKEN


@dataclass(frozen=True)
class StepBatch:
    """Which requests a step runs, and what it does beside verification.

    Attributes:
        rows: the requests; T = 1 is plain decoding.
        flags: their sampling settings, summarised.
        writes_context: keep the drafter's context current; wanted even when nothing is drafted, or later drafts suffer.
        proposes: draft for the next step.
    """

    rows: Rows
    flags: SamplingFlags
    writes_context: bool
    proposes: bool


@dataclass(frozen=True)
class StepOutput:
    """What a step decided, on the device.

    Attributes:
        accepted_B: int64, drafts kept, bonus excluded.
        tokens_BT: int64, kept drafts, then the target's own token, then -1. Where `bad_B`, that token is -1, too.
        bad_B: bool, the row that should have supplied the token held NaN or infinity; the kept drafts are sound.
        draft_ids_BK: int64, the drafts that were judged; -1 where there was none.
        num_zero_q_B: int64, drafts that their own distribution called impossible: a broken drafter.
    """

    accepted_B: Tensor
    tokens_BT: Tensor
    bad_B: Tensor
    draft_ids_BK: Tensor
    num_zero_q_B: Tensor

    def to_host(self) -> list[HostStep]:
        """Fetch everything in one transfer."""
        num_rows = self.tokens_BT.shape[1]
        counts_B3 = torch.stack((self.accepted_B, self.bad_B.long(), self.num_zero_q_B), dim=1)
        packed: list[list[int]] = torch.cat((counts_B3, self.tokens_BT, self.draft_ids_BK), dim=1).tolist()
        return [HostStep(row[0], bool(row[1]), row[2], row[3 : 3 + num_rows], row[3 + num_rows :]) for row in packed]


@dataclass(frozen=True)
class HostStep:
    """One request's part of a `StepOutput` as plain numbers; padding stripped by the properties."""

    num_accepted: int
    is_bad: bool
    num_zero_q: int
    padded_token_ids: list[int]
    padded_draft_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        """Kept drafts and, unless the row was bad, the target's own token."""
        return self.padded_token_ids[: self.num_accepted + (0 if self.is_bad else 1)]

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """Drafts that were really there."""
        drafts = self.padded_draft_ids
        return tuple(drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts)


def decode_step(
    target: DenseTarget,
    proposer: Proposer | None,
    cache: KeyValueCache,
    state: SlotState,
    choice: AttentionChoice,
    batch: StepBatch,
) -> StepOutput:
    """Run one step; see the file's head for the timeline.

    Args:
        target: the model that decides.
        proposer: drafts and keeps the context; None decodes plainly.
        cache: the target's.
        state: read, then committed to.
        choice: form of attention, the only thing that differs by device.
        batch: who takes part. Its `starts` have to equal `state.lengths`.
    """
    rows = batch.rows
    num_drafts = rows.num_rows - 1
    with_q = proposer is not None and proposer.num_candidates > 0 and not batch.flags.all_greedy
    proposal = state.proposal(rows.slots_B, num_drafts, with_q=with_q)
    anchors_B1 = state.anchors[rows.slots_B].unsqueeze(1)
    # A missing draft is run as id 0; its row is computed for nothing and can't be accepted.
    token_ids_BT = torch.cat((anchors_B1, proposal.ids_BK), dim=1).clamp(min=0)
    hidden_BTD = run_rows(target, proposer if batch.writes_context else None, cache, choice, rows, token_ids_BT)
    verified = judge(target.logits(hidden_BTD), proposal, state, rows.slots_B, rows.starts_B, batch.flags)
    accepted_B, bonus_ids_B = verified.accepted_B, verified.bonus_ids_B

    row_T = torch.arange(rows.num_rows, device=accepted_B.device)
    padded_BT = torch.nn.functional.pad(proposal.ids_BK, (0, 1), value=NO_TOKEN)
    tokens_BT = padded_BT.masked_fill(row_T >= accepted_B.unsqueeze(1), NO_TOKEN)
    tokens_BT.scatter_(1, accepted_B.unsqueeze(1), bonus_ids_B.unsqueeze(1))

    ends_B = rows.starts_B + accepted_B + 1
    commit(state, rows.slots_B, ends_B, bonus_ids_B)
    if proposer is not None and batch.writes_context:
        proposer.settle(rows, token_ids_BT, ends_B, bonus_ids_B)
    if proposer is not None and batch.proposes:
        state.store_proposal(rows.slots_B, proposer.propose(rows, state, all_greedy=batch.flags.all_greedy))
    return StepOutput(accepted_B, tokens_BT, verified.bad_B, proposal.ids_BK, verified.num_zero_q_B)


def run_rows(
    target: DenseTarget,
    proposer: Proposer | None,
    cache: KeyValueCache,
    choice: AttentionChoice,
    rows: Rows,
    token_ids_BT: Tensor,
) -> Tensor:
    """Run target rows through the cache and hand their taps to the proposer; returns hidden states [B, T, D]."""
    row_T = torch.arange(rows.num_rows, device=token_ids_BT.device)
    positions_BT = rows.starts_B.unsqueeze(1) + row_T
    attend = write_then_attend(
        cache,
        choice,
        slots=rows.slots,
        slots_B=rows.slots_B,
        starts=rows.starts,
        starts_B=rows.starts_B,
        num_rows=rows.num_rows,
    )
    taps = None
    if proposer is not None:
        taps = TapCollector.of_layers(proposer.target_layer_ids, proposer.aux_hidden_stream)
    # The last drafts of a request may lie beyond the position table; they also lie beyond its budget.
    turned_as_BT = positions_BT.clamp(max=target.position_table.shape[0] - 1)
    hidden_BTD: Tensor = target(token_ids_BT, turned_as_BT, attend, taps)
    if proposer is not None and taps is not None:
        proposer.write_context(rows, taps.collected(), positions_BT)
    return hidden_BTD


def commit(state: SlotState, slots_B: Tensor, lengths_B: Tensor, anchors_B: Tensor) -> None:
    """Make rows readable: lengths, anchors and step counters move together, and waiting drafts are used up."""
    state.lengths[slots_B] = lengths_B
    state.anchors[slots_B] = anchors_B
    state.steps[slots_B] += 1
    state.draft_ids[slots_B] = NO_TOKEN
