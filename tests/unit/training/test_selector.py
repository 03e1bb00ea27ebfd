"""The selector's loss against a slow loop; gradients; the label's place among the candidates; teacher forcing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.models.drafters.dflash2 import CandidateSelector
from paceline.training.selector import SelectorRows, selector_loss, with_labels

V, D, RANK, C, R = 30, 8, 4, 5, 12


def make_selector() -> CandidateSelector:
    selector = CandidateSelector(V, D, RANK, C)
    for parameter in selector.parameters():
        torch.nn.init.normal_(parameter)
    return selector


def make_rows(seed: int = 0) -> tuple[SelectorRows, Tensor]:
    torch.manual_seed(seed)
    head = torch.randn(V, D)
    hidden = torch.randn(R, D, requires_grad=True)
    rows = SelectorRows(
        hidden_RD=hidden,
        teacher_RD=torch.randn(R, D),
        labels_R=torch.randint(0, V, (R,)),
        predecessors_R=torch.randint(0, V, (R,)),
        candidates_RC=(hidden @ head.T).topk(C).indices,
        weights_R=torch.rand(R),
    )
    assert rows.teacher_RD is not None
    return replace(rows, teacher_log_sum_R=(rows.teacher_RD @ head.T).logsumexp(-1)), head


def slow_loss(
    selector: CandidateSelector, rows: SelectorRows, head: Tensor, kl: float, ce: float, l1: float = 0.0
) -> float:
    """One row and one candidate at a time, in float64."""
    assert rows.teacher_RD is not None
    total = 0.0
    project = selector.hidden_projection.weight.double()
    for row in range(R):
        ids = rows.candidates_RC[row].tolist()
        label = int(rows.labels_R[row])
        if label not in ids:
            ids[-1] = label
        h, g = rows.hidden_RD[row].double(), rows.teacher_RD[row].double()
        wanted = selector.predecessor_codebook[rows.predecessors_R[row]].double() * (project @ h)
        scores = torch.stack([head[c].double() @ h + wanted @ selector.successor_codebook[c].double() for c in ids])
        log_q = scores.log_softmax(0)
        log_p = torch.stack([head[c].double() @ g for c in ids]).log_softmax(0)
        loss = kl * (log_p.exp() * (log_p - log_q)).sum().item() - ce * log_q[ids.index(label)].item()
        q = dict(zip(ids, log_q.exp().tolist(), strict=True))
        p = (head.double() @ g).softmax(0).tolist()
        loss += l1 * sum(abs(p[token] - q.get(token, 0.0)) for token in range(V))
        total += rows.weights_R[row].item() * loss
    return total


@pytest.mark.parametrize(("kl", "ce", "l1"), [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.7, 0.3, 0.4)])
def test_the_loss_is_that_of_a_slow_loop(kl: float, ce: float, l1: float) -> None:
    selector, (rows, head) = make_selector(), make_rows()
    loss, _ = selector_loss(selector, rows, head, kl=kl, ce=ce, l1=l1)
    assert loss.item() == pytest.approx(slow_loss(selector, rows, head, kl, ce, l1), rel=1e-5)


def test_l1_is_what_sampling_refuses_of_the_whole_distribution() -> None:
    """Twice 1 - sum min(p, q); over the candidates' share of p alone it would be another number."""
    selector, (rows, head) = make_selector(), make_rows()
    rows = replace(rows, labels_R=rows.candidates_RC[:, 0], weights_R=torch.ones(R))
    assert rows.teacher_RD is not None and rows.teacher_log_sum_R is not None
    unary_RC = (rows.hidden_RD @ head.T).gather(1, rows.candidates_RC)
    _, scores = selector.walk(
        rows.hidden_RD.unsqueeze(1), unary_RC.unsqueeze(1), rows.candidates_RC.unsqueeze(1), rows.predecessors_R
    )
    p = (rows.teacher_RD @ head.T).softmax(-1).gather(1, rows.candidates_RC)
    accepted = torch.minimum(p, scores.squeeze(1).softmax(-1)).sum().item()
    loss, _ = selector_loss(selector, rows, head, kl=0.0, ce=0.0, l1=1.0)
    assert loss.item() == pytest.approx(2 * (R - accepted), rel=1e-5)
    within = (rows.teacher_RD @ head.T).gather(1, rows.candidates_RC).logsumexp(-1)
    wrong, _ = selector_loss(selector, replace(rows, teacher_log_sum_R=within), head, kl=0.0, ce=0.0, l1=1.0)
    assert abs(wrong.item() - loss.item()) > 0.1


@pytest.mark.parametrize("terms", [{"kl": 0.5, "ce": 1.0}, {"kl": 0.0, "ce": 0.0, "l1": 1.0}])
def test_gradients_reach_states_and_all_of_the_selector(terms: dict[str, float]) -> None:
    selector, (rows, head) = make_selector(), make_rows()
    loss, _ = selector_loss(selector, rows, head, **terms)
    loss.backward()
    for tensor in (rows.hidden_RD, *selector.parameters()):
        assert tensor.grad is not None and torch.isfinite(tensor.grad).all() and tensor.grad.abs().sum() > 0
    # only rows of tokens that took part
    took_part = set(rows.predecessors_R.tolist())
    assert selector.predecessor_codebook.grad is not None
    moved = selector.predecessor_codebook.grad.abs().sum(1).nonzero().flatten().tolist()
    assert set(moved) <= took_part


def test_a_missing_label_replaces_the_weakest_candidate_alone() -> None:
    candidates = torch.tensor([[4, 2, 9], [4, 2, 9], [9, 4, 2]])
    assert with_labels(candidates, torch.tensor([7, 2, 9])).tolist() == [[4, 2, 7], [4, 2, 9], [9, 4, 2]]


def test_the_predecessor_decides() -> None:
    """Teacher forcing: another predecessor gives another score; the label as its own predecessor would be a leak."""
    selector, (rows, head) = make_selector(), make_rows()
    loss, _ = selector_loss(selector, rows, head, kl=0.0, ce=1.0)
    shifted = replace(rows, predecessors_R=rows.labels_R)
    assert not torch.isclose(loss, selector_loss(selector, shifted, head, kl=0.0, ce=1.0)[0])


def test_right_rows_are_those_whose_best_candidate_is_the_label() -> None:
    selector, (rows, head) = make_selector(), make_rows()
    with torch.no_grad():
        selector.successor_codebook.zero_()  # no pair scores: the drafter's own order stands
    best = (rows.hidden_RD @ head.T).argmax(-1)
    _, right = selector_loss(selector, replace(rows, labels_R=best), head, kl=0.0, ce=1.0)
    assert right.all()
    _, right = selector_loss(selector, rows, head, kl=0.0, ce=1.0)
    assert torch.equal(right, best == rows.labels_R)


def test_no_rows_give_no_loss() -> None:
    selector, (rows, head) = make_selector(), make_rows()
    none = SelectorRows(*(value[:0] for value in vars(rows).values()))
    loss, right = selector_loss(selector, none, head, kl=1.0, ce=1.0, l1=1.0)
    assert loss.item() == 0.0 and right.shape == (0,)
    loss.backward()
