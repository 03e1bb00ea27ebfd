"""Arrivals of an open loop: mean, spread, order, and that set-ups meet the same."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.benching.arrivals import arrival_times
from paceline.errors import ConfigError


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_have_the_mean_and_the_spread_of_their_distribution(burstiness: float) -> None:
    times = arrival_times(20_000, 5.0, burstiness=burstiness, seed=3)
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    assert times[-1] == pytest.approx(20_000 / 5.0)  # stretched to the rate that was asked for
    assert gaps.mean() == pytest.approx(0.2)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / np.sqrt(burstiness), rel=0.05)


def test_equal_seeds_give_equal_times() -> None:
    assert arrival_times(5, 2.0, seed=1) == arrival_times(5, 2.0, seed=1) != arrival_times(5, 2.0, seed=2)
    assert arrival_times(0, 2.0) == []


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (float("inf"), 1.0)])
def test_impossible_rates(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match="positive"):
        arrival_times(3, rate, burstiness=burstiness)
