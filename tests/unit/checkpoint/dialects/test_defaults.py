"""The DFlash family's default taps: the specification's table, and never an illegal one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.dialects import default_target_layer_ids
from paceline.errors import CheckpointError


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [
        (28, 5, [1, 7, 13, 19, 25]),
        (32, 5, [1, 8, 15, 22, 29]),
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (48, 5, [1, 12, 23, 34, 45]),
        (59, 5, [1, 15, 28, 42, 56]),
        (61, 5, [1, 15, 30, 44, 58]),
        (64, 5, [1, 16, 31, 46, 61]),
        (93, 5, [1, 23, 46, 68, 90]),
        (36, 3, [1, 17, 33]),
        (36, 1, [18]),
    ],
)
def test_default_taps(num_layers: int, num_taps: int, expected: list[int]) -> None:
    assert list(default_target_layer_ids(num_layers, num_taps)) == expected


def test_half_up_rounding_would_be_noticed() -> None:
    half_up = [int(1 + index * (59 - 4) / 4 + 0.5) for index in range(5)]
    assert half_up == [1, 15, 29, 42, 56] != list(default_target_layer_ids(59, 5))


@pytest.mark.parametrize(("num_layers", "num_taps"), [(4, 2), (3, 3), (1, 1), (6, 5), (36, 0)])
def test_too_many_taps_for_the_depth_are_refused(num_layers: int, num_taps: int) -> None:
    with pytest.raises(CheckpointError, match="taps"):
        default_target_layer_ids(num_layers, num_taps)


@given(num_layers=st.integers(5, 200), num_taps=st.integers(1, 12))
def test_default_taps_are_always_legal(num_layers: int, num_taps: int) -> None:
    try:
        taps = default_target_layer_ids(num_layers, num_taps)
    except CheckpointError:
        assert num_taps > (num_layers - 3) / 2  # only a shallow target refuses
        return
    assert len(taps) == num_taps and list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= num_layers - 2
