"""Paged latent attention: the reference against contiguous rows, poisoned blocks, parts, the kernel."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops import paged_latent_attention as operation
from paceline.ops.multi_head_latent_attention import absorbed_latent_attention_reference
from paceline.ops.paged_latent_attention import (
    paged_latent_attention,
    paged_latent_attention_reference,
    paged_latent_attention_triton,
)


class Case(NamedTuple):
    """Queries and a store in which requests' blocks are shuffled, and every other row is NaN."""

    q_BTNX: Tensor
    planes: Tensor
    table_SJ: Tensor
    slots_B: Tensor
    starts_B: Tensor
    texts: list[Tensor]  # each request's rows, contiguous, those of the step included


def make_case(
    starts: list[int], num_rows: int, num_heads: int, width: int, block_size: int, dtype: torch.dtype = torch.float32
) -> Case:
    longest = max(starts) + num_rows
    num_columns = -(-longest // block_size) + 1
    num_blocks = len(starts) * num_columns + 3
    order = (torch.randperm(num_blocks - 1) + 1).tolist()
    planes = torch.full((num_blocks, block_size, 1, width), torch.nan)
    planes[0] = 0.0  # the trash block stays finite
    slots = (torch.randperm(len(starts) + 2)[: len(starts)]).tolist()
    table = torch.zeros(len(starts) + 3, num_columns, dtype=torch.int32)
    texts = []
    for request, start in enumerate(starts):
        text = torch.randn(start + num_rows, width).to(dtype)
        for first in range(0, len(text), block_size):
            block = order.pop()
            table[slots[request], first // block_size] = block
            rows = text[first : first + block_size]
            planes[block, : len(rows), 0] = rows.float()
        texts.append(text)
    q = torch.randn(len(starts), num_rows, num_heads, width).to(dtype)
    return Case(q, planes.to(dtype), table, torch.tensor(slots), torch.tensor(starts), texts)


@pytest.mark.parametrize(("num_rows", "block_size"), [(1, 4), (5, 4), (3, 16)])
def test_the_reference_agrees_with_contiguous_rows(num_rows: int, block_size: int) -> None:
    case = make_case([0, 13, 6], num_rows, 3, 7, block_size)
    found = paged_latent_attention(*case[:5], value_size=5, scale=0.4)
    assert found.shape == (3, num_rows, 3, 5)
    for request, text in enumerate(case.texts):
        visible = torch.ones(num_rows, len(text), dtype=torch.bool).tril(len(text) - num_rows)
        expected = absorbed_latent_attention_reference(case.q_BTNX[request : request + 1], text[None], visible, 5, 0.4)
        torch.testing.assert_close(found[request : request + 1], expected)


def test_a_table_read_one_block_off_is_seen() -> None:
    case = make_case([9], 2, 2, 6, 4)
    expected = paged_latent_attention(*case[:5], value_size=4, scale=0.4)
    swapped = case.table_SJ.clone()
    swapped[:, :2] = case.table_SJ[:, :2].flip(1)
    there = (case.slots_B, case.starts_B)
    found = paged_latent_attention(case.q_BTNX, case.planes, swapped, *there, value_size=4, scale=0.4)
    torch.testing.assert_close(found, expected)  # without positions, whole blocks in another order are the same text
    swapped[:, 0] = 0
    found = paged_latent_attention(case.q_BTNX, case.planes, swapped, *there, value_size=4, scale=0.4)
    assert (found - expected).abs().max() > 0.01


def test_what_does_not_fit_is_refused() -> None:
    case = make_case([3, 2], 1, 2, 6, 4)
    q, planes, table, slots, starts, _ = case
    for arguments, message in (
        ((q, planes[:, :, 0], table, slots, starts), "planes has shape"),
        ((q, planes[..., :5], table, slots, starts), r"expected \[num_blocks, block_size, 1, 6\]"),
        ((q, planes, table[0], slots, starts), "table has shape"),
        ((q, planes, table, slots[:1], starts), "slots has shape"),
        ((q, planes, table, slots, starts[:1]), "starts has shape"),
    ):
        with pytest.raises(ShapeError, match=message):
            paged_latent_attention(*arguments, value_size=4, scale=1.0)
    with pytest.raises(ShapeError, match="at least 7 channels"):
        paged_latent_attention(q, planes, table, slots, starts, value_size=7, scale=1.0)
    assert paged_latent_attention(q[:0], planes, table, slots[:0], starts[:0], value_size=4, scale=1.0).shape[0] == 0


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize(
    ("starts", "num_rows", "num_heads", "width", "value_size", "block_size"),
    [
        ([0], 1, 1, 1, 1, 2),
        ([3, 130], 2, 5, 24, 20, 16),
        ([0, 64, 63], 1, 3, 16, 16, 64),
        ([70], 8, 6, 40, 32, 32),
    ],
)
@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device,
    is_wide: bool,
    starts: list[int],
    num_rows: int,
    num_heads: int,
    width: int,
    value_size: int,
    block_size: int,
    num_parts: int,
) -> None:
    # The interpreter multiplies matrices of bf16 as if they were integers.
    narrow = torch.float16 if kernel_device.type == "cpu" else torch.bfloat16
    dtype = torch.float32 if is_wide else narrow
    case = make_case(starts, num_rows, num_heads, width, block_size, dtype)
    expected = paged_latent_attention_reference(*case[:5], value_size, 0.3)
    there = [t.to(kernel_device) for t in case[:5]]
    found = paged_latent_attention_triton(*there, value_size, 0.3, num_parts)
    assert found.dtype == dtype and found.shape == expected.shape
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_the_number_of_parts_fills_a_gpu_and_leaves_each_some_work() -> None:
    choose = operation._choose_parts
    assert choose(1, 1024) == 16 and choose(1, 7) == 2 and choose(1, 3) == 1
    assert choose(264, 1024) == 1 and choose(100, 1024) == 4
