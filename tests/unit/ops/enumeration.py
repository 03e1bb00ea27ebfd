"""Verification on rationals: every draft, every side of every acceptance threshold, and the exact joint of the output.

A chain gives p and q of the next token after the last one; `start` stands before the first. The twin here is written
from the papers' formulas, one token at a time, and shares no line with the operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Number = Fraction | float
Row = tuple[Fraction, ...]
Joint = dict[tuple[int, ...], Number]
Ratio = Literal["standard", "block"]
START = -1


@dataclass(frozen=True)
class Chain:
    """Next-token distributions by last token; START is before the first."""

    p: Mapping[int, Row]
    q: Mapping[int, Row]
    num_drafts: int

    @property
    def vocab_size(self) -> int:
        return len(self.p[START])


def rows(table: Mapping[int, str]) -> dict[int, Row]:
    """Rows from text such as "1/2 3/10 1/5" or ".5 .3 .2"."""
    return {token: tuple(Fraction(number) for number in text.split()) for token, text in table.items()}


THREE_SYMBOLS = Chain(
    p=rows({START: ".5 .3 .2", 0: ".4 .4 .2", 1: ".1 .3 .6", 2: ".4 .5 .1"}),
    q=rows({START: ".6 .2 .2", 0: ".1 .2 .7", 1: ".2 .4 .4", 2: ".3 .4 .3"}),
    num_drafts=2,
)
FOUR_SYMBOLS = Chain(  # with tokens that only one side can draw, and a row where both agree
    p=rows({START: ".5 .3 .15 .05", 0: "0 .5 .25 .25", 1: ".25 .25 .25 .25", 2: ".7 0 .3 0", 3: ".1 .2 .3 .4"}),
    q=rows({START: ".25 .25 .4 .1", 0: ".2 .5 .3 0", 1: ".25 .25 .25 .25", 2: ".1 .2 .7 0", 3: ".4 .3 .2 .1"}),
    num_drafts=2,
)
LONGER = Chain(THREE_SYMBOLS.p, THREE_SYMBOLS.q, num_drafts=3)
ONE_HOT = Chain(  # a rule that drafts from the last token alone
    p=THREE_SYMBOLS.p, q=rows({START: "1 0 0", 0: "0 0 1", 1: "0 1 0", 2: "1 0 0"}), num_drafts=3
)
CHAINS = {"three": THREE_SYMBOLS, "four": FOUR_SYMBOLS, "longer": LONGER, "one-hot": ONE_HOT}


def two_symbols(num_drafts: int) -> Chain:
    p, q = (rows(dict.fromkeys((START, 0, 1), text)) for text in ("1/3 2/3", "2/3 1/3"))
    return Chain(p, q, num_drafts)


def whole_block(drafts: Sequence[int]) -> int:
    """The rule that verifies every draft."""
    return len(drafts)


@dataclass(frozen=True)
class Outcome:
    """Drafts, on which side of its threshold each verified one's uniform fell, and how likely all that is."""

    probability: Fraction
    drafts: tuple[int, ...]
    passes: tuple[bool, ...]
    thresholds: tuple[Fraction, ...]

    @property
    def verified(self) -> tuple[int, ...]:
        return self.drafts[: len(self.passes)]


def ratios(chain: Chain, drafts: Sequence[int]) -> list[Fraction]:
    """p / q of every draft."""
    before = (START, *drafts)
    return [chain.p[a][x] / chain.q[a][x] for a, x in zip(before, drafts, strict=False)]


def block_weights(chain: Chain, drafts: Sequence[int]) -> list[Fraction]:
    """pi_0, pi_1, ..., pi_d."""
    weights = [Fraction(1)]
    for ratio in ratios(chain, drafts):
        weights.append(min(weights[-1] * ratio, Fraction(1)))
    return weights


def left_over(chain: Chain, weight: Fraction, before: int) -> list[Fraction]:
    """max(weight * p - q, 0) after a token."""
    return [max(weight * p - q, Fraction(0)) for p, q in zip(chain.p[before], chain.q[before], strict=True)]


def thresholds(chain: Chain, method: Ratio, drafts: Sequence[int]) -> list[Fraction]:
    """What each uniform has to lie below."""
    if method == "standard":
        return [min(ratio, Fraction(1)) for ratio in ratios(chain, drafts)]
    weights = block_weights(chain, drafts)
    found = []
    for weight, x in zip(weights[1:-1], drafts[:-1], strict=True):
        mass = sum(left_over(chain, weight, x), Fraction(0))
        total = mass + 1 - weight
        found.append(mass / total if total else Fraction(1))
    return found + weights[-1:] if drafts else []


def outcomes(chain: Chain, method: Ratio, rule: Callable[[Sequence[int]], int] = whole_block) -> Iterator[Outcome]:
    """All that can happen, with its probability."""
    for drafts in itertools.product(range(chain.vocab_size), repeat=chain.num_drafts):
        drawn = Fraction(1)
        for a, x in zip((START, *drafts[:-1]), drafts, strict=True):
            drawn *= chain.q[a][x]
        if not drawn:
            continue
        limits = thresholds(chain, method, drafts[: rule(drafts)])
        for passes in itertools.product((True, False), repeat=len(limits)):
            probability = drawn
            for is_passed, limit in zip(passes, limits, strict=True):
                probability *= limit if is_passed else 1 - limit
            if probability:
                yield Outcome(probability, drafts, passes, tuple(limits))


def leading(passes: Sequence[bool]) -> int:
    return next((i for i, is_passed in enumerate(passes) if not is_passed), len(passes))


def last(passes: Sequence[bool]) -> int:
    return max((i + 1 for i, is_passed in enumerate(passes) if is_passed), default=0)


def count_kept(method: Ratio, outcome: Outcome) -> int:
    return leading(outcome.passes) if method == "standard" else last(outcome.passes)


def emitted(chain: Chain, method: Ratio, outcome: Outcome, num_kept: int) -> list[Fraction]:
    """The distribution of the token after the kept drafts."""
    kept = outcome.verified[:num_kept]
    before = kept[-1] if kept else START
    if num_kept < len(outcome.passes):
        weight = Fraction(1) if method == "standard" else block_weights(chain, kept)[-1]
        weights = left_over(chain, weight, before)
        if any(weights):
            return [w / sum(weights) for w in weights]
    return list(chain.p[before])


def continued(chain: Chain, tokens: tuple[int, ...], probability: Number) -> Iterator[tuple[tuple[int, ...], Number]]:
    """Extend to K + 1 tokens by draws from p, so that joints need no conditioning."""
    if len(tokens) == chain.num_drafts + 1:
        yield tokens, probability
        return
    for y, share in enumerate(chain.p[tokens[-1] if tokens else START]):
        if share:
            yield from continued(chain, (*tokens, y), probability * share)


def joint_of(chain: Chain, found: Iterator[tuple[Number, tuple[int, ...], Sequence[Number]]]) -> Joint:
    """Joint of K + 1 tokens from (probability, kept drafts, distribution of the next token)."""
    joint: Joint = {}
    for probability, kept, following in found:
        for y, share in enumerate(following):
            if share:
                for tokens, mass in continued(chain, (*kept, y), probability * share):
                    joint[tokens] = joint.get(tokens, 0) + mass
    return joint


def target_joint(chain: Chain) -> Joint:
    return dict(continued(chain, (), Fraction(1)))


def distance(joint: Joint, other: Joint) -> Number:
    """Total variation."""
    return sum(abs(joint.get(key, 0) - other.get(key, 0)) for key in joint.keys() | other.keys()) / 2


def marginal(joint: Joint, place: int, vocab_size: int) -> list[Number]:
    return [sum(mass for tokens, mass in joint.items() if tokens[place] == y) for y in range(vocab_size)]


def coupled(p: Row, q: Row) -> dict[tuple[int, int], Fraction]:
    """The joint of a drafter's and a target's draw under one Gumbel vector, exactly.

    In the form of an exponential race, x = argmin E/q and y = argmin E/p. For x = a, y = b and t = E_b / E_a the rest
    integrates to piecewise 1 / (A + B t)^2 over t between q_b / q_a and p_b / p_a.
    """
    found: dict[tuple[int, int], Fraction] = {}
    size = range(len(p))
    for a, b in itertools.product(size, size):
        if not q[a] or not p[b]:
            continue
        if a == b:
            found[a, a] = 1 / sum((max(p[v] / p[a], q[v] / q[a]) for v in size), Fraction(0))
            continue
        others = [(q[v] / q[a], p[v] / p[b]) for v in size if v not in (a, b)]
        low = q[b] / q[a]
        points = [alpha / beta for alpha, beta in others if beta and alpha / beta > low]
        if p[a]:
            high = p[b] / p[a]
            if high <= low:
                continue
            points = [point for point in points if point < high] + [high]
        points = [low, *sorted(points)]
        total = Fraction(0)
        for left, right in itertools.pairwise(points):
            middle = (left + right) / 2
            total += _piece(others, middle, left, right)
        if not p[a]:  # the last piece has no upper end
            total += _piece(others, points[-1] + 1, points[-1], None)
        found[a, b] = total
    return found


def _piece(
    others: Sequence[tuple[Fraction, Fraction]], middle: Fraction, left: Fraction, right: Fraction | None
) -> Fraction:
    constant = 1 + sum((alpha for alpha, beta in others if alpha > beta * middle), Fraction(0))
    slope = 1 + sum((beta for alpha, beta in others if alpha <= beta * middle), Fraction(0))
    if right is None:
        return 1 / (slope * (constant + slope * left))
    return (right - left) / ((constant + slope * left) * (constant + slope * right))
