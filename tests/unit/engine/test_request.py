"""Prompts are refused before anything runs; parameters keep their place of import."""

from __future__ import annotations

import pytest

from paceline.engine import sampling
from paceline.engine.request import SamplingParameters, check_prompt
from paceline.errors import RequestError


def test_parameters_are_found_where_requests_are() -> None:
    assert SamplingParameters is sampling.SamplingParameters


def test_prompts_without_room_or_with_foreign_ids_are_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        check_prompt([], vocab_size=8, max_model_len=4)
    with pytest.raises(RequestError, match=r"4 tokens.*context of 4"):
        check_prompt([1, 2, 3, 4], vocab_size=8, max_model_len=4)
    with pytest.raises(RequestError, match="prompt token 1 is 8"):
        check_prompt([1, 8], vocab_size=8, max_model_len=4)
    assert check_prompt([1, 7, 0], vocab_size=8, max_model_len=4) == (1, 7, 0)
