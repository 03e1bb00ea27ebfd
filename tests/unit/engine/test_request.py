"""Sampling parameters and prompts are refused before anything runs."""

from __future__ import annotations

import math

import pytest

from paceline.engine.request import SamplingParameters, check_prompt
from paceline.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("stop", ("",)),
        ("stop", "bare text"),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.5,)),
    ],
)
def test_impossible_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParameters(**{field: value})


def test_sequences_become_tuples_and_extremes_are_allowed() -> None:
    sampling = SamplingParameters(stop=["a"], stop_token_ids=[3], seed=-(2**63), top_p=1, min_p=1, temperature=0)
    assert sampling.stop == ("a",)
    assert sampling.stop_token_ids == (3,)
    assert sampling.is_greedy
    assert not SamplingParameters(temperature=1e-4).is_greedy


def test_prompts_without_room_or_with_foreign_ids_are_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        check_prompt([], vocab_size=8, max_model_len=4)
    with pytest.raises(RequestError, match=r"4 tokens.*context of 4"):
        check_prompt([1, 2, 3, 4], vocab_size=8, max_model_len=4)
    with pytest.raises(RequestError, match="prompt token 1 is 8"):
        check_prompt([1, 8], vocab_size=8, max_model_len=4)
    assert check_prompt([1, 7, 0], vocab_size=8, max_model_len=4) == (1, 7, 0)
