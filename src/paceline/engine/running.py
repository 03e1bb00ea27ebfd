"""The host's side of a request on its way through the engine: what it delivered, where it stands, how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.engine.output import Extension, RequestOutput
from paceline.engine.request import FinishReason, RequestDelta, RequestResult, SamplingParameters
from paceline.engine.slots import SamplingFlags
from paceline.engine.step import HostStep
from paceline.trace.step import RequestTrace, StepRecord


@dataclass
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
        slot: None while it waits.
        num_prefilled: prompt tokens run so far.
        is_drafted: whether drafts are made for it; once false, false for good.
        has_bad_numbers: whether its logits held NaN or infinity.
        admitted_s: when it got its slot, on the performance counter.
        stop_reason: the stop token or text that ended it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParameters
    seed: int
    output: RequestOutput
    trace: RequestTrace
    flags: SamplingFlags
    slot: int | None = None
    num_prefilled: int = 0
    is_drafted: bool = False
    has_bad_numbers: bool = False
    admitted_s: float | None = None
    stop_reason: int | str | None = None
    finish_reason: FinishReason | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is done and it takes part in decode steps."""
        return self.slot is not None and self.num_prefilled == len(self.prompt_ids)

    @property
    def num_cached(self) -> int:
        """n while decoding: everything but the last emitted token has been run."""
        return len(self.prompt_ids) + len(self.output.token_ids) - 1

    def take_first(self, token_id: int) -> RequestDelta:
        """Take in the token that the prompt pass gave; -1 for none."""
        self.has_bad_numbers = token_id < 0
        extension = self.output.extend([] if self.has_bad_numbers else [token_id])
        self.num_prefilled = len(self.prompt_ids)
        self.trace.first_token_id = None if self.has_bad_numbers else token_id
        return self._delta(extension, tuple(self.output.token_ids), None)

    def take_step(self, step: HostStep, step_ms: float) -> RequestDelta:
        """Take in one decode step: keep what counts, and record both what was verified and what was kept.

        A draft whose keys overflow spoils the rows before it, too (0 * NaN is NaN), though the request's own text may
        be sound. So numbers are the request's own fault only in a step without drafts.
        """
        anchor_position, anchor_id = self.num_cached, self.output.token_ids[-1]
        token_ids = step.token_ids
        self.has_bad_numbers = step.is_bad and not step.draft_ids
        extension = self.output.extend(token_ids)
        kept = tuple(token_ids[: extension.num_kept])
        record = StepRecord(
            request_id=self.request_id,
            step_index=len(self.trace.records),
            anchor_position=anchor_position,
            anchor_id=anchor_id,
            proposed_ids=step.draft_ids,
            num_verified_accepted=step.num_accepted,
            num_accepted=min(step.num_accepted, extension.num_kept),
            emitted_ids=kept,
            bonus_id=kept[-1] if extension.num_kept == step.num_accepted + 1 else None,
            step_ms=step_ms,
        )
        self.trace.records.append(record)
        return self._delta(extension, kept, record)

    def _delta(self, extension: Extension, kept: tuple[int, ...], record: StepRecord | None) -> RequestDelta:
        reason, text = extension.finish_reason, extension.text
        if reason is None and self.has_bad_numbers:
            reason, text = "error", text + self.output.finish()
        self.stop_reason, self.finish_reason = extension.stop_reason, reason
        return RequestDelta(self.request_id, kept, text, reason, record)

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
        )
