"""Attention over whole sequences: a token's bits are its sequence's own in row-invariant arithmetic, and only there."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import tiny_prompts, tiny_target, wrap_target
from torch import Tensor

from paceline.models.attends import WholeSequence, document_spans
from paceline.models.layers import Attend, LinearMode
from paceline.models.sequence_attend import RowInvariantSequences, sequence_attend
from paceline.models.targets.dense import DenseTarget


def _model(mode: LinearMode) -> DenseTarget:
    return wrap_target(tiny_target("qwen3", num_layers=2), mode).model


def _states(model: DenseTarget, text: list[int], width: int, num_rows: int, attend: Attend) -> Tensor:
    """Last states of one text in the middle row of a padded batch."""
    ids = torch.zeros(num_rows, width, dtype=torch.int64)
    ids[:, : len(text)] = torch.tensor(tiny_prompts([len(text)] * num_rows, seed=1))
    ids[num_rows // 2, : len(text)] = torch.tensor(text)
    with torch.no_grad():
        hidden: Tensor = model(ids, torch.arange(width).expand(num_rows, width), attend)
    return hidden[num_rows // 2, : len(text)]


WIDTHS = [(64, 1), (64, 3), (70, 1), (128, 2), (200, 1), (256, 3)]


@pytest.mark.parametrize("length", [1, 40, 64])
def test_neither_width_nor_neighbours_show_in_row_invariant_arithmetic(length: int) -> None:
    model = _model("row_invariant")
    (text,) = tiny_prompts([length])
    alone = _states(model, text, length, 1, sequence_attend(model))
    for width, num_rows in WIDTHS:
        assert torch.equal(alone, _states(model, text, width, num_rows, sequence_attend(model)))


def test_a_fused_kernel_would_show_them() -> None:
    """The planted fault of the test above: the attention that other arithmetic uses."""
    model = _model("row_invariant")
    (text,) = tiny_prompts([150])
    alone = _states(model, text, 150, 1, WholeSequence())
    seen = [_states(model, text, width, rows, WholeSequence()) for width, rows in [(151, 1), (192, 1), (256, 3)]]
    assert not all(torch.equal(alone, states) for states in seen)


def test_a_packed_text_has_the_bits_of_a_text_alone() -> None:
    model = _model("row_invariant")
    texts = tiny_prompts([9, 70, 3])
    ids = torch.tensor([[*texts[0], *texts[1], *texts[2], 0, 0]])
    documents = torch.tensor([[0] * 9 + [1] * 70 + [2] * 3 + [-1] * 2], dtype=torch.int32)
    positions = torch.tensor([[*range(9), *range(70), *range(3), 0, 1]])
    with torch.no_grad():
        packed = model(ids, positions, sequence_attend(model, documents))[0]
    for text, start in zip(texts, [0, 9, 79], strict=True):
        alone = _states(model, text, len(text), 1, sequence_attend(model))
        assert torch.equal(packed[start : start + len(text)], alone)


def test_both_attentions_agree_to_rounding() -> None:
    model = _model("row_invariant")
    (text,) = tiny_prompts([90])
    fused = _states(model, text, 90, 1, WholeSequence())
    torch.testing.assert_close(fused, _states(model, text, 90, 1, RowInvariantSequences()), rtol=0, atol=3e-5)


def test_the_linears_decide() -> None:
    assert isinstance(sequence_attend(_model("row_invariant")), RowInvariantSequences)
    assert isinstance(sequence_attend(_model("plain")), WholeSequence)


def test_spans_of_documents() -> None:
    assert document_spans([0, 0, 1, 2, 2, -1, -1]) == [(0, 2), (2, 3), (3, 5)]
    assert document_spans([-1]) == [] and document_spans([]) == []
