"""What a report says, before it is drawn: the same sections go to a terminal and into a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.reporting.charts import Estimate
from paceline.reporting.token_pieces import visible
from paceline.trace.answer import TracedAnswer

if TYPE_CHECKING:
    from paceline.evaluation.trace_pairs import AnswerPair


@dataclass(frozen=True)
class Tile:
    """One figure with its name and what it means."""

    label: str
    value: str
    means: str = ""


@dataclass(frozen=True)
class BarFigure:
    """Ratios side by side, with their intervals; arguments of `charts.bar_chart`."""

    title: str
    estimates: Sequence[Estimate]
    says: str
    x_label: str
    y_label: str
    top: float | None = None
    base: float = 0.0


@dataclass(frozen=True)
class LineFigure:
    """Curves; arguments of `charts.line_chart`."""

    title: str
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    says: str
    x_label: str
    y_label: str
    levels: Sequence[tuple[str, float]] = ()
    uprights: Sequence[tuple[str, float]] = ()
    with_dots: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; columns from `first_number` on are figures."""

    title: str
    head: list[str]
    rows: list[list[str]]
    left_out: str | None = None
    first_number: int = 1


@dataclass(frozen=True)
class Section:
    """A part of a report, made of one input or of two.

    Attributes:
        title: over it.
        notes: sentences at its top: what is missing, what to mind.
        tiles: single figures.
        bars: ratios.
        lines: curves.
        tables: of text.
        answers: of a trace, to be drawn.
        pairs: two answers to one question each, to be drawn one above the other.
        provenance: titled lists of names and values.
        figures: the same as plain JSON values, for programs.
    """

    title: str
    notes: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    bars: list[BarFigure] = field(default_factory=list)
    lines: list[LineFigure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    answers: list[TracedAnswer] = field(default_factory=list)
    pairs: Sequence[AnswerPair] = ()
    provenance: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    figures: object = None


@dataclass(frozen=True)
class Drawing:
    """What is drawn of answers; figures are of all of them, whatever this says.

    Attributes:
        prompts: ids of prompts (or requests); none draws the first ones.
        most_prompts: at most so many answers.
        most_steps: of each answer.
        first_refusal: maps show the steps whose first refused draft stood there; None shows all.
    """

    prompts: Sequence[str] = ()
    most_prompts: int = 3
    most_steps: int = 400
    first_refusal: int | None = None

    def chosen(self, answers: Sequence[TracedAnswer]) -> list[TracedAnswer]:
        """Those to draw."""
        return self.named(answers)[: self.most_prompts]

    def named(self, answers: Sequence[TracedAnswer]) -> list[TracedAnswer]:
        """Those that the filter lets through, however many."""
        if not self.prompts:
            return list(answers)
        return [each for each in answers if _id(each) in self.prompts]

    def left_out(self, answers: Sequence[TracedAnswer]) -> str | None:
        """What is not drawn, in words; None where all is."""
        drawn = len(self.chosen(answers))
        if drawn == len(answers):
            return None
        return (
            f"{drawn} of {len(answers)} answers are drawn; figures are of all. --prompt ID and --max-prompts N choose"
        )


def _id(answer: TracedAnswer) -> str:
    return answer.trace.request_id if answer.prompt is None else answer.prompt.id


def with_interval(value: float | None, low: float | None, high: float | None, digits: int = 3) -> str:
    """A value and its interval, as text."""
    if value is None or math.isnan(value):
        return "-"
    if low is None or high is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def plain(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number as text; a dash for none."""
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}{unit}"


def file_name(path: Path) -> str:
    """A path's last part, safe to show."""
    return visible(path.name or str(path))
