"""Prompts are refused before anything runs; parameters keep their place of import."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("prompt", [torch.tensor([1, 7]), np.array([1, 7]), range(1, 8, 6), iter([1, 7])])
def test_integers_of_any_library_are_a_prompt(prompt: Any) -> None:
    assert check_prompt(prompt, vocab_size=8, max_model_len=4) == (1, 7)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.tensor([[1, 7]]), "the prompt has 2 dimensions"),
        (torch.tensor([[1]]), "the prompt has 2 dimensions"),
        (np.array([[1, 7]]), "the prompt has 2 dimensions"),
        (torch.tensor(1), "the prompt has 0 dimensions"),
        (np.array(1), "the prompt has 0 dimensions"),
        (torch.tensor([1.0]), r"prompt token 0 is tensor\(1\.\); it has to be an integer"),
        (np.array([1.0]), "prompt token 0 is .*; it has to be an integer"),
        ([[1, 7]], r"prompt token 0 is \[1, 7\]; it has to be an integer"),
        ([True], "prompt token 0 is True"),
        ("1", "of type str"),
        (7, "of type int"),
    ],
)
def test_what_is_no_sequence_of_integers_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_prompt(prompt, vocab_size=8, max_model_len=4)
