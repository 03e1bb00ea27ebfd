"""Two set-ups on the same prompts: the median over prompts of how much faster one is, with its interval.

A prompt's speed pools its rounds, and its ratio compares the prompt with itself. The unit is the prompt: where a file
is asked more than once in a pass, its repeats are pooled too. What failed in one of the two is left out of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from paceline.benching.records import AnswerRecord, Load, Pass
from paceline.evaluation.statistics import Interval, bootstrap_median

Pairs = list[tuple[AnswerRecord, AnswerRecord]]


@dataclass(frozen=True)
class Comparison:
    """How a set-up compares with another at one load.

    Attributes:
        setup: which.
        base: beside which.
        load: at what.
        speed_up: median over prompts of output tokens per second of whole answers, prompt pass included, over the
            base's; with its 95 % bootstrap interval. None where answers do not say how many tokens they have.
        decode_speed_up: the same of the time after the first token.
        total_ratio: of all output tokens per second.
        num_identical: prompts whose answers are the base's, in every round; None where they need not be.
        num_compared: prompts with answers of both.
        num_left_out: pairs of answers of which one failed.
    """

    setup: str
    base: str
    load: Load
    speed_up: Interval | None
    decode_speed_up: Interval | None
    total_ratio: float | None
    num_identical: int | None
    num_compared: int
    num_left_out: int

    def to_dict(self) -> dict[str, object]:
        """As plain JSON values."""
        return asdict(self)


def compare(ours: Sequence[Pass], base: Sequence[Pass], *, expects_identity: bool) -> Comparison | None:
    """Compare the passes of two set-ups at one load, over the rounds that both have finished; None without any.

    Args:
        ours: whole passes of a set-up.
        base: whole passes of the other.
        expects_identity: greedy, so that equal answers say something.
    """
    theirs = {each.round_index: each for each in base}
    rounds = [(each, theirs[each.round_index]) for each in ours if each.round_index in theirs]
    if not rounds:
        return None
    pairs: dict[str, Pairs] = {}
    num_left_out = 0
    for mine, other in rounds:
        by_index = {record.index: record for record in other.records}
        for record in sorted(mine.records, key=lambda each: each.index):
            beside = by_index.get(record.index)
            if beside is not None and record.is_whole and beside.is_whole:
                pairs.setdefault(record.prompt_id, []).append((record, beside))
            else:
                num_left_out += 1
    return Comparison(
        setup=ours[0].setup,
        base=base[0].setup,
        load=ours[0].load,
        speed_up=_median([_whole_ratio(of_prompt) for of_prompt in pairs.values()]),
        decode_speed_up=_median([_decode_ratio(of_prompt) for of_prompt in pairs.values()]),
        total_ratio=_quotient(_total_speed([mine for mine, _ in rounds]), _total_speed([other for _, other in rounds])),
        num_identical=sum(map(_is_identical, pairs.values())) if expects_identity else None,
        num_compared=len(pairs),
        num_left_out=num_left_out,
    )


def _whole_ratio(pairs: Pairs) -> float | None:
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    return _quotient(_speed(ours, skips=0), _speed(theirs, skips=0))


def _decode_ratio(pairs: Pairs) -> float | None:
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    return _quotient(_speed(ours, skips=1), _speed(theirs, skips=1))


def _speed(records: Sequence[AnswerRecord], *, skips: int) -> float | None:
    """Tokens per second, without the first `skips` of each and the time until they were there."""
    tokens, seconds = 0, 0.0
    for record in records:
        if record.num_tokens is None or (skips and (record.first_s is None or record.came_at_once)):
            return None
        tokens += max(0, record.num_tokens - skips)
        seconds += record.total_s - (record.first_s or 0.0 if skips else 0.0)
    return tokens / seconds if tokens and seconds > 0 else None


def _total_speed(passes: Sequence[Pass]) -> float | None:
    counts = [answer.num_tokens for each in passes for answer in each.answers]
    seconds = sum(each.total_s for each in passes)
    known = [count for count in counts if count is not None]
    return sum(known) / seconds if known and len(known) == len(counts) and seconds else None


def _quotient(ours: float | None, base: float | None) -> float | None:
    return ours / base if ours is not None and base else None


def _median(ratios: Sequence[float | None]) -> Interval | None:
    known = [ratio for ratio in ratios if ratio is not None and np.isfinite(ratio)]
    return bootstrap_median(known) if known else None


def _is_identical(pairs: Pairs) -> bool:
    """Whether each question has one answer, in all rounds and on both sides; the same prompt again may have another."""
    answers: dict[int, set[str | None]] = {}
    for pair in pairs:
        for record in pair:
            answers.setdefault(record.index, set()).add(record.output_sha256)
    return all(len(each) == 1 for each in answers.values())
