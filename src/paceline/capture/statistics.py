"""Figures of a set of conversations that decide how to train on it: lengths, cuts, padding, repetitions. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (1, 10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class ConversationStatistics:
    """What a set of conversations looks like.

    Attributes:
        conversations: how many.
        tokens: in all.
        answer_tokens: supervised ones among them.
        repeated: conversations whose tokens occurred before.
        repeated_prompts: conversations whose tokens up to the first supervised one occurred before.
        without_answer: conversations without a supervised token.
        length: of conversations: shortest, percentiles, longest, mean.
        answer_length: supervised tokens of conversations, the same figures.
        cut_share: share of conversations longer than `max_length`.
        cut_answer_share: share of answer tokens that lie behind it.
        max_length: that these shares are about.
    """

    conversations: int
    tokens: int
    answer_tokens: int
    repeated: int
    repeated_prompts: int
    without_answer: int
    length: dict[str, float]
    answer_length: dict[str, float]
    cut_share: float
    cut_answer_share: float
    max_length: int


def conversation_statistics(
    tokens: np.ndarray, supervised: np.ndarray, starts: np.ndarray, *, max_length: int
) -> ConversationStatistics:
    """Describe conversations.

    Args:
        tokens: int [total], all conversations end to end.
        supervised: bool [total].
        starts: int64 [count + 1], borders.
        max_length: tokens of a conversation that training would use.
    """
    lengths = np.diff(starts)
    answers = np.zeros(len(lengths), np.int64)
    num_cut_answers = 0
    whole: set[bytes] = set()
    prompts: set[bytes] = set()
    for index, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        marks = supervised[start:end]
        answers[index] = marks.sum()
        num_cut_answers += int(marks[max_length:].sum())
        first = int(marks.argmax()) if answers[index] else end - start
        whole.add(_key(tokens[start:end]))
        prompts.add(_key(tokens[start : start + first]))
    count, num_answers = len(lengths), int(answers.sum())
    return ConversationStatistics(
        conversations=count,
        tokens=int(lengths.sum()),
        answer_tokens=num_answers,
        repeated=count - len(whole),
        repeated_prompts=count - len(prompts),
        without_answer=int((answers == 0).sum()),
        length=_spread(lengths),
        answer_length=_spread(answers),
        cut_share=float((lengths > max_length).mean()) if count else 0.0,
        cut_answer_share=num_cut_answers / num_answers if num_answers else 0.0,
        max_length=max_length,
    )


def padding_share(used: Iterable[Sequence[int]], widths: Iterable[int]) -> float:
    """Share of a set of batches that is padding.

    Args:
        used: per batch, tokens of each of its rows.
        widths: per batch, tokens that its rows are padded to.
    """
    num_used = num_all = 0
    for rows, width in zip(used, widths, strict=True):
        num_used += sum(rows)
        num_all += len(rows) * width
    return 1 - num_used / num_all if num_all else 0.0


def _key(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).tobytes(), digest_size=16).digest()


def _spread(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    points = np.percentile(values, PERCENTILES, method="lower")
    named = {f"p{percent}": float(point) for percent, point in zip(PERCENTILES, points, strict=True)}
    return {"least": float(values.min()), **named, "most": float(values.max()), "mean": float(values.mean())}
