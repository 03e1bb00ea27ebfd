"""What the rows of a decode step are, from the requests' slots alone: where they stand, what they hold, where they go.

    is alive      a request whose end the device has seen goes on in the trash slot, at position 0
    token[0]      the anchor; token[i] draft i-1, or the anchor once more where there is none
    position[i]   n + i, held at the last one of the target's table: rows beyond it lie beyond the request's budget
    cell[i]       the physical row of the caches for n + i: table[slot, (n + i) // size] * size + (n + i) % size

A missing draft is run as the anchor once more; its row is computed for nothing and can't be accepted. Any other id
might overflow where the request's own tokens do not, and spoil its block. Ids outside of the vocabulary count as
missing, so nothing behind looks up what is not there.

B requests, T = K + 1 rows, C candidates, S slots, J blocks of a slot, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.native import steps as native
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.ops.slot_columns import (
    ANCHOR,
    IS_ALIVE,
    LENGTH,
    MIN_P,
    NUM_FRACTIONS,
    NUM_WHOLE,
    SEED,
    STEP,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingRows,
    SlotColumns,
    sampling_rows,
)

_FIRST_CELL = 1  # row 0 of block 0 stays zero for good, see `BlockTables`


class WaitingDrafts(NamedTuple):
    """Drafts of all slots and what they were drawn from.

    Attributes:
        ids_SK: int64 [S, at least K]; -1 where there is none.
        candidate_ids_SKC: int64; None where q is not read.
        log_q_SKC: float32; None where q is not read.
    """

    ids_SK: Tensor
    candidate_ids_SKC: Tensor | None
    log_q_SKC: Tensor | None


class CacheCells(NamedTuple):
    """Which blocks slots have.

    Attributes:
        table_SJ: int32 [S, J]; 0 where a slot has none.
        block_size: positions of a block.
    """

    table_SJ: Tensor
    block_size: int


class StepRows(NamedTuple):
    """The rows of a step.

    Attributes:
        slots_B: int64, the trash slot for requests that have ended.
        starts_B: int64, n: position of row 0.
        positions_B: int64, the same with -1 for requests that have ended.
        context_starts_B: int64, at most `starts_B`; None where none were given.
        anchors_B: int64; -1 where the step before gave none.
        steps_B: int64.
        token_ids_BT: int64, in [0, V).
        positions_BT: int64.
        cells_BT: int64, physical rows; in block 0 where a slot has no block for a position. None without a table.
        draft_ids_BK: int64, -1 where there is none.
        candidate_ids_BKC: int64; None where q is not read.
        log_q_BKC: float32; None where q is not read.
        sampling: of the requests.
    """

    slots_B: Tensor
    starts_B: Tensor
    positions_B: Tensor
    context_starts_B: Tensor | None
    anchors_B: Tensor
    steps_B: Tensor
    token_ids_BT: Tensor
    positions_BT: Tensor
    cells_BT: Tensor | None
    draft_ids_BK: Tensor
    candidate_ids_BKC: Tensor | None
    log_q_BKC: Tensor | None
    sampling: SamplingRows


def step_rows_reference(
    columns: SlotColumns,
    drafts: WaitingDrafts,
    slots_B: Tensor,
    context_starts_B: Tensor | None,
    cells: CacheCells | None,
    num_drafts: int,
    vocab_size: int,
    num_positions: int,
) -> StepRows:
    """The definition."""
    whole_SX = columns.whole_SX
    is_alive_B = whole_SX[:, IS_ALIVE][slots_B] > 0
    positions_B = torch.where(is_alive_B, whole_SX[:, LENGTH][slots_B], -1)
    starts_B = positions_B.clamp(min=0)
    slots_B = torch.where(is_alive_B, slots_B, whole_SX.shape[0] - 1)
    anchors_B = whole_SX[:, ANCHOR][slots_B]
    ids_BK = drafts.ids_SK[slots_B, :num_drafts]
    ids_BK = ids_BK.masked_fill(ids_BK >= vocab_size, NO_TOKEN)
    anchors_B1 = anchors_B.clamp(0, vocab_size - 1).unsqueeze(1)
    positions_BT = starts_B.unsqueeze(1) + torch.arange(num_drafts + 1, device=slots_B.device)
    candidate_ids_BKC = log_q_BKC = None
    if drafts.candidate_ids_SKC is not None and drafts.log_q_SKC is not None:
        candidate_ids_BKC = drafts.candidate_ids_SKC[slots_B, :num_drafts]
        candidate_ids_BKC = candidate_ids_BKC.masked_fill(candidate_ids_BKC >= vocab_size, NO_TOKEN)
        log_q_BKC = drafts.log_q_SKC[slots_B, :num_drafts]
    return StepRows(
        slots_B,
        starts_B,
        positions_B,
        None if context_starts_B is None else torch.minimum(context_starts_B, starts_B),
        anchors_B,
        whole_SX[:, STEP][slots_B],
        torch.cat((anchors_B1, torch.where(ids_BK < 0, anchors_B1, ids_BK)), dim=1),
        positions_BT.clamp(max=num_positions - 1),
        None if cells is None else _cells_of(cells, slots_B, positions_BT),
        ids_BK,
        candidate_ids_BKC,
        log_q_BKC,
        sampling_rows(columns, slots_B),
    )


def _cells_of(cells: CacheCells, slots_B: Tensor, positions_BT: Tensor) -> Tensor:
    table_SJ, size = cells
    index_BT, last = positions_BT // size, table_SJ.shape[1] - 1
    blocks_BT = table_SJ[slots_B].gather(1, index_BT.clamp(max=last)).masked_fill(index_BT > last, 0)
    return (blocks_BT.long() * size + positions_BT % size).clamp(min=_FIRST_CELL)


@kernel
def _step_rows_kernel(
    slots_ptr: tl.tensor,
    context_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    fractions_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    log_q_ptr: tl.tensor,
    table_ptr: tl.tensor,
    whole_out_ptr: tl.tensor,
    fractions_out_ptr: tl.tensor,
    token_out_ptr: tl.tensor,
    position_out_ptr: tl.tensor,
    cell_out_ptr: tl.tensor,
    draft_out_ptr: tl.tensor,
    candidate_out_ptr: tl.tensor,
    log_q_out_ptr: tl.tensor,
    num_requests: tl.tensor,
    trash_slot: tl.tensor,
    num_kept: tl.tensor,
    num_blocks: tl.tensor,
    vocab_size: tl.tensor,
    num_positions: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    HAS_CONTEXT: tl.constexpr,
    HAS_CELLS: tl.constexpr,
    NUM_WHOLE: tl.constexpr,
    NUM_FRACTIONS: tl.constexpr,
    LENGTH: tl.constexpr,
    ANCHOR: tl.constexpr,
    STEP: tl.constexpr,
    IS_ALIVE: tl.constexpr,
    TOP_K: tl.constexpr,
    SEED: tl.constexpr,
    ROWS: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    slot = tl.where(slot < 0, trash_slot, slot).to(tl.int64)
    is_alive = tl.load(whole_ptr + slot * NUM_WHOLE + IS_ALIVE) > 0
    length = tl.load(whole_ptr + slot * NUM_WHOLE + LENGTH)
    position = tl.where(is_alive, length, -1)
    start = tl.maximum(position, 0)
    slot = tl.where(is_alive, slot, trash_slot).to(tl.int64)
    own = whole_ptr + slot * NUM_WHOLE
    anchor = tl.load(own + ANCHOR)

    out = whole_out_ptr + request
    tl.store(out, slot)
    tl.store(out + num_requests, start)
    tl.store(out + 2 * num_requests, position)
    tl.store(out + 3 * num_requests, anchor)
    tl.store(out + 4 * num_requests, tl.load(own + STEP))
    tl.store(out + 5 * num_requests, tl.load(own + TOP_K))
    tl.store(out + 6 * num_requests, tl.load(own + SEED))
    if HAS_CONTEXT:
        tl.store(out + 7 * num_requests, tl.minimum(tl.load(context_ptr + request), start))
    for column in tl.static_range(NUM_FRACTIONS):
        fraction = tl.load(fractions_ptr + slot * NUM_FRACTIONS + column)
        tl.store(fractions_out_ptr + column * num_requests + request, fraction)

    row = tl.arange(0, ROWS)
    is_row = row < NUM_ROWS
    is_draft_row = is_row & (row > 0)
    draft = tl.load(draft_ptr + slot * num_kept + row - 1, mask=is_draft_row, other=-1)
    draft = tl.where(draft >= vocab_size, -1, draft)
    tl.store(draft_out_ptr + request * (NUM_ROWS - 1) + row - 1, draft, mask=is_draft_row)
    known = tl.minimum(tl.maximum(anchor, 0), vocab_size - 1)
    tl.store(token_out_ptr + request * NUM_ROWS + row, tl.where(draft < 0, known, draft), mask=is_row)
    at = start + row
    tl.store(position_out_ptr + request * NUM_ROWS + row, tl.minimum(at, num_positions - 1), mask=is_row)
    if HAS_CELLS:
        index = at // BLOCK_SIZE
        has_entry = is_row & (index < num_blocks)
        block = tl.load(table_ptr + slot * num_blocks + index, mask=has_entry, other=0).to(tl.int64)
        cell = tl.maximum(block * BLOCK_SIZE + at % BLOCK_SIZE, 1)
        tl.store(cell_out_ptr + request * NUM_ROWS + row, cell, mask=is_row)
    if NUM_CANDIDATES > 0:  # the first K rows of a slot lie side by side
        lane = tl.arange(0, CANDIDATES)
        is_lane = lane < (NUM_ROWS - 1) * NUM_CANDIDATES
        source = slot * num_kept * NUM_CANDIDATES + lane
        sink = request * (NUM_ROWS - 1) * NUM_CANDIDATES + lane
        ids = tl.load(candidate_ptr + source, mask=is_lane, other=-1)
        tl.store(candidate_out_ptr + sink, tl.where(ids >= vocab_size, -1, ids), mask=is_lane)
        tl.store(log_q_out_ptr + sink, tl.load(log_q_ptr + source, mask=is_lane, other=0.0), mask=is_lane)


def step_rows_triton(
    columns: SlotColumns,
    drafts: WaitingDrafts,
    slots_B: Tensor,
    context_starts_B: Tensor | None,
    cells: CacheCells | None,
    num_drafts: int,
    vocab_size: int,
    num_positions: int,
) -> StepRows:
    """Launch one program per request."""
    num_requests, num_rows, device = slots_B.shape[0], num_drafts + 1, slots_B.device
    whole = torch.empty(8, num_requests, dtype=torch.int64, device=device)
    fractions = torch.empty(NUM_FRACTIONS, num_requests, dtype=torch.float32, device=device)
    token_ids_BT, positions_BT, cells_BT = whole.new_empty(3, num_requests, num_rows)
    draft_ids_BK = whole.new_empty(num_requests, num_drafts)
    candidate_ids_BKC = log_q_BKC = None
    num_candidates = 0
    if drafts.candidate_ids_SKC is not None and drafts.log_q_SKC is not None:
        num_candidates = drafts.candidate_ids_SKC.shape[2]
        candidate_ids_BKC = whole.new_empty(num_requests, num_drafts, num_candidates)
        log_q_BKC = fractions.new_empty(num_requests, num_drafts, num_candidates)
    with torch.cuda.device_of(whole):
        _step_rows_kernel[(num_requests,)](
            slots_B.contiguous(),
            whole if context_starts_B is None else context_starts_B.contiguous(),
            *columns,
            drafts.ids_SK,
            whole if drafts.candidate_ids_SKC is None else drafts.candidate_ids_SKC,
            fractions if drafts.log_q_SKC is None else drafts.log_q_SKC,
            whole if cells is None else cells.table_SJ,
            whole,
            fractions,
            token_ids_BT,
            positions_BT,
            cells_BT,
            draft_ids_BK,
            whole if candidate_ids_BKC is None else candidate_ids_BKC,
            fractions if log_q_BKC is None else log_q_BKC,
            num_requests,
            columns.whole_SX.shape[0] - 1,
            drafts.ids_SK.shape[1],
            0 if cells is None else cells.table_SJ.shape[1],
            vocab_size,
            num_positions,
            BLOCK_SIZE=1 if cells is None else cells.block_size,
            NUM_ROWS=num_rows,
            NUM_CANDIDATES=num_candidates if num_drafts > 0 else 0,
            HAS_CONTEXT=context_starts_B is not None,
            HAS_CELLS=cells is not None,
            NUM_WHOLE=NUM_WHOLE,
            NUM_FRACTIONS=NUM_FRACTIONS,
            LENGTH=LENGTH,
            ANCHOR=ANCHOR,
            STEP=STEP,
            IS_ALIVE=IS_ALIVE,
            TOP_K=TOP_K,
            SEED=SEED,
            ROWS=triton.next_power_of_2(num_rows),
            CANDIDATES=triton.next_power_of_2(max(1, num_drafts * num_candidates)),
            num_warps=1,
        )
    return _named(
        (whole, fractions),
        (token_ids_BT, positions_BT, cells_BT),
        (draft_ids_BK, candidate_ids_BKC, log_q_BKC),
        has_context=context_starts_B is not None,
        has_cells=cells is not None,
    )


def step_rows_native(
    columns: SlotColumns,
    drafts: WaitingDrafts,
    slots_B: Tensor,
    context_starts_B: Tensor | None,
    cells: CacheCells | None,
    num_drafts: int,
    vocab_size: int,
    num_positions: int,
) -> StepRows:
    """The same as the reference, on a CPU."""
    table_SJ, block_size = (None, 1) if cells is None else cells
    numbers, rows_3BT, proposal = native.step_rows(
        columns, drafts, slots_B, context_starts_B, table_SJ, block_size, num_drafts, vocab_size, num_positions
    )
    has_context, has_cells = context_starts_B is not None, cells is not None
    return _named(numbers, rows_3BT.unbind(), proposal, has_context=has_context, has_cells=has_cells)


def _named(
    numbers: tuple[Tensor, Tensor],
    rows: Sequence[Tensor],
    proposal: tuple[Tensor, Tensor | None, Tensor | None],
    *,
    has_context: bool,
    has_cells: bool,
) -> StepRows:
    """Name what kernels wrote: [8, B] whole numbers, the last of which are context starts, and [3, B] fractions."""
    slots_B, starts_B, positions_B, anchors_B, steps_B, top_k_B, seed_B, firsts_B = numbers[0].unbind()
    fractions = numbers[1].unbind()
    token_ids_BT, positions_BT, cells_BT = rows
    return StepRows(
        slots_B,
        starts_B,
        positions_B,
        firsts_B if has_context else None,
        anchors_B,
        steps_B,
        token_ids_BT,
        positions_BT,
        cells_BT if has_cells else None,
        *proposal,
        SamplingRows(fractions[TEMPERATURE], top_k_B, fractions[TOP_P], fractions[MIN_P], seed_B),
    )


def step_rows(
    columns: SlotColumns,
    drafts: WaitingDrafts,
    slots_B: Tensor,
    *,
    num_drafts: int,
    vocab_size: int,
    num_positions: int,
    context_starts_B: Tensor | None = None,
    cells: CacheCells | None = None,
) -> StepRows:
    """Look up the rows of a step; no tensor is read on the host.

    Args:
        columns: of all slots.
        drafts: that wait, of all slots.
        slots_B: int64, one per request; the last slot for padding.
        num_drafts: K, the first of the waiting ones.
        vocab_size: V.
        num_positions: of the target's table.
        context_starts_B: int64, positions below hold no draft context; None where none is missing.
        cells: where keys are kept; None where nobody asks for cells.
    """
    assert num_drafts <= drafts.ids_SK.shape[1], "slots have room for no more drafts"
    is_native = native.can_run(*columns, *drafts, None if cells is None else cells.table_SJ)
    on_cpu = step_rows_native if is_native else None
    run = choose("step_rows", slots_B, step_rows_reference, step_rows_triton, on_cpu)
    return run(columns, drafts, slots_B, context_starts_B, cells, num_drafts, vocab_size, num_positions)
