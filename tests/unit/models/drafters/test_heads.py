"""DSpark's heads: the worked example, a slow recurrent loop, and what a confidence may read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.contract import MarkovKind, MarkovSettings
from paceline.models.drafters.heads import ConfidenceHead, MarkovHead, kept_by_confidence
from paceline.models.layers import set_linear_mode

# The worked example: 4 ids, rank 2, hidden width 2.
W1 = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 2.0]]
W2 = [[0.0, 1.0], [1.0, 0.0], [-1.0, 1.0], [0.5, -0.5]]
BIAS_AFTER = [[0.0, 1.0, -1.0, 0.5], [1.0, 0.0, 1.0, -0.5], [1.0, 1.0, 0.0, 0.0], [2.0, -1.0, 3.0, -1.5]]


def close(found: Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


@torch.no_grad()
def worked_head(kind: MarkovKind) -> MarkovHead:
    head = MarkovHead(MarkovSettings(2, kind), hidden_size=2, target_vocab_size=4, draft_vocab_size=4)
    head.markov_w1.weight.copy_(torch.tensor(W1))
    head.markov_w2.weight.copy_(torch.tensor(W2))
    return head


def random_head(kind: MarkovKind, *, rank: int = 5, width: int = 7, num_ids: int = 11) -> MarkovHead:
    head = MarkovHead(
        MarkovSettings(rank, kind), hidden_size=width, target_vocab_size=num_ids, draft_vocab_size=num_ids
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def test_a_vanilla_bias_follows_the_previous_token_alone() -> None:
    head = worked_head("vanilla")
    bias, state = head.bias(torch.arange(4), torch.randn(4, 2))
    close(bias, BIAS_AFTER)
    assert state is None and bias.dtype == torch.float32
    assert [name for name, _ in head.named_parameters()] == ["markov_w1.weight", "markov_w2.weight"]


def test_a_gate_scales_the_embedding_of_the_previous_token() -> None:
    head = worked_head("gated")
    assert head.gate_proj is not None and head.gate_proj.bias is not None
    with torch.no_grad():
        head.gate_proj.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1, 1, 0]]))
        head.gate_proj.bias.copy_(torch.tensor([0.0, 0.5]))
    hidden, previous = torch.tensor([[1.0, 2.0]]), torch.tensor([3])
    gate = torch.sigmoid(head.gate_proj(torch.cat((hidden, head.markov_w1(previous)), dim=-1)))
    close(gate[0], [0.731059, 0.817574])
    bias, _ = head.bias(previous, hidden)
    close(bias[0], [1.635149, -0.731059, 2.366208, -1.183104], 2e-6)
    # The order of the gate's inputs is part of the format: the other way round gives something else.
    swapped = torch.sigmoid(head.gate_proj(torch.cat((head.markov_w1(previous), hidden), dim=-1)))
    assert (swapped - gate).abs().max() > 0.1


def slow_recurrence(
    head: MarkovHead, previous: list[int], hidden_KD: Tensor, *, state: list[float]
) -> list[list[float]]:
    """Biases of one block in float64, scalar by scalar; `state` is changed."""
    assert head.joint_proj is not None and head.joint_proj.bias is not None
    w1, w2 = head.markov_w1.weight.double().tolist(), head.markov_w2.weight.double().tolist()
    joint, offset = head.joint_proj.weight.double().tolist(), head.joint_proj.bias.double().tolist()
    rank = len(state)
    biases = []
    for token, hidden in zip(previous, hidden_KD.double().tolist(), strict=True):
        inputs = state + w1[token] + hidden
        rows = [sum(w * x for w, x in zip(row, inputs, strict=True)) + b for row, b in zip(joint, offset, strict=True)]
        keep = [1 / (1 + math.exp(-x)) for x in rows[:rank]]
        new = [math.tanh(x) for x in rows[rank : 2 * rank]]
        out = [math.tanh(x) for x in rows[2 * rank :]]
        state[:] = [k * s + (1 - k) * n for k, s, n in zip(keep, state, new, strict=True)]
        biases.append([sum(w * x for w, x in zip(row, out, strict=True)) for row in w2])
    return biases


@torch.no_grad()
def test_a_recurrent_head_agrees_with_a_slow_loop_and_forgets_between_blocks() -> None:
    head = random_head("rnn")
    blocks = [([3, 1, 4, 1], torch.randn(4, 7)), ([5, 9, 2, 6], torch.randn(4, 7))]
    carried = [0.0] * 5
    for index, (previous, hidden) in enumerate(blocks):
        state, found = None, []
        for token, row in zip(previous, hidden, strict=True):
            bias, state = head.bias(torch.tensor([token]), row[None], state)
            found.append(bias[0])
        close(torch.stack(found).double(), slow_recurrence(head, previous, hidden, state=[0.0] * 5), 1e-5)
        faulty = torch.tensor(slow_recurrence(head, previous, hidden, state=carried))
        if index == 1:  # the state of block 0 would have changed block 1, from its first row on
            assert ((faulty - torch.stack(found)).abs().amax(1) > 1e-2).all()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_a_batch_and_chosen_ids_give_the_same_bias(kind: str) -> None:
    head = random_head(kind)
    previous, hidden, ids = torch.tensor([2, 7, 2]), torch.randn(3, 7), torch.tensor([[0, 4], [10, 3], [9, 9]])
    for mode in ("plain", "row_invariant"):
        set_linear_mode(head, mode)
        bias, state = head.bias(previous, hidden)
        some, _ = head.bias(previous, hidden, None, ids)
        torch.testing.assert_close(some, bias.gather(-1, ids), rtol=1e-5, atol=1e-5)
        again, _ = head.bias(previous, hidden, state)
        for lane in range(3):
            alone, own = head.bias(previous[lane : lane + 1], hidden[lane : lane + 1])
            torch.testing.assert_close(alone[0], bias[lane], rtol=1e-5, atol=1e-6)
            after, _ = head.bias(previous[lane : lane + 1], hidden[lane : lane + 1], own)
            torch.testing.assert_close(after[0], again[lane], rtol=1e-5, atol=1e-6)
            if mode == "row_invariant":
                assert torch.equal(alone[0], bias[lane])
    assert (state is not None) == (kind == "rnn")
    assert torch.equal(again, bias) == (kind != "rnn")


# --- confidence ---


@torch.no_grad()
def worked_confidence() -> ConfidenceHead:
    head = ConfidenceHead(2, 2)
    head.proj.weight.copy_(torch.tensor([[0.5, -0.25, 0.1, 0.2]]))
    assert head.proj.bias is not None
    head.proj.bias.fill_(-0.1)
    return head


@torch.no_grad()
def test_the_worked_confidence() -> None:
    head = worked_confidence()
    hidden = torch.tensor([[[1.0, 2], [0, 1], [2, 0]]])
    embedding = torch.tensor(W1)[torch.tensor([[3, 2, 0]])]
    close(head.logits(hidden, embedding)[0], [0.2, -0.05, 1.0])
    confidence = head(hidden, embedding)
    close(confidence[0], [0.549834, 0.487503, 0.731059])
    close(confidence.cumprod(-1)[0], [0.549834, 0.268046, 0.195957])
    assert kept_by_confidence(confidence, 0.5).tolist() == [1]


@torch.no_grad()
def test_confidence_is_computed_in_float32_and_may_read_hidden_rows_alone() -> None:
    head = worked_confidence().to(torch.bfloat16)
    hidden, embedding = torch.randn(2, 3, 2).bfloat16(), torch.randn(2, 3, 2).bfloat16()
    found = head(hidden, embedding)
    assert found.dtype == torch.float32
    inputs = torch.cat((hidden, embedding), dim=-1).double()
    bias = head.proj.bias
    assert bias is not None
    exact = torch.sigmoid(inputs @ head.proj.weight[0].double() + bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    plain = ConfidenceHead(2)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    assert plain.proj.weight.shape == (1, 2)
    assert torch.equal(plain(hidden.float()), plain(hidden.float(), embedding.float()))


def test_slots_are_kept_up_to_the_first_that_is_not_confident() -> None:
    confidence = torch.tensor([[0.9, 0.4, 0.9], [0.2, 0.9, 0.9], [0.6, 0.5, 0.7], [0.9, 0.8, 0.1]])
    assert kept_by_confidence(confidence, 0.5).tolist() == [1, 0, 3, 2]
    assert kept_by_confidence(confidence, 0.0).tolist() == [3, 3, 3, 3]
    assert kept_by_confidence(confidence * 0, 0.0).tolist() == [3, 3, 3, 3]
    assert kept_by_confidence(confidence, 1.0).tolist() == [0, 0, 0, 0]
    # Not the survival product: 0.6 * 0.5 lies below the threshold, each factor does not.
    assert kept_by_confidence(confidence.cumprod(-1), 0.5).tolist() == [1, 0, 1, 2]
