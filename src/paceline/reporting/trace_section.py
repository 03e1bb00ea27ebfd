"""A trace as a section: figures, charts, tables, answers to draw, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.reporting.charts import Estimate
from paceline.reporting.inputs import TraceInput
from paceline.reporting.provenance import provenance_rows
from paceline.reporting.sections import BarFigure, LineFigure, Section, Table, Tile, file_name, plain, with_interval
from paceline.reporting.token_pieces import visible
from paceline.trace.acceptance import ACCEPTANCE_LENGTH_MEANS, DRAFT_ACCEPTANCE_RATE_MEANS, AcceptanceSummary
from paceline.trace.answer import TracedAnswer

if TYPE_CHECKING:
    from paceline.evaluation.rates import Rate
    from paceline.evaluation.step_times import TimeFigures
    from paceline.evaluation.trace_figures import ChanceBin, TraceFigures

_MOST_ROWS = 300


@dataclass(frozen=True)
class _Count:
    """A number of steps as a bar."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None


def trace_section(given: TraceInput, figures: TraceFigures | None) -> Section:
    """Say what a trace holds.

    Args:
        given: the trace.
        figures: of its answers with drafts; None where it has none.
    """
    provenance = [
        (f"run {number}" if len(given.runs) > 1 else "run", provenance_rows(run))
        for number, run in enumerate(given.runs, start=1)
    ]
    if figures is None:
        return Section(
            title=file_name(given.path),
            notes=["No answer of this file was drafted for: there is no acceptance to show."],
            tiles=[Tile("answers", str(len(given.plain)))],
            answers=given.plain,
            provenance=provenance,
        )
    return Section(
        title=file_name(given.path),
        notes=_notes(given, figures),
        tiles=_tiles(figures),
        bars=_bars(figures),
        lines=_lines(figures),
        tables=[*_tables(figures), _answers_table(given.drafted)],
        answers=given.drafted,
        provenance=provenance,
        figures={**asdict(figures), "summary": figures.summary.to_dict()},
    )


def _notes(given: TraceInput, figures: TraceFigures) -> list[str]:
    notes = []
    if not figures.is_lossless:
        notes.append("Not lossless: some answers were made by a method that changes the target's output.")
    if figures.num_prompts < 2:
        notes.append("One prompt has no interval: the unit of all intervals is the prompt.")
    if not any(answer.tokens for answer in given.drafted):
        notes.append("The trace has no text of tokens: ids stand for it, and there are no classes of tokens.")
    if not given.runs:
        notes.append("The trace does not say what it comes from.")
    if figures.times is not None and figures.times.parts is None:
        notes.append("Probabilities, entropies, confidences and the parts of a step need --trace-details.")
    if figures.times is not None and figures.times.break_even is None:
        notes.append("The break-even line needs plain answers: `generate --compare`, or a trace without a drafter.")
    return notes


def _tiles(figures: TraceFigures) -> list[Tile]:
    summary, length, times = figures.summary, figures.length, figures.times
    counts = f"{DRAFT_ACCEPTANCE_RATE_MEANS}: {summary.num_accepted} / {summary.num_draft_tokens}"
    tiles = [
        Tile("answers", str(figures.num_answers), f"to {figures.num_prompts} prompts"),
        Tile("method", visible(", ".join(figures.methods)), "how drafts were made"),
        Tile("output tokens", str(figures.num_output_tokens)),
        Tile("steps", str(summary.num_steps), "target passes that judged drafts"),
        Tile(
            "acceptance length",
            "-" if length is None else with_interval(length.value, length.low, length.high),
            ACCEPTANCE_LENGTH_MEANS,
        ),
        Tile("draft acceptance rate", plain(summary.draft_acceptance_rate, 3), counts),
    ]
    if times is not None:
        tiles += _time_tiles(times)
    return tiles


def _time_tiles(times: TimeFigures) -> list[Tile]:
    tiles = [
        Tile("step", plain(times.mean_ms, 2, " ms"), f"mean; median {times.median_ms:.2f}, 99 % {times.p99_ms:.2f}"),
        Tile("tokens per second", plain(times.tokens_per_second, 1), "of one answer, behind its first token"),
    ]
    if times.parts is not None:
        parts = times.parts
        says = f"draft {parts.draft_ms:.2f}, sampling {parts.sampling_ms:.2f}, host {parts.host_ms:.2f} ms"
        tiles.append(Tile("verify", plain(parts.verify_ms, 2, " ms"), f"mean of a step; {says}"))
    if times.plain_step_ms is not None:
        tiles.append(Tile("plain step", plain(times.plain_step_ms, 2, " ms"), "mean of a step without drafts"))
        tiles.append(Tile("plain tokens per second", plain(times.plain_tokens_per_second, 1)))
    if times.break_even is not None:
        tiles.append(Tile("break-even", plain(times.break_even, 3), "acceptance length from which drafting pays"))
    if times.speed_up is not None:
        tiles.append(Tile("speed-up", plain(times.speed_up, 3, "x"), "tokens per second with and without drafts"))
    return tiles


def _bars(figures: TraceFigures) -> list[BarFigure]:
    unconditional = "Share of the steps with a draft at a position that kept it."
    conditional = "Share of the steps that kept all drafts before a position and kept this one, too."
    bars = [
        BarFigure("Acceptance by position", figures.per_position, unconditional, "position", "share kept", 1.0),
        BarFigure(
            "Acceptance by position, conditional", figures.conditional, conditional, "position", "share kept", 1.0
        ),
        BarFigure(
            "Drafts kept per step",
            [_Count(str(kept), float(steps)) for kept, steps in enumerate(figures.summary.histogram)],
            "How many steps kept exactly so many drafts.",
            "drafts kept",
            "steps",
        ),
        BarFigure(
            "First refusal",
            [
                _Count(str(place) if place < len(figures.first_refusals) - 1 else "none", float(steps))
                for place, steps in enumerate(figures.first_refusals)
            ],
            "How many steps refused their first draft at each position, before stops and budget.",
            "position of the first refused draft",
            "steps",
        ),
        BarFigure(
            "Acceptance along the context",
            figures.along_context,
            "Acceptance length of the steps whose anchor stands in a range of positions.",
            "position of the anchor",
            "acceptance length",
        ),
    ]
    if figures.categories:
        says = "Acceptance length of the prompts of each category, or of each set."
        bars.append(BarFigure("Acceptance by category", figures.categories, says, "category", "acceptance length"))
    if figures.classes:
        says = "Share of judged drafts that were kept, by what kind of token came at their place."
        bars.append(BarFigure("Acceptance by token class", figures.classes, says, "class", "share kept", 1.0))
    for title, rates in (("drafter", figures.draft_entropies), ("target", figures.target_entropies)):
        if rates:
            says = f"Share of judged drafts that were kept, by the entropy of the {title}'s row in nats."
            bars.append(BarFigure(f"Acceptance by the {title}'s entropy", rates, says, "nats", "share kept", 1.0))
    parts = figures.times.parts if figures.times is not None else None
    if parts is not None:
        split = [
            _Count("verify", parts.verify_ms),
            _Count("sampling", parts.sampling_ms),
            _Count("draft", parts.draft_ms),
            _Count("host", parts.host_ms),
        ]
        says = "Mean milliseconds of a step's parts; a batched step counts in full for each of its requests."
        bars.append(BarFigure("Time of a step", split, says, "part", "ms"))
    return bars


def _lines(figures: TraceFigures) -> list[LineFigure]:
    lines = []
    curves = [("confidence head", figures.confidence), ("drafter's probability", figures.probability)]
    series = [
        (name, [(each.said, each.kept.value) for each in bins if each.kept.value is not None]) for name, bins in curves
    ]
    if any(points for _, points in series):
        lines.append(
            LineFigure(
                "Confidence against outcome",
                [*series, ("as said", [(0.0, 0.0), (1.0, 1.0)])],
                "Share of judged drafts that were kept, beside how sure the drafter was of them. On the line from "
                "corner to corner it is right about itself.",
                "said",
                "share kept",
                with_dots=True,
                from_zero=True,
            )
        )
    times, length = figures.times, figures.length
    if times is not None and times.break_even and length is not None and length.value is not None:
        longest = max(length.value, times.break_even, 2.0) * 1.25
        line = [(1.0, 1.0 / times.break_even), (longest, longest / times.break_even)]
        lines.append(
            LineFigure(
                "Where drafting pays",
                [("steps with drafts over plain steps", line)],
                f"Speed-up that an acceptance length gives at the steps' mean times; from {times.break_even:.3f} on, "
                "drafting pays.",
                "acceptance length",
                "speed-up",
                levels=[("plain", 1.0)],
                uprights=[("break-even", times.break_even), ("measured", length.value)],
                from_zero=True,
            )
        )
    return lines


def _tables(figures: TraceFigures) -> list[Table]:
    tables = []
    for title, rates in (
        ("Acceptance by position", figures.per_position),
        ("Acceptance by position, conditional", figures.conditional),
        ("Acceptance along the context", figures.along_context),
        ("Acceptance by category", figures.categories),
        ("Acceptance by token class", figures.classes),
        ("Acceptance by the drafter's entropy", figures.draft_entropies),
        ("Acceptance by the target's entropy", figures.target_entropies),
    ):
        if rates:
            tables.append(_rate_table(title, rates))
    for title, bins in (("Confidence head", figures.confidence), ("Drafter's probability", figures.probability)):
        if bins:
            tables.append(_chance_table(f"{title} against outcome", bins))
    return tables


def _rate_table(title: str, rates: Sequence[Rate]) -> Table:
    rows = [[visible(each.label), *_estimate(each), f"{each.total:g} / {each.of:g}"] for each in rates]
    return Table(title, ["", "value", "95 % interval", "counts"], rows)


def _chance_table(title: str, bins: Sequence[ChanceBin]) -> Table:
    rows = [
        [each.label, f"{each.said:.3f}", *_estimate(each.kept), f"{each.kept.total:g} / {each.kept.of:g}"]
        for each in bins
    ]
    return Table(title, ["said", "mean said", "kept", "95 % interval", "counts"], rows)


def _estimate(rate: Estimate) -> list[str]:
    interval = "-" if rate.low is None or rate.high is None else f"{rate.low:.3f} to {rate.high:.3f}"
    return [plain(rate.value, 3), interval]


def _answers_table(answers: Sequence[TracedAnswer]) -> Table:
    rows = []
    for answer in answers[:_MOST_ROWS]:
        summary, trace = AcceptanceSummary.from_steps(answer.trace.records), answer.trace
        category = "" if answer.prompt is None else answer.prompt.category or answer.prompt.set or ""
        rows.append(
            [
                visible(answer.name),
                visible(category) if category else "",
                str(trace.num_prompt_tokens),
                str(trace.num_output_tokens),
                str(summary.num_steps),
                plain(summary.acceptance_length, 2),
                visible(trace.finish_reason or "-"),
            ]
        )
    left_out = f"{len(rows)} of {len(answers)} answers are listed" if len(rows) < len(answers) else None
    head = ["answer", "category", "prompt tokens", "tokens", "steps", "acceptance length", "ended by"]
    return Table("Answers", head, rows, left_out, first_number=2)
