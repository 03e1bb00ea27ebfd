"""Physical rows of a pass: one by one, past a slot's blocks, and what replaces the reference."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.conftest import Version

from paceline.errors import ShapeError
from paceline.ops import table_rows as operation
from paceline.ops.table_rows import table_rows, table_rows_reference, table_rows_triton

TABLE = torch.tensor([[3, 1, 0], [2, 6, 4], [0, 0, 0]], dtype=torch.int32)


def one_by_one(slots: list[int], starts: list[int], num_rows: int, size: int) -> list[list[int]]:
    rows = []
    for slot, start in zip(slots, starts, strict=True):
        blocks = [*TABLE[slot].tolist(), *([0] * 100)]
        rows.append([max(1, blocks[p // size] * size + p % size) for p in range(start, start + num_rows)])
    return rows


CASES = [([1, 0, 2], [3, 0, 7], 6, 4), ([1], [20], 9, 8), ([0, 1], [0, 31], 1, 16), ([1], [5], 300, 64)]


@pytest.mark.parametrize(("slots", "starts", "num_rows", "size"), CASES)
def test_the_definition_agrees_with_a_loop(slots: list[int], starts: list[int], num_rows: int, size: int) -> None:
    found = table_rows(TABLE, torch.tensor(slots), torch.tensor(starts), num_rows, block_size=size)
    assert found.dtype == torch.int64 and found.tolist() == one_by_one(slots, starts, num_rows, size)
    assert int(found.min()) >= 1, "the row of zeros is never written"


@pytest.mark.parametrize(("slots", "starts", "num_rows", "size"), CASES)
def test_every_version_agrees_with_the_definition(
    version: Version, slots: list[int], starts: list[int], num_rows: int, size: int
) -> None:
    numbers = torch.tensor([slots, starts], device=version.device).t().contiguous()
    there = (TABLE.to(version.device), *numbers.unbind(1), num_rows, size)
    run = version.of(table_rows_triton, operation.native.table_rows)
    assert torch.equal(run(*there), table_rows_reference(*there))


def test_a_row_of_zeros_that_is_given_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "_FIRST_ROW", 0)
    monkeypatch.setattr(operation.native, "can_run", lambda *_arrays: False)
    with pytest.raises(AssertionError):
        test_the_definition_agrees_with_a_loop([2], [0], 2, 4)


def test_what_does_not_fit_is_refused() -> None:
    slots = torch.tensor([0, 1])
    with pytest.raises(ShapeError, match="table has shape"):
        table_rows(TABLE[0], slots, slots, 1, block_size=4)
    with pytest.raises(ShapeError, match="starts has shape"):
        table_rows(TABLE, slots, slots[:1], 1, block_size=4)
    assert table_rows(TABLE, slots[:0], slots[:0], 3, block_size=4).shape == (0, 3)
