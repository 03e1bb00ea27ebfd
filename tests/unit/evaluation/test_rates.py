from __future__ import annotations

import pytest

from paceline.evaluation.rates import RateTable
from paceline.evaluation.statistics import bootstrap_ratio, bootstrap_ratios


def test_a_rate_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    table = RateTable(2)
    table.add(0, "kept", "x", 1, 1)
    table.add(1, "kept", "x", 0, 3)
    table.add(1, "kept", "y", 2, 4)
    x, y = table.rates("kept")
    assert (x.label, x.total, x.of, x.value) == ("x", 1, 4, 0.25)
    assert x.low == 0.0 and x.high == 1.0
    assert (y.value, y.low, y.high) == (0.5, None, None), "one prompt alone has any of it"
    assert table.rates("kept", ["y", "z"]) == [y]
    assert table.rates("nothing") == []


def test_many_ratios_at_once_have_the_intervals_of_single_ones() -> None:
    tops = [[3.0, 1.0], [1.0, 1.0], [4.0, 0.0], [2.0, 2.0], [5.0, 1.0]]
    bottoms = [[4.0, 1.0], [4.0, 2.0], [4.0, 0.0], [6.0, 2.0], [5.0, 9.0]]
    for column, found in enumerate(bootstrap_ratios(tops, bottoms, num_resamples=20_000)):
        single = bootstrap_ratio([row[column] for row in tops], [row[column] for row in bottoms], num_resamples=20_000)
        assert found is not None and found.estimate == single.estimate
        assert found.low == pytest.approx(single.low, abs=0.03)
        assert found.high == pytest.approx(single.high, abs=0.03)


def test_a_ratio_of_nothing_is_none() -> None:
    assert bootstrap_ratios([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]])[1] is None
