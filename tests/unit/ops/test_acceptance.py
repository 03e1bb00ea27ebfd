"""The formulas of acceptance and residual: worked numbers, edges, and the sparse form of q against a dense one."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ops import enumeration
from tests.unit.ops.enumeration import CHAINS, two_symbols
from torch import Tensor

from paceline.ops.acceptance import (
    VERIFY_METHODS,
    accepts_draft,
    block_log_ratios,
    block_threshold,
    candidate_residual,
    candidate_rows,
    count_leading,
    count_to_last,
    is_lossless,
    log_q_of_drafts,
    one_hot_residual,
    reads_q,
    residual_log_weights,
    residual_mass,
)

P = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
Q = torch.tensor([[0.25, 0.25, 0.4, 0.1]], dtype=torch.float64)
NEVER = -math.inf


def normalised(log_weights: Tensor) -> list[float]:
    return log_weights.softmax(-1).flatten().tolist()


def test_worked_residual_of_a_distribution() -> None:
    log_weights = residual_log_weights(P.log(), Q.log())
    assert log_weights.flatten().tolist() == pytest.approx([-1.386294, -2.995732, NEVER, NEVER], abs=1e-6)
    assert normalised(log_weights) == pytest.approx([5 / 6, 1 / 6, 0, 0])
    nucleus = torch.tensor([[10 / 19, 6 / 19, 3 / 19, 0.0]], dtype=torch.float64)
    assert normalised(residual_log_weights(nucleus.log(), Q.log())) == pytest.approx([21 / 26, 5 / 26, 0, 0])


def test_worked_acceptance_is_the_ratio() -> None:
    for p, expected in ((P[0], (1, 1, 3 / 8, 1 / 2)), (torch.tensor([10, 6, 3, 0]).double() / 19, (1, 1, 15 / 38, 0))):
        for log_p, log_q, probability in zip(p.log(), Q[0].log(), expected, strict=True):
            uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
            share = accepts_draft(log_p, log_q, uniforms.log()).double().mean().item()
            assert share == pytest.approx(probability, abs=1e-4)


@pytest.mark.parametrize(
    ("draft", "residual"),
    [
        (0, (0, 3 / 5, 3 / 10, 1 / 10)),
        (1, (5 / 7, 0, 3 / 14, 1 / 14)),
        (2, (10 / 17, 6 / 17, 0, 1 / 17)),
        (3, (10 / 19, 6 / 19, 3 / 19, 0)),
    ],
)
def test_worked_point_mass(draft: int, residual: tuple[float, ...]) -> None:
    assert normalised(one_hot_residual(P.log(), torch.tensor([draft]))) == pytest.approx(residual)


@given(data=st.data(), vocab_size=st.integers(2, 6))
def test_acceptance_and_residual_add_up_to_the_target(data: st.DataObject, vocab_size: int) -> None:
    weights = st.lists(st.integers(0, 9), min_size=vocab_size, max_size=vocab_size).filter(any)
    p, q = (torch.tensor(data.draw(weights), dtype=torch.float64) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    kept = torch.minimum(p, q)
    residual = residual_log_weights(p.log(), q.log()).exp()
    assert torch.allclose(kept + residual, p, atol=1e-12)
    assert residual.sum().item() == pytest.approx(1 - kept.sum().item(), abs=1e-12)


def test_impossible_tokens_are_refused_even_at_u_zero() -> None:
    zero = torch.tensor(0.0)
    assert not accepts_draft(torch.tensor(NEVER), zero, torch.tensor(NEVER))  # p = 0, u = 0
    assert not accepts_draft(torch.tensor(NEVER), torch.tensor(NEVER), torch.tensor(-1.0))  # p = q = 0
    assert not accepts_draft(torch.tensor(-1.0), torch.tensor(NEVER), torch.tensor(-1.0))  # q = 0
    assert accepts_draft(torch.tensor(-50.0), zero, torch.tensor(NEVER))


def test_residual_edges() -> None:
    log_p = torch.tensor([NEVER, NEVER, -1.0, -1.0, -1.0])
    log_q = torch.tensor([NEVER, -1.0, NEVER, -1.0, -1.0000001])
    weights = residual_log_weights(log_p, log_q)
    assert weights[:4].tolist() == [NEVER, NEVER, -1.0, NEVER]
    assert weights[4].item() == pytest.approx(-1.0 + math.log(1.1920929e-07), abs=1e-5)
    assert not weights.isnan().any()


def test_padding_cannot_undo_a_real_candidate_zero() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    log_q = torch.tensor([[0.6, 0.4, 0.0, 0.0]]).log()
    weights = candidate_residual(logits, torch.tensor([[0, 1, -1, -1]]), log_q)
    assert normalised(weights) == pytest.approx([0, 0, 0.75, 0.25], abs=1e-6)


# Block verification


def numbers(*rows: object) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("name", [*CHAINS, "two"])
def test_block_formulas_against_rationals(name: str) -> None:
    chain = two_symbols(3) if name == "two" else CHAINS[name]
    for drafts in itertools.product(range(chain.vocab_size), repeat=chain.num_drafts):
        before = (enumeration.START, *drafts)
        if not all(chain.q[a][x] for a, x in zip(before, drafts, strict=False)):
            continue
        p_K, q_K = ([table[a][x] for a, x in zip(before, drafts, strict=False)] for table in (chain.p, chain.q))
        log_pi = block_log_ratios(numbers(p_K).log(), numbers(q_K).log())[0]
        exact = enumeration.block_weights(chain, drafts)[1:]
        assert log_pi.exp().tolist() == pytest.approx(list(map(float, exact)), abs=1e-12)
        limits = enumeration.thresholds(chain, "block", drafts)
        for i, x in enumerate(drafts[:-1]):
            log_p, log_q = numbers(chain.p[x])[0].log(), numbers(chain.q[x])[0].log()
            left = sum(enumeration.left_over(chain, exact[i], x), Fraction(0))
            in_q = log_q > NEVER  # the drafter's support, as a candidate list has it
            outside = 1 - log_p[in_q].exp().sum()
            for mass in (
                residual_mass(log_pi[i], torch.tensor(0.0), log_p, log_q),
                residual_mass(log_pi[i], outside, log_p[in_q], log_q[in_q]),
            ):
                assert mass.item() == pytest.approx(float(left), abs=1e-12)
                assert block_threshold(log_pi[i], mass).item() == pytest.approx(float(limits[i]), abs=1e-9)


def test_one_hot_thresholds_have_a_closed_form() -> None:
    """pi * (1 - m) / (1 - pi * m), m the next draft's p: the worked chain 4/9, 4/49, 1/50."""
    m = numbers([0.5, 0.2, 0.2])[0]
    log_pi = block_log_ratios(m.log().unsqueeze(0), torch.zeros(1, 3).double())[0]
    for i, expected in enumerate((4 / 9, 4 / 49)):
        mass = residual_mass(log_pi[i], 1 - m[i + 1], m[i + 1 : i + 2].log(), torch.zeros(1).double())
        assert block_threshold(log_pi[i], mass).item() == pytest.approx(expected)
    assert log_pi[2].exp().item() == pytest.approx(1 / 50)


def test_block_edges() -> None:
    log_p, log_q = torch.tensor([[NEVER, -1.0, -1.0]]), torch.tensor([[-1.0, -9.0, NEVER]])
    assert block_log_ratios(log_p, log_q).tolist() == [[NEVER, NEVER, NEVER]]  # nothing revives a block
    assert block_log_ratios(log_p[:, 1:], log_q[:, 1:]).tolist() == [[0.0, NEVER]]  # q = 0 is no licence
    nothing, all_of_it, zero = torch.tensor(NEVER), torch.tensor(0.0), torch.tensor(0.0)
    assert block_threshold(all_of_it, zero).item() == 1.0
    assert block_threshold(nothing, zero).item() == 0.0
    padding = torch.full((2,), NEVER)
    assert residual_mass(torch.tensor(-1.0), torch.tensor(0.5), padding, padding).item() == pytest.approx(0.5 / math.e)
    assert block_log_ratios(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)


def test_counting() -> None:
    keeps = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert count_leading(keeps).tolist() == [2, 0, 0, 4]
    assert count_to_last(keeps).tolist() == [4, 2, 0, 4]
    assert count_leading(keeps[:, :0]).tolist() == count_to_last(keeps[:, :0]).tolist() == [0] * 4


@given(data=st.data())
def test_the_sparse_identity_holds_for_any_support(data: st.DataObject) -> None:
    """Z = pi - sum over candidates of min(pi * p, q), whatever else the vocabulary holds."""
    weights = st.lists(st.integers(0, 9), min_size=6, max_size=6).filter(any)
    p, q = (numbers(data.draw(weights))[0] for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    pi = data.draw(st.floats(0.01, 1.0))
    dense = (pi * p - q).clamp(min=0).sum().item()
    in_q = q > 0
    assert dense == pytest.approx(pi - torch.minimum(pi * p, q)[in_q].sum().item(), abs=1e-12)
    log_pi = torch.tensor(pi, dtype=torch.float64).log()
    found = residual_mass(log_pi, 1 - p[in_q].sum(), p[in_q].log(), q[in_q].log())
    assert found.item() == pytest.approx(dense, abs=1e-12)


# Candidates


def test_both_forms_of_a_proposal_become_one() -> None:
    drafts = torch.tensor([[7, -1]])
    ids, log_q = candidate_rows(drafts, None, None)
    assert ids.tolist() == [[[7], [-1]]] and log_q.tolist() == [[[0.0], [NEVER]]]
    ids, log_q = candidate_rows(
        drafts, torch.tensor([[[7, 3, 0], [-1, 4, -1]]]), torch.tensor([[[0.0, NEVER, NEVER], [0.0, -1.0, NEVER]]])
    )
    assert ids.tolist() == [[[7, -1, -1], [-1, 4, -1]]]
    assert log_q.tolist() == [[[0.0, NEVER, NEVER], [NEVER, -1.0, NEVER]]]


def dense_log_q(candidate_ids: Tensor, log_q: Tensor, vocab_size: int) -> Tensor:
    """The oracle: every id's ln q, -inf outside the candidates."""
    full = torch.full((*candidate_ids.shape[:-1], vocab_size + 1), NEVER, dtype=log_q.dtype)
    return full.scatter(-1, candidate_ids.masked_fill(candidate_ids < 0, vocab_size), log_q)[..., :-1]


@given(data=st.data(), num_candidates=st.integers(1, 8), num_padding=st.integers(0, 3))
def test_a_sparse_residual_is_the_dense_one(data: st.DataObject, num_candidates: int, num_padding: int) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    logits = torch.randn(1, 8, generator=generator).double()
    ids = torch.randperm(8, generator=generator)[:num_candidates].unsqueeze(0)
    log_q = torch.randn(1, num_candidates, generator=generator).double().log_softmax(-1)
    ids = torch.nn.functional.pad(ids, (num_padding, 0), value=-1)
    log_q = torch.nn.functional.pad(log_q, (num_padding, 0), value=NEVER)
    log_pi = -data.draw(st.floats(0.0, 2.0))
    p, q = logits.softmax(-1), dense_log_q(ids, log_q, 8).exp()
    weights = (math.exp(log_pi) * p - q).clamp(min=0)
    found = candidate_residual(logits, ids, log_q - log_pi)
    if weights.sum() > 1e-9:
        assert normalised(found) == pytest.approx((weights / weights.sum()).flatten().tolist(), abs=1e-9)
    else:
        assert (found == NEVER).all()


def test_a_second_proposal_leaves_nothing_of_the_first() -> None:
    """Ids 11, 7, 42 and then 5, 11, 9 of 50: 7 and 42 have no q any more, and 11 has its new one."""
    ids, scores = torch.tensor([[[5, 11, 9]]]), torch.tensor([[[0.0, 1.0, 0.5]]])
    dense = dense_log_q(ids, scores, 50)[0, 0]
    assert {v: dense[v].item() for v in (dense > NEVER).nonzero().flatten().tolist()} == {5: 0.0, 9: 0.5, 11: 1.0}
    found = [log_q_of_drafts(torch.tensor([[v]]), ids, scores).item() for v in (7, 42, 11)]
    assert found == [NEVER, NEVER, 1.0]


# A drafter that walks through candidates

WALK_ROWS = ((11, 7, 42), (2.0, 1.9, 0.0)), ((5, 11, 9), (0.0, 1.0, 0.5)), ((8, 7, 3), (0.0, 2.5, 0.0))
WALK_TARGETS = {11: 0.5, 7: 0.2, 42: 0.1}, {5: 0.3, 11: 0.4, 9: 0.1}, {8: 0.05, 7: 0.9, 3: 0.0}
WALK_DRAFTS = (11, 11, 7)


def walk_row(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """ln p over 50 ids, candidate ids, ln q; the ids that the example lumps together share what is left."""
    ids, scores = (torch.tensor([values]) for values in WALK_ROWS[step])
    named = WALK_TARGETS[step]
    p = torch.full((1, 50), (1 - sum(named.values())) / (50 - len(named)), dtype=torch.float64)
    for token, share in named.items():
        p[0, token] = share
    return p.log(), ids, scores.double().log_softmax(-1)


@pytest.mark.parametrize(
    ("step", "keep", "beta", "residual"),
    [
        (0, 1.0, 0.756490, {11: 0.040431, 7: 0.0, 42: 0.138248}),
        (1, 0.789764, 0.686324, {5: 0.362400, 11: 0.0, 9: 0.0}),
        (2, 1.0, 0.908981, {8: 0.0, 7: 0.450664, 3: 0.0}),
    ],
)
def test_worked_verification_of_a_walk(step: int, keep: float, beta: float, residual: dict[int, float]) -> None:
    log_p, ids, log_q = walk_row(step)
    drafted = log_q_of_drafts(torch.tensor([[WALK_DRAFTS[step]]]), ids.unsqueeze(0), log_q.unsqueeze(0)).double()
    assert min(1.0, (log_p[0, WALK_DRAFTS[step]] - drafted).exp().item()) == pytest.approx(keep, abs=1e-6)
    log_p_C = log_p.gather(1, ids)
    mass = residual_mass(torch.zeros(1).double(), 1 - log_p_C.exp().sum(-1), log_p_C, log_q)
    assert 1 - mass.item() == pytest.approx(beta, abs=1e-6)
    found = candidate_residual(log_p, ids, log_q).softmax(-1)[0]
    assert {token: found[token].item() for token in residual} == pytest.approx(residual, abs=1e-6)
    others = 1 - sum(found[token].item() for token in residual)
    assert others == pytest.approx(1 - sum(residual.values()), abs=2e-6)


def test_the_row_of_another_predecessor_is_lossy() -> None:
    """Step 1 drawn after candidate 0, judged as if after candidate 1: total variation 0.398."""
    log_p, ids, log_q = walk_row(1)
    wrong = torch.tensor([[3.0, 0.0, 0.0]]).double().log_softmax(-1)
    output = torch.zeros(50, dtype=torch.float64)
    for told, expected in ((log_q, 0.0), (wrong, 0.398)):
        output = torch.zeros(50, dtype=torch.float64)
        residual = candidate_residual(log_p, ids, told).softmax(-1)[0]
        for c, token in enumerate(ids[0].tolist()):
            drawn = log_q[0, c].exp()
            keep = (log_p[0, token] - told[0, c]).exp().clamp(max=1)
            output[token] += drawn * keep
            output += drawn * (1 - keep) * residual
        assert (output - log_p[0].exp()).abs().sum().item() / 2 == pytest.approx(expected, abs=5e-4)
    named = [output[token].item() for token in (5, 11, 9)]
    assert named == pytest.approx([0.0615, 0.5792, 0.3184], abs=5e-5)


def test_every_method_says_whether_it_is_lossless() -> None:
    assert VERIFY_METHODS == ("standard", "block", "match", "coupled")
    assert all(is_lossless(method) for method in VERIFY_METHODS)
    assert [reads_q(method) for method in VERIFY_METHODS] == [True, True, False, False]
