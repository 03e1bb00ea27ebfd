"""Charts as numbers on a plane of pixels: bars with intervals, and lines. Templates draw them as SVG, without a script.

The plane has its origin at the top left. Every chart carries a sentence of what it shows, for whoever cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 14, 40
_NUM_STYLES = 8  # of lines, by colour and dashes
_LETTER = 6.5  # pixels
_MOST_POINTS = 400  # of a line
_MOST_LABELS = 16
_MOST_BARS = 60


class Estimate(Protocol):
    """A value with its interval, such as `evaluation.rates.Rate`."""

    @property
    def label(self) -> str:
        """Of what."""
        ...

    @property
    def value(self) -> float | None:
        """None where there is none."""
        ...

    @property
    def low(self) -> float | None:
        """Lower end of its interval, if it has one."""
        ...

    @property
    def high(self) -> float | None:
        """Upper end."""
        ...


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    place: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A bar; its whisker runs from `whisker_low` up to `whisker_high`, both None where there is no interval."""

    x: float
    y: float
    width: float
    height: float
    title: str
    whisker_low: float | None = None
    whisker_high: float | None = None

    @property
    def middle(self) -> float:
        """Where its whisker stands."""
        return round(self.x + self.width / 2, 1)


@dataclass(frozen=True)
class Line:
    """A line; `number` from 0 chooses its colour and dashes."""

    name: str
    number: int
    points: str
    dots: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Rule:
    """A straight line across the plane, upright or level."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: over it.
        says: what it shows, in a sentence.
        x_label: under it.
        y_label: beside it.
        x_ticks: on the lower axis.
        y_ticks: on the left axis, each with a line across.
        bars: of a bar chart.
        lines: of a line chart.
        rules: what values are held against.
        left_out: what is not drawn; None where all is.
    """

    title: str
    says: str
    x_label: str
    y_label: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    bars: list[Bar] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    left_out: str | None = None
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


def bar_chart(
    title: str,
    estimates: Sequence[Estimate],
    *,
    says: str,
    x_label: str,
    y_label: str,
    top: float | None = None,
    base: float = 0.0,
) -> Chart | None:
    """Bars with whiskers; None where there is nothing to draw.

    Args:
        title: over it.
        estimates: one per bar; those without a value leave a gap.
        says: what it shows.
        x_label: under it.
        y_label: beside it.
        top: the largest value of the axis; None takes what there is.
        base: where bars begin.
    """
    drawn = list(estimates)[:_MOST_BARS]
    values = [value for each in drawn for value in (each.value, each.high) if value is not None]
    if not values:
        return None
    scale = _Scale(base, max(values) if top is None else top, HEIGHT - _BOTTOM, _TOP, has_end=top is not None)
    step = (WIDTH - _LEFT - _RIGHT) / len(drawn)
    every = -(-len(drawn) // _MOST_LABELS)
    bars, ticks = [], []
    for index, each in enumerate(drawn):
        x = _LEFT + index * step
        if index % every == 0:
            ticks.append(Tick(round(x + step / 2, 1), _fitting(each.label, step * every)))
        if each.value is None:
            continue
        y = scale.at(each.value)
        has_interval = each.low is not None and each.high is not None
        interval = f", {each.low:.3f} to {each.high:.3f}" if has_interval else ""
        bars.append(
            Bar(
                x=round(x + step * 0.15, 1),
                y=y,
                width=round(step * 0.7, 1),
                height=round(scale.at(base) - y, 1),
                title=f"{each.label}: {each.value:.3f}{interval}",
                whisker_low=scale.at(each.low) if each.low is not None and has_interval else None,
                whisker_high=scale.at(each.high) if each.high is not None and has_interval else None,
            )
        )
    left_out = None if len(drawn) == len(estimates) else f"{len(drawn)} of {len(estimates)} bars are drawn"
    return Chart(title, says, x_label, y_label, ticks, scale.ticks(), bars=bars, left_out=left_out)


def line_chart(
    title: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    says: str,
    x_label: str,
    y_label: str,
    levels: Sequence[tuple[str, float]] = (),
    uprights: Sequence[tuple[str, float]] = (),
    with_dots: bool = False,
    from_zero: bool = False,
) -> Chart | None:
    """Lines over a common axis; None where no series has a point.

    Args:
        title: over it.
        series: names and points, x ascending.
        says: what it shows.
        x_label: under it.
        y_label: beside it.
        levels: values to draw across, with their names.
        uprights: places on the lower axis, likewise.
        with_dots: draw the points, too.
        from_zero: the left axis begins at 0.
    """
    kept = [(name, list(points)) for name, points in series if points]
    if not kept:
        return None
    xs = [x for _, points in kept for x, _ in points] + [x for _, x in uprights]
    ys = [y for _, points in kept for _, y in points] + [y for _, y in levels]
    across = _Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, has_end=True)
    up = _Scale(0.0 if from_zero else min(ys), max(ys), HEIGHT - _BOTTOM, _TOP)
    lines, thinned = [], 0
    for number, (name, points) in enumerate(kept):
        shown = _thin(points)
        thinned = max(thinned, len(points) if len(shown) < len(points) else 0)
        places = tuple((across.at(x), up.at(y)) for x, y in shown)
        lines.append(
            Line(name, number % _NUM_STYLES, " ".join(f"{x},{y}" for x, y in places), places if with_dots else ())
        )
    rules = [Rule(_LEFT, up.at(y), WIDTH - _RIGHT, up.at(y), name) for name, y in levels]
    rules += [Rule(across.at(x), _TOP, across.at(x), HEIGHT - _BOTTOM, name) for name, x in uprights]
    left_out = f"lines show {_MOST_POINTS} of {thinned} points" if thinned else None
    return Chart(title, says, x_label, y_label, across.ticks(), up.ticks(), lines=lines, rules=rules, left_out=left_out)


class _Scale:
    """From values to pixels, with round numbers on the way."""

    def __init__(self, low: float, high: float, first: float, last: float, *, has_end: bool = False) -> None:
        if high <= low:
            low, high = low - 0.5 * (low == high and low != 0), low + 1.0
        self._step = _round_step((high - low) / 5)
        self._low = low if has_end else math.floor(low / self._step + 1e-9) * self._step
        self._high = high if has_end else math.ceil(high / self._step - 1e-9) * self._step
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        """Where a value stands; beyond the ends, at the end."""
        share = (min(max(value, self._low), self._high) - self._low) / (self._high - self._low)
        return round(self._first + share * (self._last - self._first), 1)

    def ticks(self) -> list[Tick]:
        """Round numbers, ascending."""
        number = math.ceil(self._low / self._step - 1e-9)
        found = []
        while number * self._step <= self._high + self._step * 1e-6:
            value = number * self._step
            found.append(Tick(self.at(value), _short_number(value)))
            number += 1
        return found


def _short_number(value: float) -> str:
    for factor, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if sign == 'k' else factor):.6g}{sign}"
    return f"{value:.6g}"


def _fitting(label: str, width: float) -> str:
    most = max(3, int(width / _LETTER))
    return label if len(label) <= most else label[: most - 1] + "…"


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, ... that is no smaller."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9)), 10 * power)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Evenly many points, the first and the last among them."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[round(index * last / (_MOST_POINTS - 1))] for index in range(_MOST_POINTS)]
