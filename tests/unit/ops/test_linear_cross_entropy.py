"""Chunked loss against its definition: values, gradients, chunk sizes, terms, empty batches, golden numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paceline.ops.linear_cross_entropy as linear_cross_entropy_module
from paceline.ops.linear_cross_entropy import (
    LowRankBias,
    RowLosses,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

TERMS = [(1.0, 0.0), (0.0, 1.0), (0.7, 0.4), (0.0, 0.0)]


def random_case(num_rows: int, width: int = 6, vocab_size: int = 11, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden, teacher = torch.randn(2, num_rows, width, generator=generator).unbind(0)
    labels = torch.randint(vocab_size, (num_rows,), generator=generator)
    weights = torch.rand(num_rows, generator=generator)
    head = torch.randn(vocab_size, width, generator=generator)
    return hidden, teacher, labels, weights, head


def slow_loss(
    hidden: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor, head: Tensor, kl: float, ce: float
) -> float:
    total = 0.0
    for row in range(hidden.shape[0]):
        student = [float(head[v].double() @ hidden[row].double()) for v in range(head.shape[0])]
        master = [float(head[v].double() @ teacher[row].double()) for v in range(head.shape[0])]
        log_z_q, log_z_p = (math.log(sum(math.exp(s) for s in scores)) for scores in (student, master))
        for v in range(head.shape[0]):
            log_p = master[v] - log_z_p
            total += kl * float(weights[row]) * math.exp(log_p) * (log_p - (student[v] - log_z_q))
        total -= ce * float(weights[row]) * (student[int(labels[row])] - log_z_q)
    return total


@given(
    num_rows=st.integers(0, 9),
    chunk_rows=st.integers(1, 12),
    terms=st.sampled_from(TERMS),
    width=st.integers(1, 7),
    vocab_size=st.integers(2, 13),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_match_the_definition(
    num_rows: int, chunk_rows: int, terms: tuple[float, float], width: int, vocab_size: int, seed: int
) -> None:
    kl, ce = terms
    hidden, teacher, labels, weights, head = random_case(num_rows, width, vocab_size, seed)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, correct, *_ = linear_cross_entropy(ours, teacher, labels, weights, head, kl=kl, ce=ce, chunk_rows=chunk_rows)
    expected = linear_cross_entropy_reference(theirs, teacher, labels, weights, head, kl=kl, ce=ce)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    slow = slow_loss(hidden, teacher, labels, weights, head, kl, ce)
    assert float(loss.detach()) == pytest.approx(slow, rel=1e-4, abs=1e-4)
    (loss * 3).backward()
    (expected * 3 + 0 * theirs.sum()).backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(correct, (hidden @ head.T).argmax(-1) == labels)
    assert correct.dtype == torch.bool


def test_golden_numbers() -> None:
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.5, 0.2, 0.3]])
    arguments = (q.log(), p.log(), torch.tensor([0]), torch.ones(1), torch.eye(3))
    divergence, *_ = linear_cross_entropy(*arguments, kl=1.0, ce=0.0)
    assert float(divergence) == pytest.approx(0.1212, abs=5e-5)
    entropy, *_ = linear_cross_entropy(*arguments, kl=0.0, ce=1.0)
    assert float(entropy) == pytest.approx(0.6931, abs=5e-5)
    both, *_ = linear_cross_entropy(*arguments, kl=0.5, ce=2.0)
    assert float(both) == pytest.approx(0.5 * 0.1212 + 2 * 0.6931, abs=2e-4)
    # The other direction is another number: KL(q || p) would be a different objective.
    reverse, *_ = linear_cross_entropy(p.log(), q.log(), *arguments[2:], kl=1.0, ce=0.0)
    assert float(reverse) == pytest.approx(0.1573, abs=5e-5)


def test_a_student_that_equals_its_teacher_is_done() -> None:
    hidden, _, labels, weights, head = random_case(5)
    student = hidden.clone().requires_grad_()
    loss, *_ = linear_cross_entropy(student, hidden, labels, weights, head, kl=1.0, ce=0.0)
    loss.backward()
    assert abs(float(loss.detach())) < 1e-6
    assert student.grad is not None and student.grad.abs().max() < 1e-6


def test_weights_of_zero_silence_a_row() -> None:
    hidden, teacher, labels, weights, head = random_case(4)
    weights[2] = 0.0
    student = hidden.clone().requires_grad_()
    loss, *_ = linear_cross_entropy(student, teacher, labels, weights, head, kl=1.0, ce=1.0)
    loss.backward()
    assert student.grad is not None and torch.equal(student.grad[2], torch.zeros(6))
    keep = [0, 1, 3]
    part, *_ = linear_cross_entropy(hidden[keep], teacher[keep], labels[keep], weights[keep], head, kl=1.0, ce=1.0)
    torch.testing.assert_close(loss.detach(), part)


def test_no_rows_give_zero_and_a_gradient_of_zeros() -> None:
    hidden, teacher, labels, weights, head = random_case(0)
    student = hidden.requires_grad_()
    loss, correct, *_ = linear_cross_entropy(student, teacher, labels, weights, head, kl=1.0, ce=1.0)
    loss.backward()
    assert float(loss.detach()) == 0.0 and correct.shape == (0,) and correct.dtype == torch.bool
    assert student.grad is not None and student.grad.shape == (0, 6)


def test_the_teacher_receives_no_gradient() -> None:
    hidden, teacher, labels, weights, head = random_case(3)
    teacher.requires_grad_()
    student = hidden.requires_grad_()
    linear_cross_entropy(student, teacher, labels, weights, head, kl=1.0, ce=1.0)[0].backward()
    assert student.grad is not None and teacher.grad is None and head.grad is None


@given(
    num_rows=st.integers(0, 9),
    chunk_rows=st.integers(1, 12),
    terms=st.sampled_from([(1.0, 0.0, 0.0), (0.0, 0.1, 0.9), (0.0, 0.0, 1.0), (0.5, 0.4, 0.3)]),
    has_bias=st.booleans(),
    has_other_head=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_bias_own_head_and_l1_match_the_definition(
    num_rows: int, chunk_rows: int, terms: tuple[float, float, float], has_bias: bool, has_other_head: bool, seed: int
) -> None:
    """Values, and gradients of states, code, table and head, against autograd over whole logits."""
    kl, ce, l1 = terms
    hidden, teacher, labels, weights, head = random_case(num_rows, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    code, table = torch.randn(num_rows, 3, generator=generator), torch.randn(11, 3, generator=generator)
    other = torch.randn(11, 6, generator=generator) if has_other_head else None
    found = []
    for function, options in ((linear_cross_entropy, {"chunk_rows": chunk_rows}), (linear_cross_entropy_reference, {})):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, code, table, head)]
        bias = LowRankBias(leaves[1], leaves[2]) if has_bias else None
        given_head = leaves[3] if has_other_head else head
        result = function(
            leaves[0],
            teacher,
            labels,
            weights,
            given_head,
            kl=kl,
            ce=ce,
            l1=l1,
            bias=bias,
            teacher_head_VD=other,
            **options,
        )
        loss = result.loss if isinstance(result, RowLosses) else result
        (2 * loss + 0 * sum(leaf.sum() for leaf in leaves)).backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_agree_with_finite_differences() -> None:
    hidden, teacher, labels, weights, head = random_case(4)
    generator = torch.Generator().manual_seed(5)
    code, table = torch.randn(4, 2, generator=generator), torch.randn(11, 2, generator=generator)
    leaves = [tensor.double().requires_grad_() for tensor in (hidden, code, table, head)]
    teacher_head = head.double()

    def loss() -> Tensor:
        student, code, table, own_head = leaves
        rows = (student, teacher.double(), labels, weights, own_head)
        bias = LowRankBias(code, table)
        return linear_cross_entropy(
            *rows, kl=0.3, ce=0.5, l1=0.7, bias=bias, chunk_rows=3, teacher_head_VD=teacher_head
        ).loss

    loss().backward()
    step = 1e-2  # the loss is summed in float32 whatever comes in, so the difference is a coarse one
    for leaf in leaves:
        assert leaf.grad is not None
        for place in ((0, 0), (1, 1), (3, 1)):
            with torch.no_grad():
                leaf[place] += step
                above = float(loss())
                leaf[place] -= 2 * step
                below = float(loss())
                leaf[place] += step
            assert float(leaf.grad[place]) == pytest.approx((above - below) / (2 * step), rel=2e-2, abs=2e-3)


def test_acceptance_is_what_sampling_keeps_with_the_bias_in_q() -> None:
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.5, 0.2, 0.3]])
    arguments = (p.log(), torch.tensor([0]), torch.ones(1), torch.eye(3))
    found = linear_cross_entropy(q.log(), *arguments, kl=0.0, ce=0.0, l1=1.0, wants_acceptance=True)
    assert float(found.acceptance_R) == pytest.approx(0.8) and float(found.loss) == pytest.approx(0.4)
    # Out of nothing but the bias: the same q.
    bias = LowRankBias(torch.ones(1, 1), q.log().T)
    biased = linear_cross_entropy(
        torch.zeros(1, 3), *arguments, kl=0.0, ce=0.0, l1=1.0, bias=bias, wants_acceptance=True
    )
    assert float(biased.acceptance_R) == pytest.approx(0.8) and float(biased.loss) == pytest.approx(0.4)
    assert linear_cross_entropy(q.log(), *arguments, kl=0.0, ce=1.0).acceptance_R.shape == (0,)


def test_large_logits_stay_finite() -> None:
    hidden, teacher, labels, weights, head = random_case(3)
    loss, *_ = linear_cross_entropy(hidden * 1e4, teacher * 1e4, labels, weights, head, kl=1.0, ce=1.0)
    assert torch.isfinite(loss)


def test_16_bit_states_are_summed_in_float32() -> None:
    hidden, teacher, labels, weights, head = (
        t.bfloat16() if t.dtype == torch.float32 and t.dim() == 2 else t for t in random_case(64, 16, 50)
    )
    student = hidden.clone().requires_grad_()
    loss, *_ = linear_cross_entropy(student, teacher, labels, weights, head, kl=1.0, ce=1.0, chunk_rows=10)
    loss.backward()
    assert loss.dtype == torch.float32 and student.grad is not None and student.grad.dtype == torch.bfloat16
    exact = linear_cross_entropy_reference(hidden, teacher, labels, weights, head, kl=1.0, ce=1.0)
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-2)


def test_a_kl_term_without_a_teacher_is_refused() -> None:
    hidden, _, labels, weights, head = random_case(3)
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        with pytest.raises(AssertionError, match="teacher"):
            function(hidden, None, labels, weights, head, kl=1.0, ce=1.0)
    loss, *_ = linear_cross_entropy(hidden, None, labels, weights, head, kl=0.0, ce=1.0)
    assert torch.isfinite(loss)


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 9])
def test_the_form_for_the_compiler_fills_its_last_chunk_without_a_trace(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chunk has one shape there; the function itself is the same and is left uncompiled here."""
    shapes = []

    def recording(logits: Tensor, *arguments: Any) -> Any:
        shapes.append(tuple(logits.shape))
        return linear_cross_entropy_module._chunk_loss_and_gradient(logits, *arguments)

    monkeypatch.setattr(linear_cross_entropy_module, "_compiled_chunk", lambda: recording)
    hidden, teacher, labels, weights, head = random_case(num_rows)
    results = []
    for compiled in (False, True):
        student = hidden.clone().requires_grad_()
        loss, correct, *_ = linear_cross_entropy(
            student, teacher, labels, weights, head, kl=0.7, ce=0.4, chunk_rows=4, compiled=compiled
        )
        loss.backward()
        assert student.grad is not None
        results.append((loss.detach(), correct, student.grad))
    assert set(shapes) <= {(4, 11)}
    torch.testing.assert_close(results[1], results[0])


def test_candidates_are_the_best_ids_of_every_row() -> None:
    hidden, head = torch.randn(11, 8), torch.randn(40, 8)
    labels, weights = torch.zeros(11, dtype=torch.long), torch.ones(11)
    candidates = linear_cross_entropy(
        hidden, None, labels, weights, head, kl=0.0, ce=1.0, chunk_rows=4, num_candidates=3
    ).candidates_RC
    assert torch.equal(candidates, (hidden @ head.T).topk(3).indices)
    none = linear_cross_entropy(hidden, None, labels, weights, head, kl=0.0, ce=1.0).candidates_RC
    assert none.shape == (11, 0)


def test_the_teachers_sum_over_all_ids_comes_with_candidates_and_l1_alone() -> None:
    hidden, teacher, head = torch.randn(11, 8), torch.randn(11, 8), torch.randn(40, 8)
    arguments = (hidden, teacher, torch.zeros(11, dtype=torch.long), torch.ones(11), head)
    found = linear_cross_entropy(*arguments, kl=0.5, ce=0.0, l1=1.0, chunk_rows=4, num_candidates=3)
    torch.testing.assert_close(found.teacher_log_sum_R, (teacher @ head.T).logsumexp(-1))
    assert linear_cross_entropy(*arguments, kl=0.5, ce=0.0, l1=1.0).teacher_log_sum_R.shape == (0,)
    assert linear_cross_entropy(*arguments, kl=0.5, ce=0.0, num_candidates=3).teacher_log_sum_R.shape == (0,)
