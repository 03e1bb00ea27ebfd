"""The rows of a step, request by request, and what replaces the reference against it."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.conftest import Version
from tests.unit.ops.slot_cases import BLOCK_SIZE, MAX_BLOCKS, VOCAB_SIZE, assert_same, moved, odd_slots, tables

from paceline.ops.slot_columns import ANCHOR, IS_ALIVE, LENGTH, SEED, STEP, TEMPERATURE, SlotColumns
from paceline.ops.step_rows import (
    CacheCells,
    WaitingDrafts,
    step_rows,
    step_rows_native,
    step_rows_reference,
    step_rows_triton,
)

NUM_SLOTS = 7
NUM_POSITIONS = 9


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_rows_are_what_plain_numbers_give(num_drafts: int) -> None:
    columns, drafts = odd_slots(NUM_SLOTS, 4, 3)
    slots = [5, 0, 2, 1, NUM_SLOTS, 3]
    context = torch.tensor([0, 3, 9, 100, 4, 1])
    rows = step_rows(
        columns,
        drafts,
        torch.tensor(slots),
        num_drafts=num_drafts,
        vocab_size=VOCAB_SIZE,
        num_positions=NUM_POSITIONS,
        context_starts_B=context,
        cells=tables(NUM_SLOTS),
    )
    assert rows.context_starts_B is not None and rows.cells_BT is not None
    assert rows.candidate_ids_BKC is not None and rows.log_q_BKC is not None
    assert drafts.candidate_ids_SKC is not None and drafts.log_q_SKC is not None
    table = tables(NUM_SLOTS).table_SJ.tolist()
    for index, slot in enumerate(slots):
        whole = columns.whole_SX[slot].tolist()
        start = whole[LENGTH] if whole[IS_ALIVE] else 0
        assert rows.positions_B[index] == (start if whole[IS_ALIVE] else -1)
        if not whole[IS_ALIVE]:
            slot = NUM_SLOTS
            whole = columns.whole_SX[slot].tolist()
        assert rows.slots_B[index] == slot and rows.starts_B[index] == start
        assert rows.context_starts_B[index] == min(int(context[index]), start)
        assert rows.anchors_B[index] == whole[ANCHOR] and rows.steps_B[index] == whole[STEP]
        assert rows.sampling.seed_B[index] == whole[SEED]
        assert rows.sampling.temperature_B[index] == columns.fractions_SX[slot, TEMPERATURE]
        own = [token if token < VOCAB_SIZE else -1 for token in drafts.ids_SK[slot, :num_drafts].tolist()]
        assert rows.draft_ids_BK[index].tolist() == own
        anchor = min(max(whole[ANCHOR], 0), VOCAB_SIZE - 1)
        assert rows.token_ids_BT[index].tolist() == [anchor, *(anchor if token < 0 else token for token in own)]
        positions = list(range(start, start + num_drafts + 1))
        assert rows.positions_BT[index].tolist() == [min(at, NUM_POSITIONS - 1) for at in positions]
        blocks = [table[slot][at // BLOCK_SIZE] if at < BLOCK_SIZE * MAX_BLOCKS else 0 for at in positions]
        cells = [max(1, block * BLOCK_SIZE + at % BLOCK_SIZE) for block, at in zip(blocks, positions, strict=True)]
        assert rows.cells_BT[index].tolist() == cells
        assert torch.equal(rows.log_q_BKC[index], drafts.log_q_SKC[slot, :num_drafts])
        kept = drafts.candidate_ids_SKC[slot, :num_drafts]
        assert torch.equal(rows.candidate_ids_BKC[index], kept.masked_fill(kept >= VOCAB_SIZE, -1))


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 4])
@pytest.mark.parametrize("num_candidates", [0, 3])
@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("num_requests", [1, 6])
def test_every_version_agrees_with_the_reference(
    version: Version, num_drafts: int, num_candidates: int, is_bare: bool, num_requests: int
) -> None:
    columns, drafts = odd_slots(NUM_SLOTS, 4, num_candidates, seed=num_drafts)
    slots = torch.tensor([5, 0, 2, -1, NUM_SLOTS, 3][-num_requests:])
    context = None if is_bare else torch.tensor([0, 3, 9, 100, 4, 1][-num_requests:])
    cells = None if is_bare else tables(NUM_SLOTS)
    if num_candidates == 0 or is_bare:
        drafts = WaitingDrafts(drafts.ids_SK, None, None)
    expected = step_rows_reference(columns, drafts, slots, context, cells, num_drafts, VOCAB_SIZE, NUM_POSITIONS)
    device = version.device
    found = version.of(step_rows_triton, step_rows_native)(
        SlotColumns(*moved(columns, device)),
        WaitingDrafts(*moved(drafts, device)),
        slots.to(device),
        None if context is None else context.to(device),
        None if cells is None else CacheCells(cells.table_SJ.to(device), cells.block_size),
        num_drafts,
        VOCAB_SIZE,
        NUM_POSITIONS,
    )
    assert_same(found, expected)
    assert (found.token_ids_BT >= 0).all() and (found.token_ids_BT < VOCAB_SIZE).all()


def test_a_row_beyond_the_table_goes_to_block_0_and_never_to_the_row_of_zeros(version: Version) -> None:
    device = version.device
    columns, drafts = odd_slots(2, 3, 0)
    columns.whole_SX[0, LENGTH], columns.whole_SX[0, IS_ALIVE] = BLOCK_SIZE * MAX_BLOCKS - 1, 1
    bare = WaitingDrafts(drafts.ids_SK.to(device), None, None)
    cells = CacheCells(tables(2).table_SJ.to(device), BLOCK_SIZE)
    columns = SlotColumns(*(array.to(device) for array in columns))
    run = version.of(step_rows_triton, step_rows_native)
    found = run(columns, bare, torch.tensor([0], device=device), None, cells, 3, VOCAB_SIZE, 99)
    assert found.cells_BT is not None
    assert found.cells_BT.tolist() == [[BLOCK_SIZE - 1, 1, 1, 2]]
