from __future__ import annotations

import numpy as np
import pytest

from paceline.capture.statistics import conversation_statistics, padding_share


def test_figures_of_four_conversations() -> None:
    prompts, answers = ([1, 2, 3], [1, 2, 3], [4], [5, 6]), ([7, 8], [7, 8], [9] * 9, [])
    tokens = np.concatenate([np.array(piece, int) for pair in zip(prompts, answers, strict=True) for piece in pair])
    marks = [mark for p, a in zip(prompts, answers, strict=True) for mark in [False] * len(p) + [True] * len(a)]
    starts = np.cumsum([0, 5, 5, 10, 2])
    found = conversation_statistics(tokens, np.array(marks), starts, max_length=4)
    assert (found.conversations, found.tokens, found.answer_tokens) == (4, 22, 13)
    assert (found.repeated, found.repeated_prompts, found.without_answer) == (1, 1, 1)
    assert found.length["least"] == 2 and found.length["most"] == 10 and found.length["mean"] == 5.5
    assert found.length["p50"] == 5 and found.answer_length["p90"] == 2
    assert found.cut_share == 0.75
    assert found.cut_answer_share == pytest.approx((1 + 1 + 6) / 13)


def test_nothing_has_no_figures() -> None:
    found = conversation_statistics(np.empty(0, int), np.empty(0, bool), np.zeros(1, int), max_length=4)
    assert found.conversations == 0 and found.length == {} and found.cut_share == 0.0


def test_padding_counts_every_place() -> None:
    assert padding_share([[3, 5], [8, 8]], [8, 8]) == pytest.approx(1 - 24 / 32)
    assert padding_share([], []) == 0.0
