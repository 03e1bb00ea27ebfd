"""Tap ids: two numberings with one meaning each, sorted, distinct, inside the target and below its last layer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.dialects.taps import agree_on_taps, read_engine_taps, read_output_taps
from paceline.errors import CheckpointError

READER = ConfigReader({}, "c")


@given(taps=st.sets(st.integers(-1, 34), min_size=1))
def test_one_set_of_layers_in_both_numberings(taps: set[int]) -> None:
    layers = sorted(taps)
    assert list(read_output_taps(layers, 36, READER)) == layers
    assert list(read_engine_taps([layer + 1 for layer in layers], 36, READER, key="k")) == layers


@pytest.mark.parametrize(
    ("value", "depth", "message"),
    [
        (None, 36, "ids is missing"),
        ([], 36, r"ids is \[\]"),
        ("1,2", 36, "expected a list of layer numbers"),
        ([1.0], 36, "expected a list of layer numbers"),
        ([True], 36, "expected a list of layer numbers"),
        ([3, 1], 36, "each once and in ascending order"),
        ([1, 1], 36, "each once and in ascending order"),
        ([1, 35], 36, r"legal are -1 \(the embedding\) to 34 for a target of 36 layers; 35 is the last layer"),
        ([1, 36], 36, "legal are -1"),
        ([-2, 1], 36, "legal are -1"),
        ([-2, 1], 0, "to the last layer but one"),
    ],
)
def test_output_ids_that_are_refused(value: object, depth: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_output_taps(value, depth, READER, key="ids")


def test_engine_ids_have_their_own_range() -> None:
    assert read_engine_taps([0, 35], 36, READER, key="ids") == (-1, 34)
    with pytest.raises(CheckpointError, match=r"legal are 0 .* to 35 for a target of 36 layers; 36 is the last layer"):
        read_engine_taps([2, 36], 36, READER, key="ids")
    with pytest.raises(CheckpointError, match="legal are 0"):
        read_engine_taps([-1, 3], 36, READER, key="ids")


def test_an_unstated_depth_bounds_nothing_from_above() -> None:
    assert read_output_taps([1, 99], 0, READER) == (1, 99)


def test_two_spellings_must_name_the_same_layers() -> None:
    taps = read_output_taps([1, 9], 36, READER)
    agree_on_taps(taps, "a", read_engine_taps([2, 10], 36, READER, key="b"), "b", READER)
    with pytest.raises(CheckpointError, match=r"a names the outputs of layers \[1, 9\] and b those of \[0, 8\]"):
        agree_on_taps(taps, "a", read_engine_taps([1, 9], 36, READER, key="b"), "b", READER)
