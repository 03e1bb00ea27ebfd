"""What may decide the draft length: worked numbers, and exact enumeration of what each rule does to the output."""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.acceptance_estimator import AcceptanceEstimator
from paceline.engine.draft_budget import (
    DraftSchedule,
    best_budget,
    expected_acceptance,
    split_budget,
)
from paceline.engine.draft_length import DraftLengthController, JudgedBlock
from paceline.engine.kind_costs import CostsByKind
from paceline.engine.step_cost import CostCurve
from paceline.engine.step_kind import SAMPLED_STEP, StepAhead, TextKind
from paceline.errors import ConfigError
from paceline.ops.draft_chances import largest_log_odds, usable_prefix

SURVIVALS = [[0.9, 0.72, 0.36], [0.6, 0.3, 0.15]]


# Worked numbers


def test_budget_with_captured_sizes() -> None:
    curve = CostCurve({2: 10.0, 4: 10.5, 8: 12.0}, captured=[2, 4, 8])
    budget = best_budget(SURVIVALS, lambda num_drafts: 1 + curve.ms(2 + num_drafts))
    assert budget.ratios == pytest.approx([0.18182, 0.25217, 0.31478, 0.32462, 0.35231, 0.37538, 0.38692], abs=5e-6)
    assert budget.num_drafts == 6


def test_budget_with_linear_cost() -> None:
    budget = best_budget(SURVIVALS, lambda num_drafts: 11 + num_drafts)
    assert (budget.num_drafts, round(max(budget.ratios), 5)) == (4, 0.30533)
    assert [ratio * (11 + n) for n, ratio in enumerate(budget.ratios)] == pytest.approx(
        [2, 2.9, 3.62, 4.22, 4.58, 4.88, 5.03]
    )
    assert best_budget(SURVIVALS, lambda num_drafts: 11 + num_drafts, max_drafts=2).num_drafts == 2
    assert best_budget([[], []], lambda _: 1.0).num_drafts == 0


def test_split() -> None:
    assert split_budget(SURVIVALS, 3) == [2, 1]
    assert split_budget(SURVIVALS, 2) == [2, 0]
    assert split_budget(SURVIVALS, 0) == [0, 0]
    assert split_budget(SURVIVALS, 99) == [3, 3]
    assert split_budget([[0.5, 0.5], [], [0.5]], 2) == [1, 0, 1]  # equal: the earlier position first


@given(st.lists(st.lists(st.floats(0, 1), max_size=4), min_size=1, max_size=4), st.integers(0, 12))
def test_a_split_is_the_largest_survivals_and_reads_no_later_confidence(
    confidences: list[list[float]], num_drafts: int
) -> None:
    survivals = [list(itertools.accumulate(row, lambda s, c: s * c)) for row in confidences]
    counts = split_budget(survivals, num_drafts)
    everything = sorted(itertools.chain.from_iterable(survivals), reverse=True)
    taken = sorted((s for row, count in zip(survivals, counts, strict=True) for s in row[:count]), reverse=True)
    assert taken == everything[:num_drafts]
    for request, row in enumerate(confidences):
        for position in range(len(row)):
            # Whatever the confidences behind a draft are, it is verified or not all the same.
            changed = copy.deepcopy(confidences)
            changed[request][position + 1 :] = [0.01] * (len(row) - position - 1)
            moved = [list(itertools.accumulate(part, lambda s, c: s * c)) for part in changed]
            assert (split_budget(moved, num_drafts)[request] > position) == (counts[request] > position)


def test_schedule_by_batch_size() -> None:
    schedule = DraftSchedule([(1, 4, 7), (8, 16, 3), (32, 32, 0)], num_draft_tokens=5)
    sizes = (1, 4, 5, 7, 8, 16, 20, 31, 32, 33, 500)
    assert [schedule.num_drafts(size) for size in sizes] == [5, 5, 5, 5, 3, 3, 3, 3, 0, 0, 0]


@pytest.mark.parametrize(
    "ranges", [[], [(2, 4, 3)], [(1, 4, 3), (4, 8, 2)], [(1, 4, 3), (8, 6, 2)], [(1, 4, -1)], [(1, 8, 1), (2, 3, 1)]]
)
def test_a_schedule_with_holes_in_its_logic_is_refused(ranges: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ConfigError):
        DraftSchedule(ranges, 7)


def test_usable_prefix_stops_at_the_first_draft_below() -> None:
    confidence = torch.tensor([[0.9, 0.8, 0.5], [0.4, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert usable_prefix(confidence, 0.5).tolist() == [2, 0, 3]
    assert usable_prefix(confidence, 0.0).tolist() == [3, 3, 3]
    # A later draft that would pass again doesn't count: what lies before it was left out.
    assert usable_prefix(confidence, torch.tensor([0.5, 0.9, 0.0])).tolist() == [1, 0, 3]
    assert usable_prefix(torch.full((1, 2), math.nan), 0.5).tolist() == [0]
    assert usable_prefix(torch.empty(2, 0), 0.5).tolist() == [0, 0]


def test_expected_acceptance() -> None:
    assert expected_acceptance([0.9, 0.8, 0.5]) == pytest.approx(0.9 + 0.72 + 0.36)
    assert expected_acceptance([]) == 0


# Exact enumeration. Chains of spec section 9.4: rows by last token, the start's own row first.

START = 3
P = {
    START: (Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)),
    0: (Fraction(4, 10), Fraction(4, 10), Fraction(2, 10)),
    1: (Fraction(1, 10), Fraction(3, 10), Fraction(6, 10)),
    2: (Fraction(4, 10), Fraction(5, 10), Fraction(1, 10)),
}
Q = {
    START: (Fraction(6, 10), Fraction(2, 10), Fraction(2, 10)),
    0: (Fraction(1, 10), Fraction(2, 10), Fraction(7, 10)),
    1: (Fraction(2, 10), Fraction(4, 10), Fraction(4, 10)),
    2: (Fraction(3, 10), Fraction(4, 10), Fraction(3, 10)),
}
Chain = dict[int, tuple[Fraction, ...]]
Text = tuple[int, ...]
DepthRule = Callable[[int, Text], int]  # last token before the block, drafts -> how many are verified
Outcomes = list[tuple[Text, int, Fraction]]  # emitted tokens, drafts kept, probability


def probability(chain: Chain, last: int, text: Text) -> Fraction:
    return math.prod((chain[a][b] for a, b in itertools.pairwise((last, *text))), start=Fraction(1))


def normalised(weights: list[Fraction]) -> list[Fraction]:
    total = sum(weights, Fraction(0))
    return [weight / total for weight in weights] if total else weights


def block_outcomes(last: int, drafts: Text) -> Iterator[tuple[Text, int, Fraction]]:
    """Block verification of these drafts: tokens, drafts kept, probability."""
    depth = len(drafts)
    context = (last, *drafts)
    pi = [Fraction(1)]
    for i in range(depth):
        pi.append(min(pi[i] * P[context[i]][drafts[i]] / Q[context[i]][drafts[i]], Fraction(1)))
    h = [Fraction(1)]
    for i in range(1, depth + 1):
        row = context[i]
        z = sum((max(pi[i] * p - q, Fraction(0)) for p, q in zip(P[row], Q[row], strict=True)), Fraction(0))
        h.append(pi[i] if i == depth else z / (z + 1 - pi[i]) if z + 1 - pi[i] else Fraction(1))
    for kept in range(depth + 1):
        chance = h[kept] * math.prod((1 - h[i] for i in range(kept + 1, depth + 1)), start=Fraction(1))
        row = context[kept]
        next_row = list(P[row])
        if kept < depth:
            next_row = normalised([max(pi[kept] * p - q, Fraction(0)) for p, q in zip(P[row], Q[row], strict=True)])
        for token, weight in enumerate(next_row):
            if chance * weight:
                yield (*drafts[:kept], token), kept, chance * weight


def standard_outcomes(last: int, drafts: Text) -> Iterator[tuple[Text, int, Fraction]]:
    """Token by token: accept with min(1, p/q), else one draw of max(p - q, 0)."""
    reach = Fraction(1)
    context = (last, *drafts)
    for i, draft in enumerate(drafts):
        p, q = P[context[i]], Q[context[i]]
        accept = min(p[draft] / q[draft], Fraction(1))
        if accept < 1:
            residual = normalised([max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)])
            for token, weight in enumerate(residual):
                if weight:
                    yield (*drafts[:i], token), i, reach * (1 - accept) * weight
        reach *= accept
    for token, weight in enumerate(P[context[-1]]):
        if reach * weight:
            yield (*drafts, token), len(drafts), reach * weight


METHODS = {"block": block_outcomes, "standard": standard_outcomes}


def one_block(method: str, last: int, max_depth: int, rule: DepthRule) -> Outcomes:
    outcomes = []
    for drafts in itertools.product(range(3), repeat=max_depth):
        drawn = probability(Q, last, drafts)
        for text, kept, chance in METHODS[method](last, drafts[: rule(last, drafts)]):
            outcomes.append((text, kept, drawn * chance))
    return outcomes


def distance(outcomes: Outcomes, length: int) -> Fraction:
    """Total variation between the target's joint of `length` tokens and this one, completed by exact draws."""
    joint: dict[Text, Fraction] = defaultdict(Fraction)
    for text, _, chance in outcomes:
        for rest in itertools.product(range(3), repeat=max(0, length - len(text))):
            whole = text[:length] + rest
            last = text[-1]
            joint[whole] += chance * probability(P, last, rest)
    everything = itertools.product(range(3), repeat=length)
    return sum((abs(joint[text] - probability(P, START, text)) for text in everything), Fraction(0)) / 2


def mean_kept(outcomes: Outcomes) -> Fraction:
    return sum((kept * chance for _, kept, chance in outcomes), Fraction(0))


def prefix_rule(_last: int, drafts: Text) -> int:
    return 1 if drafts[0] == 0 else 2 if drafts[1] == 1 else 3


def peeking_rule(_last: int, drafts: Text) -> int:
    return 0 if drafts[0] == 2 else 1 if drafts[1] == 2 else 3


def test_enumeration_gives_the_worked_numbers() -> None:
    def everything(_last: int, drafts: Text) -> int:
        return len(drafts)

    for method, kept in (("standard", Fraction(147, 100)), ("block", Fraction(3, 2))):
        outcomes = one_block(method, START, 2, everything)
        assert (distance(outcomes, 3), mean_kept(outcomes)) == (0, kept)
    outcomes = one_block("block", START, 3, prefix_rule)
    assert (distance(outcomes, 4), mean_kept(outcomes)) == (0, Fraction(27, 20))
    assert float(distance(one_block("block", START, 3, peeking_rule), 4)) == pytest.approx(0.184, abs=5e-4)


def test_a_rule_by_the_drawn_tokens_own_probability_biases_the_output() -> None:
    p = [Fraction(1, 2), Fraction(3, 10), Fraction(3, 20), Fraction(1, 20)]
    q = [Fraction(1, 4), Fraction(1, 4), Fraction(2, 5), Fraction(1, 10)]
    residual = normalised([max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)])
    output = [Fraction(0)] * 4
    for draft in range(4):
        accept = min(p[draft] / q[draft], Fraction(1))
        for token in range(4):
            verified = accept * (token == draft) + (1 - accept) * residual[token]
            output[token] += q[draft] * (verified if q[draft] >= Fraction(3, 10) else p[token])
    assert [float(chance) for chance in output] == pytest.approx([0.508, 0.222, 0.240, 0.030], abs=6e-4)
    assert float(sum(abs(a - b) for a, b in zip(output, p, strict=True)) / 2) == pytest.approx(0.098, abs=5e-4)


def stop_by(confidences: Callable[[int, Text], list[float]], thresholds: list[float]) -> DepthRule:
    """The engine's own rule, fed with some confidences."""

    def rule(last: int, drafts: Text) -> int:
        return int(usable_prefix(torch.tensor([confidences(last, drafts)]), torch.tensor(thresholds)))

    return rule


def learned(estimator: AcceptanceEstimator, last: int, drafts: Text) -> list[float]:
    """What the engine computes from q: each row by the drafts before it."""
    log_q = torch.tensor([[[math.log(q) for q in Q[before]] for before in (last, *drafts[:-1])]])
    values: list[float] = estimator.confidence(largest_log_odds(log_q))[0].tolist()
    return values


@pytest.mark.parametrize("method", ["block", "standard"])
def test_stopping_by_confidence_keeps_the_distribution(method: str) -> None:
    estimator = AcceptanceEstimator(3, has_confidence_head=False, device=torch.device("cpu"))
    rule = stop_by(lambda last, drafts: learned(estimator, last, drafts), [0.5, 0.27, 0.14])
    depths = {rule(START, drafts) for drafts in itertools.product(range(3), repeat=3)}
    assert len(depths) >= 2, "the rule has to cut some blocks and not others, or nothing is tested"
    assert distance(one_block(method, START, 3, rule), 4) == 0


@pytest.mark.parametrize("method", ["block", "standard"])
def test_stopping_by_what_was_drawn_is_caught(method: str) -> None:
    def of_the_drawn(last: int, drafts: Text) -> list[float]:
        return [float(Q[before][token]) for before, token in itertools.pairwise((last, *drafts))]

    def one_row_late(last: int, drafts: Text) -> list[float]:  # row i's confidence read from the row behind it
        return [float(max(Q[before])) for before in drafts]

    for peeking in (of_the_drawn, one_row_late):
        rule = stop_by(peeking, [0.5, 0.25, 0.1])
        assert distance(one_block(method, START, 3, rule), 4) > Fraction(1, 100), peeking.__name__


SAMPLED_TEXT = TextKind(is_sampled=True)


class FakeCosts:
    """Drafts cost half a plain step each, so that low acceptance switches them off."""

    def plain_ms(self, num_requests: int) -> float:
        return 1.0

    def padded_drafts(self, num_drafts: int) -> int:
        return num_drafts

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        return 1 + 0.5 * num_drafts

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        return 1 + 0.25 * num_drafts


def test_choosing_the_next_length_from_finished_blocks_keeps_the_distribution() -> None:
    """Three blocks in a row, each as long as the controller says after the blocks before it."""
    depths = set()
    ahead = StepAhead(SAMPLED_STEP, 1, ((SAMPLED_TEXT, 1),))
    for method in METHODS:
        paths = [((), DraftLengthController(2, CostsByKind(lambda _kind: FakeCosts())), Fraction(1))]
        for _ in range(3):
            grown = []
            for text, controller, chance in paths:
                if len(text) >= 4:
                    grown.append((text, controller, chance))
                    continue
                controller = copy.deepcopy(controller)
                depth = controller.next_num_drafts(ahead)
                depths.add(depth)
                last = text[-1] if text else START
                for emitted, kept, weight in one_block(method, last, depth, lambda _, drafts: len(drafts)):
                    after = copy.deepcopy(controller)
                    after.observe(SAMPLED_STEP, [JudgedBlock(SAMPLED_TEXT, depth, kept)])
                    grown.append((text + emitted, after, chance * weight))
            paths = grown
        assert distance([(text, 0, chance) for text, _, chance in paths], 4) == 0
    assert len(depths) > 1, "the choice has to change along some path"


def test_choosing_the_length_of_a_block_from_its_own_outcome_is_caught() -> None:
    for method in METHODS:
        outcomes = []
        for text, kept, chance in one_block(method, START, 2, lambda _, drafts: len(drafts)):
            if kept > 0:
                outcomes.append((text, kept, chance))
            else:  # "that one did not pay, so take it as not drafted": a plain draw in place of the residual
                outcomes += [((token,), 0, chance * weight) for token, weight in enumerate(P[START])]
        assert distance(outcomes, 3) > Fraction(1, 100)
