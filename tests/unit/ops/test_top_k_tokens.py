"""The k best ids: equal to a stable sort wherever the border is not tied, in both ways of selecting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.ops.top_k_tokens import top_k_tokens, top_k_tokens_reference


@pytest.mark.parametrize("vocab_size", [5, 64, 65, 1024, 4096, 4100])
@pytest.mark.parametrize("k", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_ids_are_those_of_a_stable_sort(vocab_size: int, k: int, dtype: torch.dtype) -> None:
    # distinct in bfloat16, too, as far as its 8 bits of mantissa reach
    scores = torch.stack([torch.randperm(vocab_size) for _ in range(6)]).to(dtype).view(2, 3, -1)
    values, ids = top_k_tokens(scores, k)
    expected_values, expected_ids = top_k_tokens_reference(scores, k)
    assert torch.equal(values, expected_values)
    if dtype == torch.float32:
        assert torch.equal(ids, expected_ids)
    assert torch.equal(scores.gather(-1, ids), values)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 16), levels=st.integers(1, 50))
def test_ties_come_in_order_of_their_ids(seed: int, k: int, levels: int) -> None:
    scores = torch.randint(0, levels, (3, 2048), generator=torch.Generator().manual_seed(seed)).float()
    values, ids = top_k_tokens(scores, k)
    assert torch.equal(values, top_k_tokens_reference(scores, k)[0])
    for row_values, row_ids in zip(values.tolist(), ids.tolist(), strict=True):
        assert len(set(row_ids)) == k
        pairs = list(zip(row_values, row_ids, strict=True))
        assert pairs == sorted(pairs, key=lambda pair: (-pair[0], pair[1]))


def test_all_best_values_in_one_group_are_all_found() -> None:
    scores = torch.randn(2, 4096) - 100.0
    scores[:, 640:656] = torch.arange(16.0)
    assert top_k_tokens(scores, 16)[1].tolist() == [list(range(655, 639, -1))] * 2


def test_masked_ids_are_left_out_as_long_as_others_remain() -> None:
    scores: Tensor = torch.full((1, 4096), float("-inf"))
    scores[0, [7, 4095]] = torch.tensor([1.0, 2.0])
    values, ids = top_k_tokens(scores, 2)
    assert ids.tolist() == [[4095, 7]] and values.tolist() == [[2.0, 1.0]]
