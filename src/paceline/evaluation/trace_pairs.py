"""Two set-ups on the same prompts: answers side by side, the steps where they differ, and what that says.

Answers are paired by prompt (set, id, turn and sample), or by their order where neither file knows its prompts. The
unit of every interval and test is the prompt; differences are B - A and ratios B / A.

Two steps are compared where both begin at the same position of the same text. Behind the token where the texts part,
nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import DataError
from paceline.evaluation.statistics import (
    Interval,
    SignTest,
    bootstrap_mean,
    bootstrap_quotient,
    bootstrap_ratio,
    sign_test,
    wilcoxon_signed_rank,
)
from paceline.evaluation.trace_figures import group_by_prompt
from paceline.trace.acceptance import AcceptanceSummary
from paceline.trace.answer import TracedAnswer
from paceline.trace.step import RequestTrace, StepRecord

_MOST_RANKED = 1500  # prompts; the exact test's work grows as their cube


@dataclass(frozen=True)
class StepPair:
    """Two steps from the same anchor that kept different numbers of drafts."""

    position: int
    before: StepRecord
    after: StepRecord


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to one question.

    Attributes:
        before: of set-up A.
        after: of set-up B.
        num_same: tokens up to where the texts part.
        is_same_text: whether they do not.
        num_shared_steps: anchors within them at which both have a step.
        differing: of these, the steps that kept different numbers of drafts.
    """

    before: TracedAnswer
    after: TracedAnswer
    num_same: int
    is_same_text: bool
    num_shared_steps: int
    differing: list[StepPair]


@dataclass(frozen=True)
class TraceComparison:
    """Everything that is said of two set-ups on the same prompts.

    Attributes:
        pairs: of answers.
        num_prompts: prompts with an answer of both.
        num_only_before: answers without a partner.
        num_only_after: likewise.
        is_by_order: paired by order, since the files do not name their prompts.
        length_before: acceptance length of A, on the paired prompts.
        length_after: of B.
        quotient: B / A, paired.
        difference: mean over prompts of B - A.
        sign: prompts on which B is longer, shorter, equal.
        wilcoxon_p_value: of the same differences; None for more than 1,500 prompts, as it is exact.
        speed: tokens per second, B / A, paired; None where a trace has no times.
    """

    pairs: list[AnswerPair]
    num_prompts: int
    num_only_before: int
    num_only_after: int
    is_by_order: bool
    length_before: Interval
    length_after: Interval
    quotient: Interval
    difference: Interval
    sign: SignTest
    wilcoxon_p_value: float | None
    speed: Interval | None

    @property
    def num_same_texts(self) -> int:
        """Pairs whose token ids are the same."""
        return sum(pair.is_same_text for pair in self.pairs)

    @property
    def num_shared_steps(self) -> int:
        """Steps of both that begin at the same anchor."""
        return sum(pair.num_shared_steps for pair in self.pairs)

    @property
    def num_differing_steps(self) -> int:
        """Of these, those that kept different numbers of drafts."""
        return sum(len(pair.differing) for pair in self.pairs)


def compare_traces(before: Sequence[TracedAnswer], after: Sequence[TracedAnswer]) -> TraceComparison:
    """Compare two set-ups.

    Args:
        before: answers of set-up A.
        after: of set-up B.

    Raises:
        DataError: no question in common, one that is another in either file, or no step that judged drafts.
    """
    found, is_by_order = _paired(before, after)
    pairs = [_pair(*each) for each in found]
    units = group_by_prompt([pair.before for pair in pairs])
    by_answer = {id(pair.before): pair for pair in pairs}
    sides = [[by_answer[id(answer)] for answer in unit] for unit in units]
    counts = [(_counts(pair.before for pair in unit), _counts(pair.after for pair in unit)) for unit in sides]
    judged = [index for index, (a, b) in enumerate(counts) if a[1] and b[1]]
    if not judged:
        raise DataError(
            "no prompt has steps that judged drafts in both files, so there is nothing to compare",
            hint="two traces of runs with a drafter; a plain one beside a drafted one is shown without a comparison",
        )
    a, b = [counts[index][0] for index in judged], [counts[index][1] for index in judged]
    differences = [y[0] / y[1] - x[0] / x[1] for x, y in zip(a, b, strict=True)]
    return TraceComparison(
        pairs=pairs,
        num_prompts=len(judged),
        num_only_before=len(before) - len(pairs),
        num_only_after=len(after) - len(pairs),
        is_by_order=is_by_order,
        length_before=bootstrap_ratio(*zip(*a, strict=True)),
        length_after=bootstrap_ratio(*zip(*b, strict=True)),
        quotient=bootstrap_quotient(b, a),
        difference=bootstrap_mean(differences),
        sign=sign_test(differences),
        wilcoxon_p_value=wilcoxon_signed_rank(differences) if len(differences) <= _MOST_RANKED else None,
        speed=_speed([sides[index] for index in judged]),
    )


def _paired(
    before: Sequence[TracedAnswer], after: Sequence[TracedAnswer]
) -> tuple[list[tuple[TracedAnswer, TracedAnswer]], bool]:
    if any(each.prompt is None for each in (*before, *after)):
        if len(before) != len(after):
            raise DataError(
                f"one file has {len(before)} answers, the other {len(after)}, and not all of them name their prompts",
                hint="traces of this version, which do, or two of the same number of answers",
            )
        pairs = list(zip(before, after, strict=True))
        for number, (a, b) in enumerate(pairs, start=1):
            if a.trace.num_prompt_tokens != b.trace.num_prompt_tokens:
                raise DataError(
                    f"answer {number} has a prompt of {a.trace.num_prompt_tokens} tokens in one file and of "
                    f"{b.trace.num_prompt_tokens} in the other: they answer different prompts"
                )
        return pairs, True
    for with_set in (True, False):  # a set's name is its file's, and one prompt may stand in two files
        first, second = _by_question(before, with_set), _by_question(after, with_set)
        shared = [key for key in first if key in second]
        if shared:
            break
    else:
        raise DataError(
            "the two files have no question in common: their answers name different prompts",
            hint="two runs over the same prompt file",
        )
    pairs = [(first[key], second[key]) for key in shared]
    others = [a.name for a, b in pairs if not _is_same_question(a, b)]
    if others:
        raise DataError(
            f"{len(others)} of {len(pairs)} questions are others in the two files, such as {others[0]!r}: their "
            "prompts have different tokens",
            hint="two runs over the same prompt file, with the same target, template and system message",
        )
    return pairs, False


def _by_question(answers: Sequence[TracedAnswer], with_set: bool) -> Mapping[object, TracedAnswer]:
    """Of a question that was answered several times the last answer counts."""
    found: dict[object, TracedAnswer] = {}
    for answer in answers:
        assert answer.prompt is not None, "asked for only where all are known"
        found[answer.prompt.key if with_set else answer.prompt.key[1:]] = answer
    return found


def _is_same_question(a: TracedAnswer, b: TracedAnswer) -> bool:
    if a.prompt is None or b.prompt is None or a.prompt.sha256 is None or b.prompt.sha256 is None:
        return a.trace.num_prompt_tokens == b.trace.num_prompt_tokens
    # The second turn's question holds the answer to the first, which sampling may have made another one.
    return a.prompt.sha256 == b.prompt.sha256 or a.prompt.turn > 0


def _pair(before: TracedAnswer, after: TracedAnswer) -> AnswerPair:
    a, b = before.trace.token_ids, after.trace.token_ids
    num_same = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    first, second = _steps_within(before.trace, num_same), _steps_within(after.trace, num_same)
    shared = [place for place in first if place in second]
    differing = [
        StepPair(place, first[place], second[place])
        for place in shared
        if first[place].num_accepted != second[place].num_accepted
    ]
    return AnswerPair(before, after, num_same, a == b, len(shared), differing)


def _steps_within(trace: RequestTrace, num_same: int) -> dict[int, StepRecord]:
    """Steps by how many tokens were delivered before their drafts, as far as these are the same in both."""
    found, num_before = {}, 0 if trace.first_token_id is None else 1
    for record in trace.records:
        if num_before <= num_same and record.num_draft_tokens:
            found[num_before] = record
        num_before += len(record.emitted_ids)
    return found


def _counts(answers: Iterable[TracedAnswer]) -> tuple[float, float]:
    """Committed tokens and steps."""
    records = [record for answer in answers for record in answer.trace.records]
    summary = AcceptanceSummary.from_steps(records)
    return float(summary.num_steps + summary.num_accepted), float(summary.num_steps)


def _speed(units: Sequence[Sequence[AnswerPair]]) -> Interval | None:
    def timed(answers: Sequence[TracedAnswer]) -> tuple[float, float]:
        seconds = sum(max(0.0, each.trace.total_ms - each.trace.prefill_ms) for each in answers) / 1e3
        return float(sum(max(0, each.trace.num_output_tokens - 1) for each in answers)), seconds

    before = [timed([pair.before for pair in unit]) for unit in units]
    after = [timed([pair.after for pair in unit]) for unit in units]
    if any(not tokens or not seconds for tokens, seconds in (*before, *after)):
        return None
    return bootstrap_quotient(after, before)
