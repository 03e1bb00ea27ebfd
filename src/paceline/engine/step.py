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
from types import MappingProxyType
from typing import cast, get_args

import torch
from torch import Tensor

from paceline.engine.attends import AttentionChoice
from paceline.engine.draft_stopper import DevicePlan, DraftPlan, DraftStopper
from paceline.engine.log_probabilities import BlockLogprobs, RowLogprobs, entries_of
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.recurrent_state import StateCopies
from paceline.engine.request import TokenLogprobs
from paceline.engine.sampling import LogprobsMode
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.step_watch import StepWatch
from paceline.engine.target_cache import TargetCache, attend_rows, commit_rows, keeps_states, num_kept_rows
from paceline.engine.transfers import HostCopy
from paceline.engine.verifier import block_logprobs, chooses_over_ranks, judge, judge_choices, needs_choices_alone
from paceline.models.drafters.proposal import Proposal
from paceline.models.taps import TapCollector
from paceline.models.targets.target import Target
from paceline.ops.acceptance import VerifyMethod, reads_q
from paceline.ops.commit_step import ACCEPTED, FAULT, NUM_COUNTS, NUM_WAITING, NUM_ZERO_Q, POSITION
from paceline.ops.finalise_block import SOUND
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.step_rows import CacheCells, StepRows

_NO_LOGPROBS: Mapping[LogprobsMode, tuple[TokenLogprobs, ...]] = MappingProxyType({})


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
        watch: looks at what the step does, for a trace with details; None, as nearly always, for nobody.
    """

    rows: Rows
    flags: SamplingFlags
    writes_context: bool
    plan: DraftPlan | DevicePlan | None = None
    verify_method: VerifyMethod = "standard"
    stopper: DraftStopper | None = None
    grammar_mask_BTW: Tensor | None = None
    state_copies: StateCopies | None = None
    watch: StepWatch | None = None


@dataclass(frozen=True)
class StepOutput:
    """What a step decided, on the device.

    Attributes:
        report_BX: int64 [B, NUM_COUNTS + T + K], of each request the counts that `ops.commit_step` names, T tokens and
            the K drafts that were judged.
        num_rows: T.
        logprobs: of the tokens; None if no request wants any.
        num_requests: the first so many rows are requests, those behind padding; None where all are.
    """

    report_BX: Tensor
    num_rows: int
    logprobs: BlockLogprobs | None = None
    num_requests: int | None = None

    @classmethod
    def of(
        cls,
        *,
        accepted_B: Tensor,
        tokens_BT: Tensor,
        fault_B: Tensor,
        draft_ids_BK: Tensor,
        num_zero_q_B: Tensor,
        num_waiting_B: Tensor,
        positions_B: Tensor,
        logprobs: BlockLogprobs | None = None,
    ) -> StepOutput:
        """Put together what was decided elsewhere than in a decode step.

        Args:
            accepted_B: int64, drafts kept, bonus excluded.
            tokens_BT: int64, kept drafts, then the target's own token, then -1. Where there is a fault, that token is
                -1, too.
            fault_B: int64, of the row that should have supplied the token: 0 sound, 1 NaN or infinity, 2 no token is
                allowed. The kept drafts are sound.
            draft_ids_BK: int64, the drafts that were judged; -1 where there was none.
            num_zero_q_B: int64, drafts that their own distribution called impossible: a broken drafter.
            num_waiting_B: int64, drafts that wait for the next step.
            positions_B: int64, of the first row; -1 where the device saw the request's end before: its rows mean
                nothing.
            logprobs: of the tokens; None if no request wants any.
        """
        counts = (accepted_B, fault_B, num_zero_q_B, num_waiting_B, positions_B)
        report_BX = torch.cat((torch.stack(counts, dim=1), tokens_BT, draft_ids_BK), dim=1)
        return cls(report_BX, tokens_BT.shape[1], logprobs)

    @classmethod
    def resumed(cls, num_waiting_B: Tensor) -> StepOutput:
        """A pass that judged nothing and only drafted for requests whose text is known."""
        zeros_B = torch.zeros_like(num_waiting_B)
        none_B0 = zeros_B.new_empty(zeros_B.shape[0], 0)
        return cls.of(
            accepted_B=zeros_B,
            tokens_BT=none_B0,
            fault_B=zeros_B,
            draft_ids_BK=none_B0,
            num_zero_q_B=zeros_B,
            num_waiting_B=num_waiting_B,
            positions_B=torch.ones_like(zeros_B),
        )

    @property
    def accepted_B(self) -> Tensor:
        """int64, drafts kept, bonus excluded."""
        return self.report_BX[:, ACCEPTED]

    @property
    def fault_B(self) -> Tensor:
        """int64, of the row that should have supplied the target's own token."""
        return self.report_BX[:, FAULT]

    @property
    def num_zero_q_B(self) -> Tensor:
        """int64, drafts that their own distribution called impossible."""
        return self.report_BX[:, NUM_ZERO_Q]

    @property
    def num_waiting_B(self) -> Tensor:
        """int64, drafts that wait for the next step."""
        return self.report_BX[:, NUM_WAITING]

    @property
    def positions_B(self) -> Tensor:
        """int64, of the first row; -1 where the device saw the request's end before."""
        return self.report_BX[:, POSITION]

    @property
    def tokens_BT(self) -> Tensor:
        """int64, kept drafts, then the target's own token, then -1."""
        return self.report_BX[:, NUM_COUNTS : NUM_COUNTS + self.num_rows]

    @property
    def draft_ids_BK(self) -> Tensor:
        """int64, the drafts that were judged; -1 where there was none."""
        return self.report_BX[:, NUM_COUNTS + self.num_rows :]

    def send(self) -> SentOutput:
        """Start to fetch everything in one transfer."""
        integers = self.report_BX
        rows: Iterable[RowLogprobs | None] = self.logprobs or ()
        floats = [part.columns for part in rows if part is not None]
        packed = torch.cat((integers.double(), *floats), dim=1) if floats else integers
        return SentOutput(self, HostCopy(packed[: self.num_requests]), integers.shape[1])

    def to_host(self) -> list[HostStep]:
        """Fetch everything and wait for it."""
        return self.send().read()

    def unpack(self, packed: Sequence[Sequence[float]], num_integers: int) -> list[HostStep]:
        """Read what `send` packed, a row per request."""
        steps = []
        end = NUM_COUNTS + self.num_rows
        logprobs = _NO_LOGPROBS
        for numbers in packed:
            # Beside log-probabilities whole numbers come as fractions.
            whole = cast(tuple[int, ...], tuple(numbers))
            if self.logprobs is not None:
                whole = tuple(map(int, whole[:num_integers]))
            num_accepted, fault = whole[ACCEPTED], whole[FAULT]
            token_ids = whole[NUM_COUNTS : NUM_COUNTS + num_accepted + (fault == SOUND)]
            draft_ids = whole[end:]
            if NO_TOKEN in draft_ids:
                draft_ids = draft_ids[: draft_ids.index(NO_TOKEN)]
            if self.logprobs is not None:
                logprobs = self._entries(list(numbers[num_integers:]), token_ids)
            steps.append(
                HostStep(  # by position: keywords would cost half as much again
                    num_accepted,
                    fault,
                    whole[NUM_ZERO_Q],
                    token_ids,
                    draft_ids,
                    logprobs,
                    whole[NUM_WAITING],
                    whole[POSITION],
                )
            )
        return steps

    def _entries(
        self, numbers: list[float], token_ids: Sequence[int]
    ) -> Mapping[LogprobsMode, tuple[TokenLogprobs, ...]]:
        entries: dict[LogprobsMode, tuple[TokenLogprobs, ...]] = {}
        assert self.logprobs is not None, "asked for only where there are some"
        for mode in get_args(LogprobsMode):
            part: RowLogprobs | None = getattr(self.logprobs, mode)
            if part is not None:
                num_columns = part.num_columns
                entries[mode] = entries_of(numbers[:num_columns], token_ids, self.num_rows, mode)
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


@dataclass(slots=True)
class HostStep:
    """One request's part of a `StepOutput` as plain numbers.

    Attributes:
        num_accepted: drafts kept.
        fault: of the row that should have supplied the target's own token.
        num_zero_q: drafts that their own distribution called impossible.
        token_ids: kept drafts and, unless the row was bad, the target's own token.
        draft_ids: drafts that were really there.
        logprobs: of the tokens, by mode.
        num_waiting: drafts that wait for the next step.
        position: of the first row; -1 where the device saw the request's end before.
    """

    num_accepted: int
    fault: int
    num_zero_q: int
    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    logprobs: Mapping[LogprobsMode, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    num_waiting: int = 0
    position: int = 0

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
    plan, watch = None if batch.plan is None else batch.plan.on(state.device), batch.watch
    if watch is not None:
        watch.begin(batch.rows.slots)
    has_q = proposer is not None and proposer.num_candidates > 0 and not batch.flags.all_greedy
    found = state.step_rows(
        batch.rows.slots_B,
        batch.rows.num_rows - 1,
        vocab_size=target.contract.vocab_size,
        num_positions=target.position_table.shape[0],
        reads_q=has_q and reads_q(batch.verify_method),
        context_starts_B=batch.rows.context_starts_B,
        cells=CacheCells(cache.tables.table, cache.tables.block_size) if choice.reads_tables else None,
    )
    rows = rows_where_they_stand(batch.rows, found, choice)
    proposal = Proposal(found.draft_ids_BK, found.candidate_ids_BKC, found.log_q_BKC)
    fed = proposer if batch.writes_context else None
    hidden_BTD = run_rows(target, fed, cache, choice, rows, found.token_ids_BT, all_count=False)
    head, logits = target.lm_head, None
    is_enough = needs_choices_alone(batch.flags, batch.verify_method, batch.grammar_mask_BTW)
    if is_enough and chooses_over_ranks(head):
        verified = judge_choices(head, hidden_BTD, proposal.ids_BK, found, batch.flags)
    else:
        logits_BTV = target.logits(hidden_BTD)
        if watch is not None:
            watch.passed("verify")
        verified, logits = judge(
            logits_BTV,
            proposal,
            state,
            rows.slots_B,
            rows.starts_B,
            batch.flags,
            method=batch.verify_method,
            grammar_mask_BLW=batch.grammar_mask_BTW,
            rows=found,
        )
    ends_B, report_BX = state.commit(found, verified.verdict)
    output = StepOutput(report_BX, rows.num_rows)
    if keeps_states(cache):
        commit_rows(cache, rows, num_kept_rows(verified, found.anchors_B), batch.state_copies)
    state.tokens.extend(rows.slots_B, output.tokens_BT, batch.flags)
    if batch.stopper is not None and plan is not None:
        batch.stopper.observe(rows.slots_B, proposal.ids_BK, verified.accepted_B, plan)
    if watch is not None:
        watch.passed("sampling")
    if proposer is not None and batch.writes_context:
        proposer.settle(rows, found.token_ids_BT, ends_B, verified.bonus_ids_B)
    if proposer is not None and plan is not None and plan.most > 0:
        draft_next(proposer, state, rows, plan, batch.stopper, batch.flags, output.num_waiting_B)
    if watch is not None:
        watch.passed("draft")
        watch.judged(None if logits is None else logits.raw_BLV, output.draft_ids_BK, output.tokens_BT)
    logprobs = None if logits is None else block_logprobs(logits, output.tokens_BT, batch.flags)
    return output if logprobs is None else replace(output, logprobs=logprobs)


def rows_where_they_stand(rows: Rows, found: StepRows, choice: AttentionChoice) -> Rows:
    """Take positions from the device, where a step that the host has not read yet may have moved them.

    Requests that have ended there go on in the trash slot, at its beginning: no row needs a mask, and nothing that they
    write is read by anybody.
    """
    slots, starts, firsts, firsts_B = rows.slots, rows.starts, rows.context_starts, found.context_starts_B
    if not choice.is_batched:  # else bounds do, and the device is asked for nothing
        slots, starts = found.slots_B.tolist(), found.starts_B.tolist()
        firsts = None if firsts_B is None else firsts_B.tolist()
    return Rows(
        slots,
        found.slots_B,
        starts,
        found.starts_B,
        rows.num_rows,
        firsts,
        firsts_B,
        found.positions_BT,
        found.cells_BT,
    )


def draft_next(
    proposer: Proposer,
    state: SlotState,
    rows: Rows,
    plan: DevicePlan,
    stopper: DraftStopper | None,
    flags: SamplingFlags,
    waiting_B: Tensor | None = None,
) -> Tensor:
    """Draw the next block of every request and keep as much of it as its plan says.

    Args:
        proposer: draws.
        state: keeps.
        rows: the requests.
        plan: how many drafts.
        stopper: holds unlikely ones back; None where no request wants that.
        flags: of the requests.
        waiting_B: int64, written to; None makes one.

    Returns:
        Drafts that wait for the next step, int64 [B].
    """
    proposal = proposer.propose(rows, state, all_greedy=flags.all_greedy, num_drafts=plan.most)
    if stopper is not None:
        proposal = stopper.hold_back(rows.slots_B, proposal, plan)
    return state.store_proposal(rows.slots_B, proposal, wanted_B=plan.num_drafts_B, waiting_B=waiting_B)


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
    positions_BT = rows.positions_BT
    if positions_BT is None:
        positions_BT = rows.starts_B.unsqueeze(1) + torch.arange(rows.num_rows, device=token_ids_BT.device)
        # The last drafts of a request may lie beyond the position table; they also lie beyond its budget.
        positions_BT = positions_BT.clamp(max=target.position_table.shape[0] - 1)
    attend = attend_rows(cache, choice, rows, all_count=all_count)
    taps = None
    if proposer is not None:
        taps = TapCollector.of_layers(proposer.target_layer_ids, proposer.aux_hidden_stream)
    hidden_BTD: Tensor = target(token_ids_BT, positions_BT, attend, taps)
    if proposer is not None and taps is not None:
        proposer.write_context(rows, taps.collected(), positions_BT)
    return hidden_BTD
