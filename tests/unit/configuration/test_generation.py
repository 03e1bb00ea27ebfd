"""Settings of generation and evaluation: values that cannot be, and settings that contradict each other."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from paceline.configuration.generation import DraftLength, GenerateRun, VerifyMethod
from paceline.engine.draft_length import DRAFT_LENGTH_MODES
from paceline.engine.sampling import MAX_SAMPLES, LogprobsMode
from paceline.ops.acceptance import VERIFY_METHODS


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"spec_tokens": 3}, "no draft_model"),
        ({"draft_sample_method": "greedy"}, "no draft_model"),
        ({"compare": True}, "compared with itself"),
        ({"raw": True, "system": "x"}, "system is set but raw"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"verify_method": "block"}, "no draft_model"),
        ({"draft_length": "adaptive"}, "no draft_model"),
        ({"draft_vocab_size": 4096}, "no draft_model"),
        ({"draft_model": "d", "verify_method": "typical"}, "verify_method"),
        ({"draft_model": "d", "draft_length": "long"}, "draft_length"),
        ({"draft_model": "d", "draft_vocab_size": 0}, "0 is no number of ids"),
        ({"draft_model": "d", "draft_vocab_size": True}, "True is no number of ids"),
        ({"draft_model": "d", "draft_vocab_size": "some"}, "'some' is no number of ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than max_tokens, which is 8"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3.0}, "presence_penalty"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"logprobs": 33}, "logprobs"),
        ({"logprobs_mode": "processed"}, "there are none to read"),
        ({"logit_bias": {"one": 1.0}}, "'one' is no token id"),
        ({"logit_bias": {"42": 1.0, "042": -1.0}}, "'042' is no token id"),
        ({"logit_bias": {"1" * 5000: 1.0}}, "is no token id"),
        ({"json_object": True, "regex": "a+"}, "json_object and regex both say"),
        ({"choice": ["a"], "json_schema": "{}"}, "json_schema and choice both say"),
        ({"structure_begins_after": "</think>"}, "nothing says what follows it"),
    ],
)
def test_contradictions_of_generation(values: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        GenerateRun.model_validate({"model": "m", **values})


def test_a_stop_string_keeps_its_white_space() -> None:
    assert GenerateRun.model_validate({"model": "m", "stop": ["\n\n"]}).stop == ("\n\n",)


def test_names_are_those_of_the_engine() -> None:
    """Settings load without torch, so they repeat the engine's names; this holds the two together."""
    assert get_args(VerifyMethod) == VERIFY_METHODS
    assert get_args(DraftLength) == DRAFT_LENGTH_MODES
    assert set(get_args(GenerateRun.model_fields["logprobs_mode"].annotation)) == set(get_args(LogprobsMode))
    assert GenerateRun.model_fields["n"].metadata[-1].le == MAX_SAMPLES
