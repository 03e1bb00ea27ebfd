"""Attention of hybrid targets over whole sequences: rows of several documents, padding, both arithmetics."""

from __future__ import annotations

import pytest
import torch
from tests.tiny_kimi import kimi_target, small_kimi_config
from torch import Tensor

from paceline.models.attends import BlocksOverContext, WholeSequence
from paceline.models.hybrid import HybridAttend
from paceline.models.layers import LinearMode
from paceline.models.sequence_attend import RowInvariantSequences, sequence_attend
from paceline.models.stepwise import StepwiseContext


def texts(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def test_who_serves_hybrid_targets() -> None:
    target = kimi_target(small_kimi_config(4, 2))
    context = StepwiseContext(target.contract, 1, 8, dtype=torch.float32, device="cpu")
    for attend in (WholeSequence(), RowInvariantSequences(), context):
        assert isinstance(attend, HybridAttend)
    assert not isinstance(BlocksOverContext([], []), HybridAttend)


@pytest.mark.parametrize("mode", ["plain", "row_invariant"])
def test_documents_packed_into_a_row_are_sequences_of_their_own(mode: LinearMode) -> None:
    target, parts = kimi_target(small_kimi_config(8, 4), mode=mode), texts(7, 40, 1, 12)
    documents = torch.full((1, 64), -1)
    packed = torch.zeros(1, 64, dtype=torch.int64)
    start = 0
    for index, part in enumerate(parts):
        documents[0, start : start + len(part)], packed[0, start : start + len(part)] = index, part
        start += len(part)
    found = target.logits(target(packed, packed, sequence_attend(target, documents)))[0]
    start = 0
    for part in parts:
        alone = target.logits(target(part[None], part[None], sequence_attend(target)))[0]
        mine = found[start : start + len(part)]
        if mode == "row_invariant":
            assert torch.equal(mine, alone)
        else:
            torch.testing.assert_close(mine, alone, rtol=0, atol=2e-4)
        start += len(part)
    assert bool(found.isfinite().all()), "padding disturbs nothing"


@pytest.mark.parametrize("mode", ["plain", "row_invariant"])
def test_padding_on_the_right_changes_no_row(mode: LinearMode) -> None:
    target, (long, short) = kimi_target(small_kimi_config(8, 4), mode=mode), texts(70, 41)
    rows = torch.zeros(2, 70, dtype=torch.int64)
    rows[0], rows[1, :41] = long, short
    found = target.logits(target(rows, rows, sequence_attend(target)))[1, :41]
    alone = target.logits(target(short[None], short[None], sequence_attend(target)))[0]
    if mode == "row_invariant":
        assert torch.equal(found, alone)
    torch.testing.assert_close(found, alone, rtol=0, atol=2e-4)


def test_both_arithmetics_agree_over_more_than_one_chunk() -> None:
    target, (text,) = kimi_target(small_kimi_config(8, 4)), texts(150)
    whole = target.logits(target(text[None], text[None], WholeSequence()))
    invariant = target.logits(target(text[None], text[None], RowInvariantSequences()))
    torch.testing.assert_close(invariant, whole, rtol=0, atol=5e-4)
