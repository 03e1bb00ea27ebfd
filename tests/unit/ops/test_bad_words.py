from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.slow_target_distribution import Wishes, as_bad_words

from paceline.ops import bad_words
from paceline.ops.bad_words import BadWordRows, mask_bad_words_

VOCAB = 5


def masked(history: list[int], drafts: list[int], words: list[list[int]]) -> list[list[int]]:
    """The masked tokens of each row, for a request whose last tokens are `history`."""
    rows = as_bad_words(
        [Wishes(prompt=tuple(history[:-1]), output=tuple(history[-1:]), bad_words=tuple(map(tuple, words)))]
    )
    z = torch.zeros(1, len(drafts) + 1, VOCAB)
    mask_bad_words_(z, torch.tensor([drafts], dtype=torch.int64), rows)
    return [row.isinf().nonzero().squeeze(1).tolist() for row in z[0]]


def slow_masked(history: list[int], drafts: list[int], words: list[list[int]]) -> list[list[int]]:
    found = []
    for row in range(len(drafts) + 1):
        seen = history + [draft for draft in drafts[:row] if draft >= 0]
        found.append(
            sorted({w[-1] for w in words if len(w) - 1 <= len(seen) and seen[len(seen) - len(w) + 1 :] == w[:-1]})
        )
    return found


tokens = st.integers(0, VOCAB - 1)


@given(
    history=st.lists(tokens, min_size=1, max_size=4),
    drafts=st.lists(st.integers(-1, 2), max_size=5),
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=4),
)
def test_agrees_with_a_slow_search(history: list[int], drafts: list[int], words: list[list[int]]) -> None:
    assert masked(history, drafts, words) == slow_masked(history, drafts, words)


def test_a_word_is_cut_off_at_its_last_token() -> None:
    assert masked([0, 1], [2, 3], [[1, 2, 3]]) == [[], [3], []]
    assert masked([0, 1], [2, 3], [[4]]) == [[4], [4], [4]]
    assert masked([1], [2], [[0, 1, 2]]) == [[], []]  # the history is shorter than the word
    assert masked([0], [], [[0, 1], [0, 2], [1, 3]]) == [[1, 2]]


def test_missing_drafts_neither_match_nor_break_a_word() -> None:
    assert masked([1], [-1, -1], [[1, 2]]) == [[2], [2], [2]]
    assert masked([1], [2, -1], [[1, 2, 3]]) == [[], [3], [3]]
    assert masked([1], [-1], [[1, 0]]) == [[0], [0]]


def test_words_look_at_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of one history for all rows of a block is seen."""
    honest = bad_words._last_tokens

    def without_drafts(recent_ids_BH: torch.Tensor, draft_ids_BK: torch.Tensor, width: int) -> torch.Tensor:
        return honest(recent_ids_BH, torch.full_like(draft_ids_BK, -1), width)

    monkeypatch.setattr(bad_words, "_last_tokens", without_drafts)
    with pytest.raises(AssertionError):
        test_a_word_is_cut_off_at_its_last_token()


def test_longer_histories_than_words_need_are_fine() -> None:
    rows = BadWordRows(torch.tensor([[-1, 4, 3, 1]]), torch.tensor([[[-1, 1, 2]], [[3, 1, 0]]]).view(1, 2, 3))
    z = mask_bad_words_(torch.zeros(1, 1, VOCAB), torch.empty(1, 0, dtype=torch.int64), rows)
    assert z[0, 0].isinf().tolist() == [True, False, True, False, False]


def test_requests_keep_their_words_to_themselves() -> None:
    rows = as_bad_words(
        [Wishes(output=(1,), bad_words=((1, 2),)), Wishes(output=(1,)), Wishes(bad_words=((3,), (0, 4)))]
    )
    z = mask_bad_words_(torch.zeros(3, 1, VOCAB), torch.empty(3, 0, dtype=torch.int64), rows)
    assert z[:, 0].isinf().nonzero().tolist() == [[0, 2], [2, 3], [2, 4]]
