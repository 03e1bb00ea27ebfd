"""Flags of a batch claim a stage as soon as one request uses it, and never before."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags

NOTHING = SamplingFlags(True, 0, False, False)


def test_flags_summarise_sampled_requests_only() -> None:
    greedy = SamplingParameters(top_k=40, top_p=0.5, min_p=0.3)
    assert SamplingFlags.of([greedy]) == NOTHING
    sampled = SamplingParameters(temperature=1.0, top_k=5)
    assert SamplingFlags.of([greedy, sampled]) == SamplingFlags(False, 5, False, False)
    nucleus = SamplingParameters(temperature=1.0, top_p=0.9, min_p=0.1)
    assert SamplingFlags.of([sampled, nucleus]) == SamplingFlags(False, 5, True, True)


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("any_allowed_ids", {"allowed_token_ids": (3,)}),
        ("any_bias", {"logit_bias": {3: 0.0}}),
        ("any_min_tokens", {"min_tokens": 1}),
        ("any_penalties", {"repetition_penalty": 1.1}),
        ("any_penalties", {"frequency_penalty": -0.1}),
        ("any_penalties", {"presence_penalty": 0.1}),
        ("any_bad_words", {"bad_words": ("x",)}),
    ],
)
def test_rules_hold_for_greedy_requests_too(flag: str, changes: dict[str, Any]) -> None:
    flags = SamplingFlags.of([SamplingParameters(), SamplingParameters(**changes)])
    assert getattr(flags, flag) is True
    others = {name for name in vars(NOTHING) if name != flag}
    assert {getattr(flags, name) == getattr(NOTHING, name) for name in others} == {True}


def test_the_largest_number_of_best_tokens_counts_in_each_mode() -> None:
    raw = [SamplingParameters(logprobs=number) for number in (0, 4, 2)]
    processed = SamplingParameters(logprobs=0, logprobs_mode="processed")
    flags = SamplingFlags.of([*raw, processed, SamplingParameters()])
    assert (flags.num_raw_logprobs, flags.num_processed_logprobs) == (4, 0)
    assert (NOTHING.num_raw_logprobs, NOTHING.num_processed_logprobs) == (None, None)
