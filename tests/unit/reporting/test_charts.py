from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.reporting.charts import HEIGHT, WIDTH, bar_chart, line_chart


def estimate(label: str, value: float | None, low: float | None = None, high: float | None = None) -> Any:
    return SimpleNamespace(label=label, value=value, low=low, high=high)


def bars(*estimates: Any, **options: Any) -> Any:
    return bar_chart("title", estimates, says="says", x_label="x", y_label="y", **options)


def lines(*series: Any, **options: Any) -> Any:
    return line_chart("title", series, says="says", x_label="x", y_label="y", **options)


def test_bars_stand_on_the_axis_and_are_as_high_as_their_values() -> None:
    chart = bars(estimate("a", 0.5, 0.25, 0.75), estimate("b", None), estimate("c", 1.0), top=1.0)
    first, last = chart.bars
    whole = chart.bottom - chart.top
    assert (first.height, last.height) == (pytest.approx(whole / 2, abs=0.1), whole)
    assert first.y + first.height == last.y + last.height == chart.bottom
    assert first.whisker_low - first.whisker_high == pytest.approx(whole / 2, abs=0.1)
    assert last.whisker_low is None
    assert [tick.label for tick in chart.x_ticks] == ["a", "b", "c"]
    assert [tick.label for tick in chart.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_nothing_to_draw_is_no_chart() -> None:
    assert bars() is None and bars(estimate("a", None)) is None
    assert lines(("a", [])) is None


@pytest.mark.parametrize("value", [0.0, 1e-9, 3.0, 7e7])
def test_any_value_stays_on_the_plane(value: float) -> None:
    chart = bars(estimate("a", value))
    assert all(0 <= bar.y <= HEIGHT and bar.height >= 0 for bar in chart.bars)
    chart = lines(("a", [(0.0, value), (1.0, -value)]), levels=[("z", 2 * value)], uprights=[("u", 5.0)])
    for pair in chart.lines[0].points.split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
    assert len(chart.y_ticks) < 12


def test_one_point_is_a_chart() -> None:
    chart = lines(("a", [(3.0, 2.0)]), with_dots=True)
    assert len(chart.lines[0].dots) == 1


def test_large_numbers_and_long_names_are_shortened() -> None:
    chart = bars(*(estimate("a very long name of a category", 250_000.0) for _ in range(10)))
    assert chart.y_ticks[-1].label == "250k" or chart.y_ticks[-1].label == "300k"
    assert all(len(tick.label) < 15 and tick.label.endswith("…") for tick in chart.x_ticks)


def test_what_is_not_drawn_is_said() -> None:
    chart = bars(*(estimate(str(index), 1.0) for index in range(100)))
    assert len(chart.bars) == 60 and chart.left_out == "60 of 100 bars are drawn"
    assert len(chart.x_ticks) <= 16
    long = lines(("a", [(float(x), 1.0) for x in range(5000)]))
    points = long.lines[0].points.split()
    assert len(points) == 400 and long.left_out == "lines show 400 of 5000 points"
    assert points[-1].startswith(f"{WIDTH - 14:.1f}".rstrip("0").rstrip(".")), "the last point is among them"
