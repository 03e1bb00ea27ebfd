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

B requests, T rows per request, K draft tokens, V vocabulary, W mask words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice
from paceline.engine.draft_stopper import DevicePlan, DraftPlan, DraftStopper, count_drafts, first_drafts
from paceline.engine.log_probabilities import BlockLogprobs, RowLogprobs, entries_of
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.recurrent_state import StateCopies
from paceline.engine.request import TokenLogprobs
from paceline.engine.sampling import LogprobsMode
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.target_cache import TargetCache, attend_rows, commit_rows, num_kept_rows
from paceline.engine.transfers import HostCopy
from paceline.engine.verifier import JudgedBlock, judge
from paceline.models.taps import TapCollector
from paceline.models.targets.target import Target
from paceline.ops.acceptance import VerifyMethod, reads_q
from paceline.ops.finalise_block import SOUND
from paceline.ops.sample_tokens import NO_TOKEN


@dataclass(frozen=True)
class StepBatch:
    """Which requests a step runs, and what it does beside verification.

    Attributes:
        rows: the requests; T = 1 is plain decoding.
        flags: their sampling settings, summarised.
        writes_context: keep the drafter's context current; wanted even when nothing is drafted, or later drafts suffer.
        plan: what is drafted for the next step; None drafts nothing. A recorded step has its tensors already.
        verify_method: how the waiting drafts are judged.
        stopper: holds unlikely drafts back, and learns from those judged; None where no request wants that.
        grammar_mask_BTW: int32, what each row may emit; None where no request has a grammar.
        state_copies: recurrent states to be kept at block boundaries; None for none.
    """

    rows: Rows
    flags: SamplingFlags
    writes_context: bool
    plan: DraftPlan | DevicePlan | None = None
    verify_method: VerifyMethod = "standard"
    stopper: DraftStopper | None = None
    grammar_mask_BTW: Tensor | None = None
    state_copies: StateCopies | None = None


@dataclass(frozen=True)
class StepOutput:
    """What a step decided, on the device.

    Attributes:
        accepted_B: int64, drafts kept, bonus excluded.
        tokens_BT: int64, kept drafts, then the target's own token, then -1. Where there is a fault, that token is -1,
            too.
        fault_B: int64, of the row that should have supplied the token: 0 sound, 1 NaN or infinity, 2 no token is
            allowed. The kept drafts are sound.
        draft_ids_BK: int64, the drafts that were judged; -1 where there was none.
        num_zero_q_B: int64, drafts that their own distribution called impossible: a broken drafter.
        num_waiting_B: int64, drafts that wait for the next step.
        positions_B: int64, of the first row; -1 where the device saw the request's end before: its rows mean nothing.
        logprobs: of the tokens; None if no request wants any.
        num_requests: the first so many rows are requests, those behind padding; None where all are.
    """

    accepted_B: Tensor
    tokens_BT: Tensor
    fault_B: Tensor
    draft_ids_BK: Tensor
    num_zero_q_B: Tensor
    num_waiting_B: Tensor
    positions_B: Tensor
    logprobs: BlockLogprobs | None = None
    num_requests: int | None = None

    @classmethod
    def of(cls, judged: JudgedBlock, draft_ids_BK: Tensor, num_waiting_B: Tensor, positions_B: Tensor) -> StepOutput:
        """Put together what a step's verification decided and what it left for the next."""
        verified = judged.verified
        return cls(
            verified.accepted_B,
            judged.tokens_BL,
            verified.fault_B,
            draft_ids_BK,
            verified.num_zero_q_B,
            num_waiting_B,
            positions_B,
            judged.logprobs,
        )

    @classmethod
    def resumed(cls, num_waiting_B: Tensor) -> StepOutput:
        """A pass that judged nothing and only drafted for requests whose text is known."""
        zeros_B = torch.zeros_like(num_waiting_B)
        none_B0 = zeros_B.new_empty(zeros_B.shape[0], 0)
        return cls(zeros_B, none_B0, zeros_B, none_B0, zeros_B, num_waiting_B, torch.ones_like(zeros_B))

    def send(self) -> SentOutput:
        """Start to fetch everything in one transfer."""
        counts = (self.accepted_B, self.fault_B, self.num_zero_q_B, self.num_waiting_B, self.positions_B)
        integers = torch.cat((torch.stack(counts, dim=1), self.tokens_BT, self.draft_ids_BK), dim=1)
        rows: Iterable[RowLogprobs | None] = self.logprobs or ()
        floats = [part.columns for part in rows if part is not None]
        packed = torch.cat((integers.double(), *floats), dim=1) if floats else integers
        return SentOutput(self, HostCopy(packed[: self.num_requests]), integers.shape[1])

    def to_host(self) -> list[HostStep]:
        """Fetch everything and wait for it."""
        return self.send().read()

    def unpack(self, packed: Sequence[Sequence[float]], num_integers: int) -> list[HostStep]:
        """Read what `send` packed, a row per request."""
        num_rows, num_counts = self.tokens_BT.shape[1], 5
        steps = []
        for numbers in packed:
            whole = [int(number) for number in numbers[:num_integers]]
            accepted, fault, num_zero_q, num_waiting, position = whole[:num_counts]
            tokens, drafts = whole[num_counts : num_counts + num_rows], whole[num_counts + num_rows :]
            step = HostStep(accepted, fault, num_zero_q, tokens, drafts, num_waiting=num_waiting, position=position)
            if self.logprobs is not None:
                step = replace(step, logprobs=self._entries(list(numbers[num_integers:]), step))
            steps.append(step)
        return steps

    def _entries(self, numbers: list[float], step: HostStep) -> dict[LogprobsMode, tuple[TokenLogprobs, ...]]:
        entries: dict[LogprobsMode, tuple[TokenLogprobs, ...]] = {}
        assert self.logprobs is not None, "asked for only where there are some"
        for mode in get_args(LogprobsMode):
            part: RowLogprobs | None = getattr(self.logprobs, mode)
            if part is not None:
                num_columns = part.num_columns
                entries[mode] = entries_of(numbers[:num_columns], step.token_ids, self.tokens_BT.shape[1], mode)
                numbers = numbers[num_columns:]
        return entries


@dataclass(frozen=True, eq=False)
class SentOutput:
    """A step's output on its way to the host.

    Attributes:
        output: on the device.
        packed: what was sent.
        num_integers: columns of it that are whole numbers; the others belong to log-probabilities.
    """

    output: StepOutput
    packed: HostCopy
    num_integers: int

    def read(self) -> list[HostStep]:
        """Wait for it, and give each request's part."""
        return self.output.unpack(self.packed.wait().tolist(), self.num_integers)


@dataclass
class HostStep:
    """One request's part of a `StepOutput` as plain numbers.

    Attributes:
        num_accepted: drafts kept.
        fault: of the row that should have supplied the target's own token.
        num_zero_q: drafts that their own distribution called impossible.
        padded_token_ids: kept drafts, the target's own token, then -1.
        padded_draft_ids: drafts, then -1.
        logprobs: of the tokens, by mode.
        num_waiting: drafts that wait for the next step.
        position: of the first row; -1 where the device saw the request's end before.
        token_ids: kept drafts and, unless the row was bad, the target's own token.
        draft_ids: drafts that were really there.
    """

    num_accepted: int
    fault: int
    num_zero_q: int
    padded_token_ids: list[int]
    padded_draft_ids: list[int]
    logprobs: Mapping[LogprobsMode, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    num_waiting: int = 0
    position: int = 0
    token_ids: list[int] = field(init=False)
    draft_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = self.padded_token_ids[: self.num_accepted + (0 if self.is_bad else 1)]
        drafts = self.padded_draft_ids
        self.draft_ids = tuple(drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts)

    @property
    def is_bad(self) -> bool:
        """Whether the row that should have supplied the target's own token gave none."""
        return self.fault != SOUND


def decode_step(
    target: Target,
    proposer: Proposer | None,
    cache: TargetCache,
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
        batch: who takes part, and at most how far each has come; where it really stands is read from `state`.
    """
    plan = None if batch.plan is None else batch.plan.on(state.device)
    rows, positions_B = rows_where_they_stand(batch.rows, state, choice)
    num_drafts = rows.num_rows - 1
    has_q = proposer is not None and proposer.num_candidates > 0 and not batch.flags.all_greedy
    with_q = has_q and reads_q(batch.verify_method)
    proposal = state.proposal(rows.slots_B, num_drafts, with_q=with_q)
    anchors_B = state.anchors[rows.slots_B]
    anchors_B1 = anchors_B.unsqueeze(1).clamp(min=0)
    # A missing draft is run as the anchor once more; its row is computed for nothing and can't be accepted. Any other
    # id might overflow where the request's own tokens do not, and spoil its block.
    drafts_BK = torch.where(proposal.ids_BK < 0, anchors_B1, proposal.ids_BK)
    token_ids_BT = torch.cat((anchors_B1, drafts_BK), dim=1)
    fed = proposer if batch.writes_context else None
    hidden_BTD = run_rows(target, fed, cache, choice, rows, token_ids_BT, all_count=False)
    judged = judge(
        target.logits(hidden_BTD),
        proposal,
        state,
        rows.slots_B,
        rows.starts_B,
        batch.flags,
        method=batch.verify_method,
        grammar_mask_BLW=batch.grammar_mask_BTW,
    )
    accepted_B, bonus_ids_B = judged.verified.accepted_B, judged.verified.bonus_ids_B

    ends_B = rows.starts_B + accepted_B + 1
    commit(state, rows.slots_B, ends_B, bonus_ids_B)
    commit_rows(cache, rows, num_kept_rows(judged.verified, anchors_B), batch.state_copies)
    state.retire(rows.slots_B, ends_B, judged.tokens_BL, judged.verified.fault_B)
    state.tokens.extend(rows.slots_B, judged.tokens_BL, batch.flags)
    if batch.stopper is not None and plan is not None:
        batch.stopper.observe(rows.slots_B, proposal.ids_BK, accepted_B, plan)
    if proposer is not None and batch.writes_context:
        proposer.settle(rows, token_ids_BT, ends_B, bonus_ids_B)
    num_waiting_B = torch.zeros_like(accepted_B)
    if proposer is not None and plan is not None and plan.most > 0:
        num_waiting_B = draft_next(proposer, state, rows, plan, batch.stopper, batch.flags)
    return StepOutput.of(judged, proposal.ids_BK, num_waiting_B, positions_B)


def rows_where_they_stand(rows: Rows, state: SlotState, choice: AttentionChoice) -> tuple[Rows, Tensor]:
    """Take positions from the device, where a step that the host has not read yet may have moved them.

    Requests that have ended there go on in the trash slot, at its beginning: no row needs a mask, and nothing that they
    write is read by anybody.

    Returns:
        The rows, and the same positions with -1 for requests that have ended, int64 [B].
    """
    is_alive_B = state.is_alive[rows.slots_B] > 0
    positions_B = torch.where(is_alive_B, state.lengths[rows.slots_B], -1)
    starts_B = positions_B.clamp(min=0)
    slots_B = torch.where(is_alive_B, rows.slots_B, state.trash_slot)
    rows = replace(rows, slots_B=slots_B, starts_B=starts_B)
    if rows.context_starts_B is not None:
        rows = replace(rows, context_starts_B=torch.minimum(rows.context_starts_B, starts_B))
    if choice.is_batched:  # bounds do, and the device is asked for nothing
        return rows, positions_B
    firsts_B = rows.context_starts_B
    firsts = None if firsts_B is None else firsts_B.tolist()
    return replace(rows, slots=slots_B.tolist(), starts=starts_B.tolist(), context_starts=firsts), positions_B


def draft_next(
    proposer: Proposer,
    state: SlotState,
    rows: Rows,
    plan: DevicePlan,
    stopper: DraftStopper | None,
    flags: SamplingFlags,
) -> Tensor:
    """Draw the next block of every request and keep as much of it as its plan says.

    Returns:
        Drafts that wait for the next step, int64 [B].
    """
    proposal = proposer.propose(rows, state, all_greedy=flags.all_greedy, num_drafts=plan.most)
    if plan.num_drafts_B is not None:
        proposal = first_drafts(proposal, plan.num_drafts_B)
    if stopper is not None:
        proposal = stopper.hold_back(rows.slots_B, proposal, plan)
    state.store_proposal(rows.slots_B, proposal)
    return count_drafts(proposal.ids_BK)


def run_rows(
    target: Target,
    proposer: Proposer | None,
    cache: TargetCache,
    choice: AttentionChoice,
    rows: Rows,
    token_ids_BT: Tensor,
    *,
    all_count: bool = True,
) -> Tensor:
    """Run target rows through the cache and hand their taps to the proposer; returns hidden states [B, T, D].

    Args:
        target: the model that decides.
        proposer: receives the taps; None for nobody.
        cache: the target's.
        choice: form of attention.
        rows: which.
        token_ids_BT: int64, what they hold.
        all_count: no row can be refused, as in a prompt.
    """
    row_T = torch.arange(rows.num_rows, device=token_ids_BT.device)
    positions_BT = rows.starts_B.unsqueeze(1) + row_T
    attend = attend_rows(cache, choice, rows, all_count=all_count)
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
