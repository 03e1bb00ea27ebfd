"""No statistics: all drafts, all uniforms, exact joints. First the formulas on rationals, then the operation itself.

The operation is run once per draft and side of every threshold, with its uniforms given and its noise left out, so what
it accepts and the weights it would draw from are seen directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.ops import enumeration
from tests.unit.ops.enumeration import (
    CHAINS,
    FOUR_SYMBOLS,
    LONGER,
    START,
    THREE_SYMBOLS,
    Chain,
    Joint,
    Number,
    Outcome,
    Ratio,
    Row,
    count_kept,
    coupled,
    distance,
    emitted,
    joint_of,
    marginal,
    outcomes,
    rows,
    target_joint,
    two_symbols,
    whole_block,
)
from torch import Tensor

from paceline.ops import acceptance, noise
from paceline.ops import verify_block as module
from paceline.ops.verify_block import verify_block

RATIOS: tuple[Ratio, ...] = ("standard", "block")


def one_row(p: str, q: str) -> Chain:
    size = range(-1, len(p.split()))
    return Chain(rows(dict.fromkeys(size, p)), rows(dict.fromkeys(size, q)), num_drafts=1)


# The formulas


def exact_joint(
    chain: Chain,
    method: Ratio,
    rule: Callable[[Sequence[int]], int] = whole_block,
    count: Callable[[Ratio, Outcome], int] = count_kept,
    residual_of: Ratio | None = None,
) -> tuple[Joint, Number]:
    """The output's joint and the mean number of kept drafts."""
    found = [(one, count(method, one)) for one in outcomes(chain, method, rule)]
    mean = sum(one.probability * kept for one, kept in found)
    draws = ((one.probability, one.drafts[:n], emitted(chain, residual_of or method, one, n)) for one, n in found)
    return joint_of(chain, draws), mean


@pytest.mark.parametrize("method", RATIOS)
@pytest.mark.parametrize("name", CHAINS)
def test_the_joint_of_the_output_is_the_targets(name: str, method: Ratio) -> None:
    joint, _ = exact_joint(CHAINS[name], method)
    assert joint == target_joint(CHAINS[name])


@given(data=st.data())
@settings(max_examples=15)
def test_any_chain_keeps_its_joint_and_block_keeps_at_least_as_many_drafts(data: st.DataObject) -> None:
    weights = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)
    tables = []
    for _ in range(2):
        drawn = {before: data.draw(weights) for before in range(-1, 3)}
        tables.append({before: tuple(Fraction(w, sum(row)) for w in row) for before, row in drawn.items()})
    chain = Chain(*tables, num_drafts=2)
    exact, means = target_joint(chain), []
    for method in RATIOS:
        joint, mean = exact_joint(chain, method)
        assert joint == exact
        means.append(mean)
    assert means[1] >= means[0]
    for pairs in (apart, coupled):
        assert matched_joint(chain, pairs)[0] == exact


def test_mean_accepted_drafts_of_the_worked_chains() -> None:
    assert exact_joint(THREE_SYMBOLS, "standard")[1] == Fraction(147, 100)
    assert exact_joint(THREE_SYMBOLS, "block")[1] == Fraction(3, 2)
    table = {1: ("2/3", "2/3"), 2: ("10/9", "11/9"), 3: ("38/27", "5/3"), 4: ("130/81", "166/81")}
    for num_drafts, means in table.items():
        chain = two_symbols(num_drafts)
        assert tuple(exact_joint(chain, method)[1] for method in RATIOS) == tuple(map(Fraction, means))
    for chain in CHAINS.values():
        assert exact_joint(chain, "block")[1] >= exact_joint(chain, "standard")[1]


def test_thresholds_of_the_worked_chains() -> None:
    two, half = two_symbols(2), Fraction(1, 2)
    table = {(0, 0): ((half, half / 2), (0, half / 2)), (0, 1): ((half, 1), (0, 1)), (1, 0): ((1, half), (1, half))}
    for drafts, (weights, limits) in (table | {(1, 1): ((1, 1), (1, 1))}).items():
        assert tuple(enumeration.block_weights(two, drafts)[1:]) == weights
        assert tuple(enumeration.thresholds(two, "block", drafts)) == limits
    for drafts, weights, limits in (
        ((0, 0), "5/6 1", "11/16 1"),
        ((0, 1), "5/6 1", "11/16 1"),
        ((0, 2), "5/6 5/21", "11/16 5/21"),
        ((1, 0), "1 1/2", "1 1/2"),
        ((1, 1), "1 3/4", "1 3/4"),
        ((2, 2), "1 1/3", "1 1/3"),
    ):
        assert enumeration.block_weights(THREE_SYMBOLS, drafts)[1:] == list(map(Fraction, weights.split()))
        assert enumeration.thresholds(THREE_SYMBOLS, "block", drafts) == list(map(Fraction, limits.split()))


def test_a_one_hot_block_is_kept_as_standard_keeps_it() -> None:
    certain = rows(dict.fromkeys((START, 0, 1, 2), "1 0 0"))
    chain = Chain(rows({START: ".5 .3 .2", 0: ".2 .2 .6", 1: "1 0 0", 2: "1 0 0"}), certain, num_drafts=3)
    assert enumeration.thresholds(chain, "block", (0, 0, 0)) == [Fraction(4, 9), Fraction(4, 49), Fraction(1, 50)]
    assert exact_joint(chain, "block")[1] == exact_joint(chain, "standard")[1] == Fraction(31, 50)
    for method in RATIOS:
        assert exact_joint(chain, method)[0] == target_joint(chain)


def test_mutants_of_block_verification_are_lossy() -> None:
    exact = target_joint(THREE_SYMBOLS)
    stops = exact_joint(THREE_SYMBOLS, "block", count=lambda _, outcome: enumeration.leading(outcome.passes))
    assert stops[1] == Fraction(53, 40)
    assert marginal(stops[0], 0, 3) == [Fraction(33, 80), Fraction(31, 80), Fraction(1, 5)]
    assert distance(stops[0], exact) == Fraction(7, 80)
    residual, _ = exact_joint(THREE_SYMBOLS, "block", residual_of="standard")
    assert [float(mass) for mass in marginal(residual, 1, 3)] == pytest.approx([0.302, 0.398, 0.3])
    assert distance(residual, exact) == Fraction(1, 125)


def prefix_rule(drafts: Sequence[int]) -> int:
    """Ends a block behind a draft by that draft: whether draft i is verified depends on those before it."""
    return 1 if drafts[0] == 0 else 2 if drafts[1] == 1 else 3


def peeking_rule(drafts: Sequence[int]) -> int:
    """Ends a block before a draft by that very draft."""
    return 0 if drafts[0] == 2 else 1 if drafts[1] == 2 else 3


def test_a_rule_may_look_at_earlier_drafts_alone() -> None:
    exact = target_joint(LONGER)
    joint, mean = exact_joint(LONGER, "block", prefix_rule)
    assert joint == exact and float(mean) == pytest.approx(1.35)
    assert float(distance(exact_joint(LONGER, "block", peeking_rule)[0], exact)) == pytest.approx(0.184, abs=5e-4)
    assert exact_joint(LONGER, "standard", prefix_rule)[0] == exact
    assert distance(exact_joint(LONGER, "standard", peeking_rule)[0], exact) > Fraction(1, 20)


def test_dropping_drafts_by_their_own_probability_or_grammar_is_lossy() -> None:
    chain = one_row(".5 .3 .15 .05", ".25 .25 .4 .1")
    kept_if_likely, _ = exact_joint(chain, "standard", lambda drafts: int(chain.q[START][drafts[0]] >= Fraction(3, 10)))
    assert marginal(kept_if_likely, 0, 4) == pytest.approx([0.508, 0.222, 0.240, 0.030], abs=5e-4)
    assert float(distance(kept_if_likely, target_joint(chain))) == pytest.approx(0.098, abs=5e-4)

    grammar = one_row(".5 .5 0", ".6 .1 .3")  # token 2 is forbidden
    for method in RATIOS:
        dropped, _ = exact_joint(grammar, method, lambda drafts: int(drafts[0] != 2))
        assert marginal(dropped, 0, 3) == [Fraction(13, 20), Fraction(7, 20), 0]
        assert distance(dropped, target_joint(grammar)) == Fraction(3, 20)
        assert exact_joint(grammar, method)[0] == target_joint(grammar)


def grammar_chain() -> Chain:
    """Token 2 is forbidden everywhere, and drafted nevertheless."""
    return Chain(
        rows({START: ".5 .5 0", 0: ".3 .7 0", 1: ".9 .1 0", 2: "1 0 0"}),
        rows({START: ".6 .1 .3", 0: ".2 .2 .6", 1: ".3 .3 .4", 2: ".2 .2 .6"}),
        num_drafts=3,
    )


def up_to_first_invalid(drafts: Sequence[int]) -> int:
    return drafts.index(2) + 1 if 2 in drafts else 3


def before_first_invalid(drafts: Sequence[int]) -> int:
    return drafts.index(2) if 2 in drafts else 3


@pytest.mark.parametrize("method", RATIOS)
def test_the_first_draft_that_a_grammar_forbids_is_judged(method: Ratio) -> None:
    chain = grammar_chain()
    assert exact_joint(chain, method, up_to_first_invalid)[0] == target_joint(chain)
    assert distance(exact_joint(chain, method, before_first_invalid)[0], target_joint(chain)) > Fraction(1, 20)


@pytest.mark.parametrize("name", ["three", "four", "longer"])
def test_other_mutants_are_lossy(name: str) -> None:
    chain = CHAINS[name]
    exact = target_joint(chain)
    found = list(outcomes(chain, "standard"))
    target_residual = (
        (o.probability, o.drafts[:n], chain.p[(START, *o.drafts)[n]])
        for o in found
        for n in [count_kept("standard", o)]
    )
    assert distance(joint_of(chain, target_residual), exact) > Fraction(1, 100)
    all_kept = ((o.probability, o.drafts, chain.p[o.drafts[-1]]) for o in found)
    assert distance(joint_of(chain, all_kept), exact) > Fraction(1, 20)


# Judging by equality


def matched_joint(
    chain: Chain, pairs: Callable[[Row, Row], dict[tuple[int, int], Fraction]], emits_draft: bool = False
) -> tuple[Joint, Number]:
    """Draft x and the target's own y drawn together: keep while they are equal, then emit y."""
    states: list[tuple[Fraction, tuple[int, ...]]] = [(Fraction(1), ())]
    found: list[tuple[Number, tuple[int, ...], Sequence[Number]]] = []
    mean: Number = 0
    for place in range(chain.num_drafts):
        further = []
        for probability, kept in states:
            before = kept[-1] if kept else START
            stopped = [Fraction(0)] * chain.vocab_size
            for (x, y), share in pairs(chain.p[before], chain.q[before]).items():
                if x == y:
                    further.append((probability * share, (*kept, x)))
                else:
                    stopped[x if emits_draft else y] += share
            found.append((probability, kept, stopped))
            mean += place * probability * sum(stopped)
        states = further
    found += [(probability, kept, chain.p[kept[-1]]) for probability, kept in states]
    mean += chain.num_drafts * sum(probability for probability, _ in states)
    return joint_of(chain, iter(found)), mean


def apart(p: Row, q: Row) -> dict[tuple[int, int], Fraction]:
    return {(x, y): q[x] * p[y] for x in range(len(q)) for y in range(len(p)) if q[x] and p[y]}


def test_a_coupled_pair_has_the_right_margins_and_agrees_often() -> None:
    p, q = FOUR_SYMBOLS.p[START], FOUR_SYMBOLS.q[START]
    assert sum(mass for (x, y), mass in coupled(p, q).items() if x == y) == Fraction(139, 210)
    assert sum(mass for (x, y), mass in apart(p, q).items() if x == y) == Fraction(265, 1000)
    for before in range(-1, 4):
        p, q = FOUR_SYMBOLS.p[before], FOUR_SYMBOLS.q[before]
        pairs = coupled(p, q)
        for v in range(4):
            assert sum(mass for (x, _), mass in pairs.items() if x == v) == q[v]
            assert sum(mass for (_, y), mass in pairs.items() if y == v) == p[v]


@pytest.mark.parametrize("pairs", [apart, coupled], ids=["match", "coupled"])
@pytest.mark.parametrize("name", CHAINS)
def test_equality_leaves_the_joint_alone(
    name: str, pairs: Callable[[Row, Row], dict[tuple[int, int], Fraction]]
) -> None:
    chain = CHAINS[name]
    assert matched_joint(chain, pairs)[0] == target_joint(chain)
    if name != "one-hot":
        assert distance(matched_joint(chain, pairs, emits_draft=True)[0], target_joint(chain)) > Fraction(1, 20)


def test_a_coupled_draft_judged_by_the_ratio_is_lossy() -> None:
    """Accept x with min(1, p/q), else emit the target's y: the two are not independent, so the residual is not y's."""
    p, q = FOUR_SYMBOLS.p[START], FOUR_SYMBOLS.q[START]
    out = [Fraction(0)] * 4
    for (x, y), mass in coupled(p, q).items():
        keep = min(p[x] / q[x], Fraction(1))
        out[x] += mass * keep
        out[y] += mass * (1 - keep)
    assert sum(out) == 1
    assert sum(abs(a - b) for a, b in zip(out, p, strict=True)) / 2 > Fraction(1, 50)


# The operation on the same enumeration


def as_logits(row: Row) -> list[float]:
    return torch.tensor([float(share) for share in row], dtype=torch.float64).log().tolist()


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Joint, float]]:
    """Runs `verify_block` over an enumeration: the output's joint and the mean number of kept drafts, in floats."""

    def run(
        chain: Chain, method: Ratio, rule: Callable[[Sequence[int]], int] = whole_block, is_one_hot: bool = False
    ) -> tuple[Joint, float]:
        found = list(outcomes(chain, method, rule))
        num_requests, num_drafts, vocab_size = len(found), chain.num_drafts, chain.vocab_size
        drafts = torch.full((num_requests, num_drafts), -1)
        log_u = torch.zeros(num_requests, num_drafts)
        before = torch.full((num_requests, num_drafts + 1), START)
        for b, one in enumerate(found):
            drafts[b, : len(one.passes)] = torch.tensor(one.verified)
            before[b, 1 : len(one.passes) + 1] = torch.tensor(one.verified)
            for i, (is_passed, limit) in enumerate(zip(one.passes, one.thresholds, strict=True)):
                log_u[b, i] = float(limit / 2 if is_passed else (1 + limit) / 2)
        contexts = range(-1, vocab_size)
        log_p, log_q = (torch.tensor([as_logits(t[a]) for a in contexts]).float() for t in (chain.p, chain.q))
        zeros = torch.zeros(num_requests, dtype=torch.long)
        weights: list[Tensor] = []

        def draw(scores: Tensor) -> Tensor:
            weights.append(scores.double().softmax(-1))
            return scores.argmax(-1)

        monkeypatch.setattr(acceptance, "log_acceptance_uniforms", lambda *_: log_u.log())
        monkeypatch.setattr(noise, "gumbel_noise", lambda *_, **__: torch.zeros(()))
        monkeypatch.setattr(module, "pick_largest", draw)
        q = (
            {}
            if is_one_hot
            else {
                "candidate_ids_BKC": torch.arange(vocab_size).expand(num_requests, num_drafts, vocab_size),
                "log_q_BKC": log_q[before[:, :-1] + 1],
            }
        )
        verdict = verify_block(
            drafts,
            log_p[before + 1],
            temperature_B=torch.ones(num_requests),
            seed_B=zeros,
            anchor_position_B=zeros,
            step_B=zeros,
            method=method,
            **q,
        )
        assert verdict.fault_B.sum() == 0 and verdict.num_zero_q_B.sum() == 0
        kept = verdict.accepted_B.tolist()
        rows_ = zip(found, kept, weights[0].tolist(), strict=True)
        joint = joint_of(chain, ((float(one.probability), one.drafts[:n], row) for one, n, row in rows_))
        return joint, sum(float(one.probability) * n for one, n in zip(found, kept, strict=True))

    return run


Operation = Callable[..., tuple[Joint, float]]
EXACT = 1e-5  # logits are float32


@pytest.mark.parametrize("method", RATIOS)
@pytest.mark.parametrize("name", CHAINS)
def test_the_operation_has_the_targets_joint(name: str, method: Ratio, operation: Operation) -> None:
    chain = CHAINS[name]
    joint, mean = operation(chain, method)
    assert distance(joint, target_joint(chain)) < EXACT
    assert mean == pytest.approx(float(exact_joint(chain, method)[1]), abs=1e-6)
    if name == "one-hot":
        assert distance(operation(chain, method, is_one_hot=True)[0], target_joint(chain)) < EXACT


@pytest.mark.parametrize("method", RATIOS)
def test_the_operation_with_blocks_that_end_early(method: Ratio, operation: Operation) -> None:
    exact = target_joint(LONGER)
    assert distance(operation(LONGER, method, prefix_rule)[0], exact) < EXACT
    assert distance(operation(LONGER, method, peeking_rule)[0], exact) > 0.05
    chain = grammar_chain()
    assert distance(operation(chain, method, up_to_first_invalid)[0], target_joint(chain)) < EXACT
    assert distance(operation(chain, method, before_first_invalid)[0], target_joint(chain)) > 0.05


def test_faults_planted_in_the_operation(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = target_joint(THREE_SYMBOLS)

    def planted(name: str, value: object, method: Ratio) -> tuple[Joint, float]:
        with monkeypatch.context() as patch:
            patch.setattr(acceptance, name, value)
            return operation(THREE_SYMBOLS, method)

    joint, mean = planted("count_to_last", acceptance.count_leading, "block")
    assert mean == pytest.approx(53 / 40, abs=1e-6) and float(distance(joint, exact)) == pytest.approx(0.0875, abs=1e-5)
    sound = acceptance.count_by_ratio

    def standard_residual(*arguments: object) -> tuple[Tensor, Tensor]:
        accepted_B, log_pi_B = sound(*arguments)
        return accepted_B, torch.zeros_like(log_pi_B)

    joint, mean = planted("count_by_ratio", standard_residual, "block")
    assert mean == pytest.approx(1.5, abs=1e-6) and float(distance(joint, exact)) == pytest.approx(0.008, abs=1e-5)
    for name, value in (
        ("residual_log_weights", lambda log_p, log_q: log_p),
        ("accepts_draft", lambda log_p, log_q, log_u: torch.ones_like(log_p, dtype=torch.bool)),
    ):
        assert distance(planted(name, value, "standard")[0], exact) > 0.01
