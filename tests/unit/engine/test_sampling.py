"""Sampling parameters are checked by name and kept in one form; samples of a prompt get seeds of their own."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.sampling import SamplingParameters, samples_of
from paceline.engine.structured import StructuredOutput
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
        ("temperature", "hot"),
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
        ("stop", 5),
        ("stop", (5,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.5,)),
        ("stop_token_ids", None),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: None}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", ((1, 2.0), (1, 3.0))),
        ("logit_bias", (1, 2)),
        ("logit_bias", 3),
        ("logit_bias", dict.fromkeys(range(1025), 0.5)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-4,)),
        ("allowed_token_ids", 4),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("presence_penalty", 3),
        ("bad_words", "word"),
        ("bad_words", ("",)),
        ("bad_words", (3,)),
        ("bad_words", ("\ud800",)),
        ("stop", ("a", "\udfff")),
        ("bad_words", ("a",) * 1025),
        ("logprobs", -1),
        ("logprobs", 33),
        ("logprobs", True),
        ("logprobs_mode", "both"),
        ("n", 0),
        ("n", 65),
        ("structured_output", {"kind": "regex"}),
        ("draft_length", "long"),
    ],
)
def test_impossible_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParameters(**{field: value})


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "repetition_penalty", "logprobs"])
def test_integers_that_cannot_be_printed_are_refused_too(field: str) -> None:
    with pytest.raises(RequestError, match="cannot be shown"):
        SamplingParameters(**{field: 10**5000})


def test_sequences_become_tuples_and_extremes_are_allowed() -> None:
    sampling = SamplingParameters(stop=["a"], stop_token_ids=[3], seed=-(2**63), top_p=1, min_p=1, temperature=0)
    assert sampling.stop == ("a",)
    assert sampling.stop_token_ids == (3,)
    assert sampling.is_greedy
    assert not SamplingParameters(temperature=1e-4).is_greedy
    SamplingParameters(
        max_tokens=7,
        min_tokens=7,
        logit_bias=dict.fromkeys(range(1024), -100),
        bad_words=("a",) * 1024,
        repetition_penalty=1e6,
        frequency_penalty=-2,
        presence_penalty=2,
        logprobs=32,
        n=64,
        structured_output=StructuredOutput("regex", "a+"),
        draft_length="off",
    )


def test_biases_are_kept_as_sorted_pairs_whatever_they_came_as() -> None:
    sampling = SamplingParameters(logit_bias={9: 1, 2: -0.5})
    assert sampling.logit_bias == sampling.bias_pairs == ((2, -0.5), (9, 1.0))
    assert replace(sampling, max_tokens=3).bias_pairs == sampling.bias_pairs
    assert SamplingParameters(logit_bias=[[9, 1], [2, -0.5]]) == sampling
    assert SamplingParameters().bias_pairs == ()
    assert hash(sampling) == hash(replace(sampling)), "a mapping inside would make it unhashable"


def test_penalties_are_noticed_one_by_one() -> None:
    assert not SamplingParameters().has_penalties
    for field in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        assert SamplingParameters(**{field: 0.5}).has_penalties


def test_samples_count_their_seeds_up_and_wrap() -> None:
    seeds = [one.seed for one in samples_of(SamplingParameters(n=3, seed=2**63 - 2))]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [one.seed for one in samples_of(SamplingParameters(n=2))] == [None, None]
    assert {one.n for one in samples_of(SamplingParameters(n=64, seed=1))} == {1}
    single = SamplingParameters(seed=5)
    assert samples_of(single) == [single]


_ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 5), max_size=3),
    st.lists(st.text(max_size=2), max_size=3),
    st.dictionaries(st.integers(-1, 5), st.floats(-120, 120), max_size=3),
    st.sampled_from(["raw", "processed", "off", "fixed", StructuredOutput("json_object")]),
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([field.name for field in fields(SamplingParameters)]), _ANYTHING, max_size=4))
def test_any_values_give_parameters_or_a_clear_error(values: dict[str, Any]) -> None:
    try:
        sampling = SamplingParameters(**values)
    except RequestError as error:
        assert any(name in error.message for name in values), error.message
    else:
        assert replace(sampling) == sampling or any(value != value for value in values.values())
