"""The host's side of a request on its way through the engine: what it delivered, where it stands, how it ended."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.engine.admission import TokenLimits
from paceline.engine.draft_length import DraftLengthMode
from paceline.engine.held_blocks import HeldBlocks
from paceline.engine.output import Extension, RequestOutput
from paceline.engine.request import FinishReason, RequestDelta, RequestResult, SamplingParameters, TokenLogprobs
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.step import HostStep
from paceline.engine.step_kind import GREEDY_STEP, GREEDY_TEXT, StepKind, TextKind
from paceline.ops.acceptance import VerifyMethod, is_lossless
from paceline.ops.finalise_block import NOT_A_NUMBER, NOTHING_LEFT, SOUND
from paceline.trace.step import RequestTrace, StepRecord

if TYPE_CHECKING:
    from paceline.engine.grammar import GrammarState
    from paceline.engine.step_watch import StepWatch

_log = logging.getLogger(__name__)


# A request is itself; comparing all fields would make a long queue slow. It has more of them than Python keeps well
# outside of slots, and they are asked for many times in every step.
@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request that was accepted and has not ended.

    Attributes:
        request_id: unique among requests that have not ended.
        prompt_ids: checked.
        sampling: as asked for.
        seed: the one asked for, or one drawn for it.
        output: its tokens and text.
        trace: its steps.
        flags: its sampling settings, summarised.
        limits: its rules on tokens.
        grammar: where it stands in the form its text must have; None if it has none.
        sample_index: which of its prompt's samples it is.
        verify_method: how its drafts are judged.
        priority: lower ones are served first.
        arrival: counts requests up; of equal priority the earlier one is served first.
        deadline_s: when its time is up, on the clock of the scheduler; None for never.
        timeout_s: what the deadline was set to, for the message.
        cache_salt: it shares cached blocks with requests of the same salt alone; None is a salt, too.
        held: its blocks, and what is known of them.
        slot: None while it waits.
        prefill_goal: tokens that are run before it decodes: its prompt, and all but the last token that it delivered
            where it is resumed.
        num_prefilled: of them, those that were run or found cached so far.
        admission: counts admissions up; the latest of all steps back first.
        epoch: how often what the device has of it became void; results of a step launched before are dropped.
        num_cached_tokens: found cached at its first admission.
        num_preemptions: how often it stepped back.
        context_start: the largest that an admission found, see `HeldBlocks`.
        step_kind: the kind of steps that it is in when it is alone.
        text_kind: what its drafts are judged against.
        draft_length: its mode.
        is_drafted: whether drafts are made for it; once false, false for good.
        num_drawn: drafts drawn for its next step.
        num_waiting: of them, those that were not held back; what its next step verifies.
        has_bad_numbers: whether its logits held NaN or infinity.
        has_dead_end: whether its rules left no token.
        grammar_error: why its grammar allows nothing, if it once does not.
        admitted_s: when it got its slot, on the performance counter.
        stop_reason: the stop token or stop text that ended it.
        error: what happened, where it ends with the reason "error".
        logprobs: one entry per delivered token, if any were asked for.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters
    seed: int
    output: RequestOutput
    trace: RequestTrace
    flags: SamplingFlags
    limits: TokenLimits = field(default_factory=TokenLimits)
    grammar: GrammarState | None = None
    sample_index: int = 0
    verify_method: VerifyMethod = "standard"
    priority: int = 0
    arrival: int = 0
    deadline_s: float | None = None
    timeout_s: float | None = None
    cache_salt: str | None = None
    held: HeldBlocks = field(default_factory=HeldBlocks)
    slot: int | None = None
    prefill_goal: int = -1
    num_prefilled: int = 0
    admission: int = 0
    epoch: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    context_start: int = 0
    step_kind: StepKind = GREEDY_STEP
    text_kind: TextKind = GREEDY_TEXT
    draft_length: DraftLengthMode = "fixed"
    is_drafted: bool = False
    num_drawn: int = 0
    num_waiting: int = 0
    has_bad_numbers: bool = False
    has_dead_end: bool = False
    grammar_error: str | None = None
    admitted_s: float | None = None
    stop_reason: int | str | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _has_limits: bool = field(init=False)
    _num_before: int = field(init=False)

    def __post_init__(self) -> None:
        self._has_limits = self.limits != TokenLimits()
        self._num_before = len(self.prompt_ids) - 1
        if self.prefill_goal < 0:
            self.prefill_goal = len(self.prompt_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is done and it takes part in decode steps."""
        return self.slot is not None and self.num_prefilled == self.prefill_goal

    @property
    def is_resumed(self) -> bool:
        """Whether the text that is run before it decodes ends with tokens of its own."""
        return bool(self.output.token_ids)

    @property
    def text_ids(self) -> list[int]:
        """Prompt and everything delivered, the anchor included."""
        return [*self.prompt_ids, *self.output.token_ids]

    @property
    def num_cached(self) -> int:
        """n while decoding: everything but the last emitted token has been run."""
        return self._num_before + len(self.output.token_ids)

    @property
    def num_final(self) -> int:
        """Positions whose keys are final and were found sound: logits behind them were, or they were before."""
        if not self.output.token_ids:
            return self.held.num_hit
        return self.num_cached if self.num_prefilled == self.prefill_goal else self.num_prefilled

    @property
    def has_token_rules(self) -> bool:
        """Whether drafts may be refused for what the target alone knows."""
        return self.grammar is not None or self._has_limits

    @property
    def is_plain_greedy(self) -> bool:
        """Whether it takes the most likely token at every position, and no rule is in the way."""
        return self.flags.all_greedy and self.grammar is None and not self._has_limits

    def take_first(self, step: HostStep) -> RequestDelta:
        """Take in the token that the prompt pass gave, if it gave one."""
        self.has_bad_numbers = step.fault == NOT_A_NUMBER
        extension = self._extend(step)
        self.num_prefilled = self.prefill_goal
        self.trace.first_token_id = next(iter(self.output.token_ids), None)
        return self._delta(extension, step, step.token_ids[: extension.num_kept], None)

    def take_step(self, step: HostStep, step_ms: float, watch: StepWatch | None = None) -> RequestDelta:
        """Take in one decode step: keep what counts, and record both what was verified and what was kept.

        A draft whose keys overflow spoils the rows before it, too (0 * NaN is NaN), though the request's own text may
        be sound. So numbers are the request's own fault only in a step without drafts.
        """
        anchor_position, anchor_id = self.num_cached, self.output.token_ids[-1]
        self.has_bad_numbers = step.fault == NOT_A_NUMBER and not step.draft_ids
        kept, num_accepted, records = step.token_ids, step.num_accepted, self.trace.records
        is_plain = step.fault == SOUND and self.grammar is None and self.sampling.logprobs is None
        text = self.output.extend_within(kept) if is_plain else None
        extension = None
        if text is None:
            extension = self._extend(step)
            kept = kept[: extension.num_kept]
        num_kept = len(kept)
        num_delivered = num_accepted if num_accepted < num_kept else num_kept
        bonus_id = kept[-1] if num_kept == num_accepted + 1 else None
        record = StepRecord(  # by position: keywords double what it takes
            self.request_id,
            len(records),
            anchor_position,
            anchor_id,
            step.draft_ids,
            num_accepted,
            num_delivered,
            kept,
            bonus_id,
            step_ms,
        )
        if watch is not None and self.slot is not None:
            record.details = watch.details_of(self.slot, record)
        records.append(record)
        if text is not None:
            return RequestDelta(self.request_id, kept, text, None, record)
        assert extension is not None, "where the text is not known"
        return self._delta(extension, step, kept, record)

    def fail(self, error: Exception, *, doing: str | None = None) -> RequestDelta:
        """End where it is, because of something that is not in its numbers."""
        what = f"{type(error).__name__}: {error}"
        self.error = what if doing is None else f"{doing}: {what}"
        self.finish_reason = "error"
        _log.error("request %s ends: %s", self.request_id, self.error, exc_info=error)
        return RequestDelta(self.request_id, (), self.output.finish(), "error")

    def expire(self) -> RequestDelta:
        """End where it is, because its time is up."""
        state = "waiting" if self.slot is None else "running"
        self.error = f"its timeout_s of {self.timeout_s:g} was up while it was {state}"
        self.finish_reason = "abort"
        return RequestDelta(self.request_id, (), self.output.finish(), "abort")

    def _extend(self, step: HostStep) -> Extension:
        """Hand tokens to the output, as far as the grammar goes."""
        token_ids = step.token_ids
        if self.grammar is None:
            return self.output.extend(token_ids)
        for index, token in enumerate(token_ids):
            self.grammar.advance((token,))
            if self.grammar.is_finished:
                # Nothing but a stop could follow. Ending right here gives the same tokens wherever blocks end.
                return self.output.extend(token_ids[: index + 1], is_complete=True)
        return self.output.extend(token_ids)

    def _delta(
        self, extension: Extension, step: HostStep, kept: tuple[int, ...], record: StepRecord | None
    ) -> RequestDelta:
        num_kept, text, reason, self.stop_reason = extension
        if reason is None and (self.has_bad_numbers or step.fault == NOTHING_LEFT):
            reason, text = "error", text + self.output.finish()
            self.error = self._fault_text()
            self.has_dead_end = not self.has_bad_numbers
        logprobs = None
        if self.sampling.logprobs is not None:
            logprobs = self._kept_logprobs(step, num_kept, self.sampling.logprobs)
            self.logprobs.extend(logprobs)
        self.finish_reason = reason
        return RequestDelta(self.request_id, kept, text, reason, record, logprobs)

    def _kept_logprobs(self, step: HostStep, num_kept: int, num_top: int) -> tuple[TokenLogprobs, ...]:
        """As many best tokens as this request asked for; a neighbour may have asked for more."""
        entries = step.logprobs[self.sampling.logprobs_mode][:num_kept]
        return tuple(replace(entry, top=entry.top[:num_top]) for entry in entries)

    def _fault_text(self) -> str:
        position = len(self.prompt_ids) + len(self.output.token_ids)
        if self.has_bad_numbers:
            return f"numbers: the target's logits for position {position} hold NaN or infinity"
        wanted = self.sampling
        rules = {
            "structured_output": wanted.structured_output is not None,
            "allowed_token_ids": wanted.allowed_token_ids is not None,
            "min_tokens": len(self.output.token_ids) < wanted.min_tokens,
            "bad_words": bool(wanted.bad_words),
        }
        names = ", ".join(name for name, is_used in rules.items() if is_used) or "the target's own logits"
        reason = f" ({self.grammar_error})" if self.grammar_error is not None else ""
        return f"no token is allowed: {names} left none for position {position}{reason}"

    def result(self, reason: FinishReason) -> RequestResult:
        """Close the trace and give the final record."""
        self.trace.finish_reason = reason
        if self.admitted_s is not None:
            self.trace.total_ms = (time.perf_counter() - self.admitted_s) * 1e3
        return RequestResult(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.output.token_ids),
            text=self.output.text,
            finish_reason=reason,
            stop_reason=self.stop_reason,
            trace=self.trace,
            logprobs=tuple(self.logprobs) if self.sampling.logprobs is not None else None,
            error=self.error,
            sample_index=self.sample_index,
            verify_method=self.verify_method,
            is_lossless=is_lossless(self.verify_method),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            context_start=self.context_start,
            has_dead_end=self.has_dead_end,
        )
