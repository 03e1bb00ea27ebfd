"""How long steps took: in all, by part where the trace has details, and against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.trace.answer import TracedAnswer


@dataclass(frozen=True)
class StepParts:
    """Mean milliseconds of a step's parts, over the steps that have them."""

    verify_ms: float
    sampling_ms: float
    draft_ms: float
    host_ms: float
    num_steps: int


@dataclass(frozen=True)
class TimeFigures:
    """Times of steps; a batched step counts in full for each of its requests.

    Attributes:
        mean_ms: of a step that judged drafts.
        median_ms: likewise.
        p99_ms: likewise.
        parts: what they consist of; None where the trace has no details.
        tokens_per_second: of one answer, behind its first token.
        plain_step_ms: mean of a step without drafts, of plain answers; None where there are none.
        plain_tokens_per_second: of those; of the same prompts where both have any.
        break_even: acceptance length from which drafting pays, `mean_ms / plain_step_ms`.
        speed_up: tokens per second with drafts over those without.
    """

    mean_ms: float
    median_ms: float
    p99_ms: float
    parts: StepParts | None
    tokens_per_second: float | None
    plain_step_ms: float | None = None
    plain_tokens_per_second: float | None = None
    break_even: float | None = None
    speed_up: float | None = None


def time_figures(answers: Sequence[TracedAnswer], plain: Sequence[TracedAnswer] = ()) -> TimeFigures | None:
    """Take times together.

    Args:
        answers: with drafts.
        plain: without; may be empty.

    Returns:
        None where no step judged a draft.
    """
    if plain:
        answers, plain = _of_same_prompts(answers, plain)
    steps_ms = [record.step_ms for each in answers for record in each.trace.records if record.num_draft_tokens]
    if not steps_ms:
        return None
    mean_ms, speed = fmean(steps_ms), tokens_per_second(answers)
    median_ms, p99_ms = (float(value) for value in np.percentile(steps_ms, [50, 99]))
    plain_ms = [record.step_ms for each in plain for record in each.trace.records]
    plain_step_ms, plain_speed = (fmean(plain_ms) if plain_ms else None), tokens_per_second(plain)
    return TimeFigures(
        mean_ms=mean_ms,
        median_ms=median_ms,
        p99_ms=p99_ms,
        parts=_parts(answers),
        tokens_per_second=speed,
        plain_step_ms=plain_step_ms,
        plain_tokens_per_second=plain_speed,
        break_even=mean_ms / plain_step_ms if plain_step_ms else None,
        speed_up=speed / plain_speed if speed and plain_speed else None,
    )


def tokens_per_second(answers: Sequence[TracedAnswer]) -> float | None:
    """Tokens behind the first per second of decoding, over several answers; None without any time."""
    seconds = sum(max(0.0, each.trace.total_ms - each.trace.prefill_ms) for each in answers) / 1e3
    num_tokens = sum(max(0, each.trace.num_output_tokens - 1) for each in answers)
    return num_tokens / seconds if num_tokens and seconds > 0 else None


def _of_same_prompts(
    answers: Sequence[TracedAnswer], plain: Sequence[TracedAnswer]
) -> tuple[list[TracedAnswer], list[TracedAnswer]]:
    """Those whose question both have answered, or all where no question is known."""
    both = {each.prompt.key for each in answers if each.prompt} & {each.prompt.key for each in plain if each.prompt}
    if not both:
        return list(answers), list(plain)
    return (
        [each for each in answers if each.prompt is not None and each.prompt.key in both],
        [each for each in plain if each.prompt is not None and each.prompt.key in both],
    )


def _parts(answers: Sequence[TracedAnswer]) -> StepParts | None:
    found = [
        record.details
        for each in answers
        for record in each.trace.records
        if record.details is not None and record.num_draft_tokens
    ]
    if not found:
        return None
    return StepParts(
        verify_ms=fmean(details.verify_ms for details in found),
        sampling_ms=fmean(details.sampling_ms for details in found),
        draft_ms=fmean(details.draft_ms for details in found),
        host_ms=fmean(details.host_ms for details in found),
        num_steps=len(found),
    )
