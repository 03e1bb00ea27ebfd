"""The rows of a draft block: worked numbers, and what replaces the reference against it."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.conftest import Version
from tests.unit.ops.slot_cases import VOCAB_SIZE, assert_same, moved, odd_slots

from paceline.ops.block_rows import block_rows, block_rows_native, block_rows_reference, block_rows_triton
from paceline.ops.slot_columns import ANCHOR, LENGTH, SlotColumns


def test_a_block_is_the_anchor_and_masks_behind_the_context() -> None:
    columns, _ = odd_slots(3, 2, 0)
    columns.whole_SX[:3, LENGTH] = torch.tensor([5, 17, 18])
    columns.whole_SX[:3, ANCHOR] = torch.tensor([7, -1, 2**31 - 1])
    rows = block_rows(
        columns, torch.tensor([0, 1, 2]), num_rows=3, mask_id=VOCAB_SIZE + 4, vocab_size=VOCAB_SIZE, max_positions=20
    )
    mask = VOCAB_SIZE + 4
    assert rows.token_ids_BQ.tolist() == [[7, mask, mask], [0, mask, mask], [VOCAB_SIZE - 1, mask, mask]]
    assert rows.positions_BQ.tolist() == [[5, 6, 7], [17, 18, 19], [18, 19, 19]]
    assert rows.is_beyond_B.tolist() == [False, False, True]
    assert rows.lengths_B.tolist() == [5, 17, 18]


@pytest.mark.parametrize("num_rows", [1, 4, 5])
@pytest.mark.parametrize("slots", [[2], [4, 0, 5, 2]])
def test_every_version_agrees_with_the_reference(version: Version, num_rows: int, slots: list[int]) -> None:
    columns, _ = odd_slots(5, 2, 0, seed=num_rows)
    columns.whole_SX[:3, LENGTH] = torch.tensor([31, 0, 30]) - num_rows  # beyond the table by one, and just within
    rows = torch.tensor(slots)
    expected = block_rows_reference(columns, rows, num_rows, 60, VOCAB_SIZE, 30)
    there = SlotColumns(*moved(columns, version.device))
    run = version.of(block_rows_triton, block_rows_native)
    assert_same(run(there, rows.to(version.device), num_rows, 60, VOCAB_SIZE, 30), expected)
