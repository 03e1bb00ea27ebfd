"""The figures of a trace: what was kept, where, of which kind of text, how sure the models were, and how long it took.

Everything is counted over all answers, whatever is drawn of them. Acceptance has the words of `trace/acceptance.py`;
the rest:

    along the context    acceptance length of the steps whose anchor stands in a range of positions
    by class             kept / judged drafts, by the class of the token that really came at the draft's place
    calibration          drafts judged, by how sure the drafter was, beside the share that was kept
    entropy              kept / judged drafts, by the entropy of the row that they were drawn or judged in
    break-even           ms per step with drafts / ms per plain step: the acceptance length from which drafting pays

A draft is judged where all before it were kept: the kept ones, and the refused one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.evaluation.rates import Rate, RateTable
from paceline.evaluation.step_times import TimeFigures, time_figures
from paceline.evaluation.token_classes import TOKEN_CLASSES, TokenClassifier
from paceline.trace.acceptance import AcceptanceSummary, count_positions
from paceline.trace.answer import TracedAnswer
from paceline.trace.step import StepRecord

_NUM_CONTEXT_BINS = 8
_NUM_CHANCE_BINS = 10
_ENTROPY_EDGES = (0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)  # nats


@dataclass(frozen=True)
class ChanceBin:
    """Drafts of which the drafter was about equally sure.

    Attributes:
        label: range of what it said.
        said: mean of what it said.
        kept: share of them that was kept, with its interval.
    """

    label: str
    said: float
    kept: Rate


@dataclass(frozen=True)
class TraceFigures:
    """All figures of a trace.

    Attributes:
        num_prompts: different ones.
        num_answers: to them.
        num_output_tokens: delivered.
        summary: acceptance over all steps.
        length: acceptance length with its interval; None without a step that judged drafts.
        per_position: share of steps that kept each position's draft, with intervals.
        conditional: the same among steps that kept all before it.
        first_refusals: steps whose first refused draft stood at each position, and last those that refused none.
        along_context: acceptance length by where the anchor stood.
        categories: acceptance length by set or category; empty where there is but one.
        classes: kept drafts by class of the token that came; empty where the trace has no text.
        confidence: what a confidence head said against what came; empty where the trace has none.
        probability: the drafter's own probability of its draft against what came; empty likewise.
        draft_entropies: kept drafts by the drafter's entropy; empty likewise.
        target_entropies: by the target's; empty likewise.
        times: of steps; None without steps.
        is_lossless: whether every answer was made by a method that keeps the target's output.
        methods: how drafts were made, such as "dflash/greedy".
    """

    num_prompts: int
    num_answers: int
    num_output_tokens: int
    summary: AcceptanceSummary
    length: Rate | None
    per_position: list[Rate]
    conditional: list[Rate]
    first_refusals: list[int]
    along_context: list[Rate]
    categories: list[Rate]
    classes: list[Rate]
    confidence: list[ChanceBin]
    probability: list[ChanceBin]
    draft_entropies: list[Rate]
    target_entropies: list[Rate]
    times: TimeFigures | None
    is_lossless: bool
    methods: list[str]


def trace_figures(answers: Sequence[TracedAnswer], plain: Sequence[TracedAnswer] = ()) -> TraceFigures:
    """Count everything.

    Args:
        answers: with drafts; those of one prompt count as one unit.
        plain: answers of the same target without a drafter, for the times.
    """
    units = group_by_prompt(answers)
    table = RateTable(len(units))
    records = [record for unit in units for answer in unit for record in answer.trace.records]
    first, width = _context_bins([record.anchor_position for record in records if record.num_draft_tokens])
    for index, unit in enumerate(units):
        _add_acceptance(table, index, unit, first, width)
        for answer in unit:
            _add_classes(table, index, answer)
            for record in answer.trace.records:
                _add_details(table, index, record)
    summary = AcceptanceSummary.from_steps(records)
    depths = range(len(summary.per_position))
    length = table.rates("length")
    bins = [_context_label(first, width, number) for number in range(_NUM_CONTEXT_BINS)]
    categories = table.rates("category")
    return TraceFigures(
        num_prompts=len(units),
        num_answers=len(answers),
        num_output_tokens=sum(answer.trace.num_output_tokens for answer in answers),
        summary=summary,
        length=length[0] if length else None,
        per_position=table.rates("position", depths),
        conditional=table.rates("conditional", depths),
        first_refusals=_first_refusals(records, len(depths)),
        along_context=table.rates("context", bins),
        categories=categories if len(categories) > 1 else [],
        classes=table.rates("class", TOKEN_CLASSES),
        confidence=_chance_bins(table, "confidence"),
        probability=_chance_bins(table, "probability"),
        draft_entropies=table.rates("draft entropy", _ENTROPY_LABELS),
        target_entropies=table.rates("target entropy", _ENTROPY_LABELS),
        times=time_figures(answers, plain),
        is_lossless=all(answer.trace.lossless for answer in answers),
        methods=sorted({answer.trace.method for answer in answers}),
    )


def group_by_prompt(answers: Sequence[TracedAnswer]) -> list[list[TracedAnswer]]:
    """Answers of one prompt together: its turns, its samples, and where it was asked again; else each alone."""
    groups: dict[object, list[TracedAnswer]] = {}
    for index, answer in enumerate(answers):
        key = index if answer.prompt is None else (answer.prompt.set, answer.prompt.id)
        groups.setdefault(key, []).append(answer)
    return list(groups.values())


def _add_acceptance(table: RateTable, unit: int, answers: Sequence[TracedAnswer], first: int, width: int) -> None:
    steps = []
    for answer in answers:
        for record in answer.trace.records:
            if record.num_draft_tokens == 0:
                continue
            steps.append((record.num_draft_tokens, record.num_accepted))
            committed = 1 + record.num_accepted
            table.add(unit, "length", "all", committed)
            label = _context_label(first, width, (record.anchor_position - first) // width)
            table.add(unit, "context", label, committed)
            if answer.prompt is not None:
                table.add(unit, "category", answer.prompt.category or answer.prompt.set or "none", committed)
    counts = count_positions(steps)
    for position, (kept, had_draft, reached) in enumerate(zip(*counts, strict=True)):
        table.add(unit, "position", position, kept, had_draft)
        table.add(unit, "conditional", position, kept, reached)


def _add_classes(table: RateTable, unit: int, answer: TracedAnswer) -> None:
    if not answer.tokens:
        return
    classifier, trace = TokenClassifier(), answer.trace
    if trace.first_token_id is not None:
        classifier.advance(answer.decode([trace.first_token_id]))
    for record in trace.records:
        for position, token in enumerate(record.emitted_ids):
            found = classifier.advance(answer.decode([token]))
            if position < record.num_draft_tokens:  # else it came behind a block that was kept whole
                table.add(unit, "class", found, position < record.num_accepted)


def _add_details(table: RateTable, unit: int, record: StepRecord) -> None:
    details = record.details
    if details is None:
        return
    for position in range(min(record.num_draft_tokens, record.num_verified_accepted + 1)):
        is_kept = position < record.num_verified_accepted
        if position < len(details.confidences):
            _add_chance(table, unit, "confidence", details.confidences[position], is_kept)
        if position < len(details.draft_logprobs):
            _add_chance(table, unit, "probability", math.exp(min(0.0, details.draft_logprobs[position])), is_kept)
        if position < len(details.draft_entropies):
            label = _entropy_label(details.draft_entropies[position])
            table.add(unit, "draft entropy", label, is_kept)
        if position < len(details.target_entropies):
            table.add(unit, "target entropy", _entropy_label(details.target_entropies[position]), is_kept)


def _add_chance(table: RateTable, unit: int, name: str, chance: float, is_kept: bool) -> None:
    number = min(_NUM_CHANCE_BINS - 1, max(0, int(chance * _NUM_CHANCE_BINS)))
    table.add(unit, name, number, is_kept)
    table.add(unit, f"{name} said", number, chance)


def _chance_bins(table: RateTable, name: str) -> list[ChanceBin]:
    numbers = range(_NUM_CHANCE_BINS)
    bins = []
    for kept, said in zip(table.rates(name, numbers), table.rates(f"{name} said", numbers), strict=True):
        number = int(kept.label)
        label = f"{number / _NUM_CHANCE_BINS:.1f}–{(number + 1) / _NUM_CHANCE_BINS:.1f}"
        bins.append(ChanceBin(label, said.value or 0.0, kept))
    return bins


def _first_refusals(records: Sequence[StepRecord], depth: int) -> list[int]:
    counts = [0] * (depth + 1)
    for record in records:
        if record.num_draft_tokens:
            refused = record.refused_id is not None
            counts[record.num_verified_accepted if refused else depth] += 1
    return counts


def _context_bins(positions: Sequence[int]) -> tuple[int, int]:
    """Where the first range of positions begins, and how wide each is: a round number."""
    if not positions:
        return 0, 1
    first, last = min(positions), max(positions)
    width = max(1, -(-(last + 1 - first) // _NUM_CONTEXT_BINS))
    step = 10 ** max(0, len(str(width)) - 2)
    width = -(-width // step) * step
    return first // step * step, width + (step if first % step else 0)


def _context_label(first: int, width: int, number: int) -> str:
    begin = first + number * width
    return f"{begin}–{begin + width - 1}" if width > 1 else str(begin)


def _entropy_label(entropy: float) -> str:
    number = sum(entropy >= edge for edge in _ENTROPY_EDGES[1:-1])
    return _ENTROPY_LABELS[number]


_ENTROPY_LABELS = [
    f"{low:g}–{high:g}" if high < math.inf else f"{low:g} and more" for low, high in itertools.pairwise(_ENTROPY_EDGES)
]
