"""The k best ids: equal to a stable sort, ties at the border included, in both ways of selecting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.ops import top_k_tokens as module
from paceline.ops.top_k_tokens import ids_of_keys, order_keys, top_k_tokens, top_k_tokens_reference


@pytest.fixture(autouse=True, scope="module")
def through_torch() -> Iterator[None]:
    """The native form has its own tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.native, "can_find_top_k", lambda _scores, _k: False)
        yield


def agrees(scores: Tensor, k: int) -> bool:
    found, expected = top_k_tokens(scores, k), top_k_tokens_reference(scores, k)
    return torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("vocab_size", [5, 64, 65, 1024, 4096, 4100])
@pytest.mark.parametrize("k", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_ids_are_those_of_a_stable_sort(vocab_size: int, k: int, dtype: torch.dtype) -> None:
    """In the half precisions many of these whole numbers are rounded to equal values."""
    scores = torch.stack([torch.randperm(vocab_size) - vocab_size // 2 for _ in range(6)]).to(dtype).view(2, 3, -1)
    assert agrees(scores, k)
    assert top_k_tokens(scores, k)[0].dtype == dtype


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 16),
    levels=st.integers(1, 50),
    vocab_size=st.sampled_from([40, 2048, 2113, 4096]),
    masked_share=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_of_equal_values_the_lowest_ids_stay_and_come_first(
    seed: int, k: int, levels: int, vocab_size: int, masked_share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (3, vocab_size), generator=generator) - levels / 2
    scores[torch.rand(scores.shape, generator=generator) < masked_share] = -torch.inf
    assert agrees(scores, k)


def test_all_equal_gives_the_first_ids() -> None:
    for vocab_size in (100, 4096, 4100):
        assert top_k_tokens(torch.zeros(2, vocab_size), 16)[1].tolist() == [list(range(16))] * 2


def test_zero_has_no_sign() -> None:
    assert top_k_tokens(torch.tensor([[-1.0, -0.0, 0.0, -0.0]]), 3)[1].tolist() == [[1, 2, 3]]


def test_another_order_of_equal_values_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: of equal values the highest ids stay."""
    scores = torch.randint(0, 6, (20, 4096), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert agrees(scores, 16)
    monkeypatch.setattr(module, "order_keys", lambda values, ids: order_keys(values, 2**31 - 1 - ids))
    monkeypatch.setattr(module, "ids_of_keys", lambda keys: 2**31 - 1 - ids_of_keys(keys))
    assert not agrees(scores, 16)


def test_keys_order_extreme_values_and_give_ids_back() -> None:
    tiny = torch.finfo(torch.float32).tiny
    values = torch.tensor([torch.inf, 3e38, 1.0, tiny / 4, 0.0, -tiny / 4, -1.0, -3e38, -torch.inf])
    ids = torch.tensor([0, 2**31 - 1, 5, 2**24 + 1, 9, 1, 7, 3, 2**30])
    keys = order_keys(values, ids)
    assert torch.equal(keys, keys.sort(descending=True).values)
    assert torch.equal(ids_of_keys(keys), ids)


def test_all_best_values_in_one_group_are_all_found() -> None:
    scores = torch.randn(2, 4096) - 100.0
    scores[:, 640:656] = torch.arange(16.0)
    assert top_k_tokens(scores, 16)[1].tolist() == [list(range(655, 639, -1))] * 2


def test_best_values_behind_the_last_whole_group_are_found() -> None:
    scores = torch.zeros(1, 4100)
    scores[0, 4096:] = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert top_k_tokens(scores, 5)[1].tolist() == [[4097, 4098, 4096, 0, 1]]


def test_masked_ids_are_left_out_as_long_as_others_remain() -> None:
    scores: Tensor = torch.full((1, 4096), float("-inf"))
    scores[0, [7, 4095]] = torch.tensor([1.0, 2.0])
    values, ids = top_k_tokens(scores, 2)
    assert ids.tolist() == [[4095, 7]] and values.tolist() == [[2.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab_size", "k", "group"),
    [(5, 5, 16), (64, 4, 16), (65, 16, 2), (301, 7, 8), (40, 1, 64), (40, 40, 4), (33, 9, 4)],
)
def test_the_kernels_agree_with_a_stable_sort(
    kernel_device: torch.device,
    vocab_size: int,
    k: int,
    group: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few levels, so that ties lie at the border and across tiles; some ids are masked out, and zeros have signs."""
    monkeypatch.setattr(module, "_GROUP", group)
    monkeypatch.setattr(module, "_GROUPS_AT_ONCE", 4)
    generator = torch.Generator().manual_seed(vocab_size)
    scores = ((torch.randint(0, 9, (2, 3, vocab_size), generator=generator) - 4) * 0.75).to(dtype)
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = -torch.inf
    scores[1, 2] = -torch.inf
    scores[0, 0] = scores[0, 0].clamp(max=0.0)  # zeros come first
    scores[0, 0, ::2] = torch.where(scores[0, 0, ::2] == 0, -0.0, scores[0, 0, ::2])
    values, ids = module.top_k_tokens_triton(scores.to(kernel_device), k)
    expected_values, expected_ids = top_k_tokens_reference(scores + 0.0, k)
    assert torch.equal(ids.cpu(), expected_ids)
    assert values.dtype == dtype and torch.equal(values.cpu(), expected_values)
