"""Which ids a drafter of few ids drafts: counted where there is supervision, padded to size, stop tokens among them."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.training.data import Conversations
from paceline.training.vocabulary import most_frequent_ids, require_coverage


def conversations(tokens: list[int], supervised: list[bool] | None = None) -> Conversations:
    marks = np.ones(len(tokens), bool) if supervised is None else np.array(supervised)
    return Conversations(np.array(tokens, np.int32), marks, np.array([0, len(tokens)], np.int64))


def test_frequent_tokens_with_high_ids_are_kept() -> None:
    """B21: keeping ids 0..63 would cover nothing of this text, and a metric over the same slice would hide it."""
    text = conversations([int(token) for token in np.random.default_rng(0).integers(440, 500, 2000)])
    chosen = most_frequent_ids(text, 64, vocab_size=512, always=(2,))
    assert chosen.coverage == 1.0
    ids = chosen.target_ids_V.tolist()
    assert ids == sorted(set(ids)) and set(range(440, 500)) <= set(ids) and 2 in ids


def test_a_text_of_few_tokens_is_padded_to_the_exact_size() -> None:
    """B22: 40 distinct tokens, 64 asked for."""
    text = conversations(list(range(100, 140)) * 3)
    chosen = most_frequent_ids(text, 64, vocab_size=512, always=(2, 7))
    ids = chosen.target_ids_V.tolist()
    assert len(ids) == len(set(ids)) == 64 and all(0 <= token < 512 for token in ids)
    assert {2, 7, *range(100, 140)} <= set(ids)


def test_only_supervised_tokens_are_counted_and_ties_go_to_the_lower_id() -> None:
    text = conversations([5, 5, 5, 9, 8, 8, 7], [False] * 3 + [True] * 4)
    assert most_frequent_ids(text, 2, vocab_size=20, always=()).target_ids_V.tolist() == [7, 8]
    assert most_frequent_ids(text, 2, vocab_size=20, always=()).coverage == pytest.approx(3 / 4)
    # A stop token that the text never has takes the place of a rare one.
    assert most_frequent_ids(text, 2, vocab_size=20, always=(2,)).target_ids_V.tolist() == [2, 8]


def test_low_coverage_is_refused_with_both_numbers() -> None:
    chosen = most_frequent_ids(conversations([1, 1, 1, 2]), 1, vocab_size=4, always=())
    require_coverage(chosen, 0.75)
    with pytest.raises(ConfigError, match=r"draft_vocab_size 1 covers 75\.0% .*min_vocab_coverage 95\.0%"):
        require_coverage(chosen, 0.95)
