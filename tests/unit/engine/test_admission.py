"""Rules in ids: what is outside the vocabulary is refused, bad words are found in both spellings."""

from __future__ import annotations

import pytest
from tests.fakes import ByteTokenizer

from paceline.engine.admission import TokenLimits, stop_ids_of, token_limits
from paceline.engine.sampling import SamplingParameters
from paceline.errors import RequestError


class WordTokenizer:
    """Knows a few texts as wholes."""

    def __init__(self, ids: dict[str, list[int]]) -> None:
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        return self._ids[text]


def limits_of(sampling: SamplingParameters, tokenizer=None) -> TokenLimits:
    return token_limits(sampling, tokenizer or ByteTokenizer(), vocab_size=300, target_stop_ids=(2, 5))


def test_a_request_without_rules_has_no_limits() -> None:
    assert limits_of(SamplingParameters(temperature=1.0, top_k=3, stop=("x",))) == TokenLimits()
    assert not TokenLimits().has_penalties


@pytest.mark.parametrize(
    "rules", [{"stop_token_ids": (299, 300)}, {"logit_bias": {300: 1.0}}, {"allowed_token_ids": (1, 300)}]
)
def test_ids_outside_the_vocabulary_are_refused_by_name(rules: dict[str, object]) -> None:
    (name,) = rules
    with pytest.raises(RequestError, match=f"{name} holds 300; the vocabulary has 300 ids"):
        limits_of(SamplingParameters(**rules))


def test_min_tokens_holds_back_exactly_what_would_end_the_request() -> None:
    held = limits_of(SamplingParameters(min_tokens=4, stop_token_ids=(7, 5)))
    assert (held.held_ids, held.num_held) == ((2, 5, 7), 4)
    assert limits_of(SamplingParameters(min_tokens=4, ignore_eos=True, stop_token_ids=(7,))).held_ids == (7,)
    assert stop_ids_of(SamplingParameters(ignore_eos=True), (2,)) == ()


def test_bad_words_are_banned_with_and_without_a_leading_space() -> None:
    assert limits_of(SamplingParameters(bad_words=("ab",))).bad_words == (tuple(b"ab"), tuple(b" ab"))
    assert limits_of(SamplingParameters(bad_words=(" ab", "ab"))).bad_words == (tuple(b" ab"), tuple(b"ab"))
    same = WordTokenizer({"word": [9], " word": [9]})
    assert limits_of(SamplingParameters(bad_words=("word",)), same).bad_words == ((9,),)
    beyond = WordTokenizer({"word": [4, 300], " word": [9]})
    assert limits_of(SamplingParameters(bad_words=("word",)), beyond).bad_words == ((9,),), "300 can never be chosen"
    with pytest.raises(RequestError, match="'word' has no tokens"):
        limits_of(SamplingParameters(bad_words=("word",)), WordTokenizer({"word": []}))


def test_a_bad_word_has_a_longest_length() -> None:
    """Every slot keeps room for the longest word: one of a whole page would take the memory of all."""
    assert len(limits_of(SamplingParameters(bad_words=("x" * 63,))).bad_words[1]) == 64
    with pytest.raises(RequestError, match="a bad word has 65 tokens, at most 64 are possible"):
        limits_of(SamplingParameters(bad_words=("x" * 65,)))


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_each_penalty_is_carried_over(name: str) -> None:
    limits = limits_of(SamplingParameters(**{name: 0.25}))
    assert getattr(limits, name) == 0.25
    assert limits.has_penalties
