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
from paceline.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

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
    loss, correct, _ = linear_cross_entropy(ours, teacher, labels, weights, head, kl=kl, ce=ce, chunk_rows=chunk_rows)
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
    divergence, _, _ = linear_cross_entropy(*arguments, kl=1.0, ce=0.0)
    assert float(divergence) == pytest.approx(0.1212, abs=5e-5)
    entropy, _, _ = linear_cross_entropy(*arguments, kl=0.0, ce=1.0)
    assert float(entropy) == pytest.approx(0.6931, abs=5e-5)
    both, _, _ = linear_cross_entropy(*arguments, kl=0.5, ce=2.0)
    assert float(both) == pytest.approx(0.5 * 0.1212 + 2 * 0.6931, abs=2e-4)
    # The other direction is another number: KL(q || p) would be a different objective.
    reverse, _, _ = linear_cross_entropy(p.log(), q.log(), *arguments[2:], kl=1.0, ce=0.0)
    assert float(reverse) == pytest.approx(0.1573, abs=5e-5)


def test_a_student_that_equals_its_teacher_is_done() -> None:
    hidden, _, labels, weights, head = random_case(5)
    student = hidden.clone().requires_grad_()
    loss, _, _ = linear_cross_entropy(student, hidden, labels, weights, head, kl=1.0, ce=0.0)
    loss.backward()
    assert abs(float(loss.detach())) < 1e-6
    assert student.grad is not None and student.grad.abs().max() < 1e-6


def test_weights_of_zero_silence_a_row() -> None:
    hidden, teacher, labels, weights, head = random_case(4)
    weights[2] = 0.0
    student = hidden.clone().requires_grad_()
    loss, _, _ = linear_cross_entropy(student, teacher, labels, weights, head, kl=1.0, ce=1.0)
    loss.backward()
    assert student.grad is not None and torch.equal(student.grad[2], torch.zeros(6))
    keep = [0, 1, 3]
    part, _, _ = linear_cross_entropy(hidden[keep], teacher[keep], labels[keep], weights[keep], head, kl=1.0, ce=1.0)
    torch.testing.assert_close(loss.detach(), part)


def test_no_rows_give_zero_and_a_gradient_of_zeros() -> None:
    hidden, teacher, labels, weights, head = random_case(0)
    student = hidden.requires_grad_()
    loss, correct, _ = linear_cross_entropy(student, teacher, labels, weights, head, kl=1.0, ce=1.0)
    loss.backward()
    assert float(loss.detach()) == 0.0 and correct.shape == (0,) and correct.dtype == torch.bool
    assert student.grad is not None and student.grad.shape == (0, 6)


def test_only_the_student_receives_a_gradient() -> None:
    hidden, teacher, labels, weights, head = random_case(3)
    teacher.requires_grad_()
    head.requires_grad_()
    student = hidden.requires_grad_()
    linear_cross_entropy(student, teacher, labels, weights, head, kl=1.0, ce=1.0)[0].backward()
    assert student.grad is not None and teacher.grad is None and head.grad is None


def test_large_logits_stay_finite() -> None:
    hidden, teacher, labels, weights, head = random_case(3)
    loss, _, _ = linear_cross_entropy(hidden * 1e4, teacher * 1e4, labels, weights, head, kl=1.0, ce=1.0)
    assert torch.isfinite(loss)


def test_16_bit_states_are_summed_in_float32() -> None:
    hidden, teacher, labels, weights, head = (
        t.bfloat16() if t.dtype == torch.float32 and t.dim() == 2 else t for t in random_case(64, 16, 50)
    )
    student = hidden.clone().requires_grad_()
    loss, _, _ = linear_cross_entropy(student, teacher, labels, weights, head, kl=1.0, ce=1.0, chunk_rows=10)
    loss.backward()
    assert loss.dtype == torch.float32 and student.grad is not None and student.grad.dtype == torch.bfloat16
    exact = linear_cross_entropy_reference(hidden, teacher, labels, weights, head, kl=1.0, ce=1.0)
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-2)


def test_a_kl_term_without_a_teacher_is_refused() -> None:
    hidden, _, labels, weights, head = random_case(3)
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        with pytest.raises(AssertionError, match="teacher"):
            function(hidden, None, labels, weights, head, kl=1.0, ce=1.0)
    loss, _, _ = linear_cross_entropy(hidden, None, labels, weights, head, kl=0.0, ce=1.0)
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
        loss, correct, _ = linear_cross_entropy(
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
    _, _, candidates = linear_cross_entropy(
        hidden, None, labels, weights, head, kl=0.0, ce=1.0, chunk_rows=4, num_candidates=3
    )
    assert torch.equal(candidates, (hidden @ head.T).topk(3).indices)
    _, _, none = linear_cross_entropy(hidden, None, labels, weights, head, kl=0.0, ce=1.0)
    assert none.shape == (11, 0)
