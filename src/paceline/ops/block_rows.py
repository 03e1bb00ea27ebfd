"""The rows of the draft block behind each request's anchor, from the requests' slots alone.

    token[0] = the anchor, the others the mask token       position[i] = n + i, held at the last one of the table

B requests, Q block rows, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.native import steps as native
from paceline.ops.slot_columns import (
    ANCHOR,
    LENGTH,
    NUM_FRACTIONS,
    NUM_WHOLE,
    SEED,
    STEP,
    TEMPERATURE,
    SlotColumns,
)


class BlockRows(NamedTuple):
    """The rows of a block.

    Attributes:
        lengths_B: int64, n: position of row 0, and how much context there is.
        anchors_B: int64, in [0, V).
        steps_B: int64, the request's own step counter.
        seeds_B: int64.
        temperature_B: float32.
        token_ids_BQ: int64.
        positions_BQ: int64, at most the last one of the table.
        is_beyond_B: bool, whether the block reaches past the table, so that nothing is drafted.
    """

    lengths_B: Tensor
    anchors_B: Tensor
    steps_B: Tensor
    seeds_B: Tensor
    temperature_B: Tensor
    token_ids_BQ: Tensor
    positions_BQ: Tensor
    is_beyond_B: Tensor


def block_rows_reference(
    columns: SlotColumns, slots_B: Tensor, num_rows: int, mask_id: int, vocab_size: int, max_positions: int
) -> BlockRows:
    """The definition."""
    whole_SX, fractions_SX = columns
    lengths_B, anchors_B, steps_B, seeds_B = (whole_SX[:, index][slots_B] for index in (LENGTH, ANCHOR, STEP, SEED))
    anchors_B = anchors_B.clamp(0, vocab_size - 1)
    masks_BM = anchors_B.new_full((anchors_B.shape[0], num_rows - 1), mask_id)
    positions_BQ = lengths_B.unsqueeze(1) + torch.arange(num_rows, device=slots_B.device)
    return BlockRows(
        lengths_B,
        anchors_B,
        steps_B,
        seeds_B,
        fractions_SX[:, TEMPERATURE][slots_B],
        torch.cat((anchors_B.unsqueeze(1), masks_BM), dim=1),
        positions_BQ.clamp(max=max_positions - 1),
        positions_BQ[:, -1] >= max_positions,
    )


@kernel
def _block_rows_kernel(
    slots_ptr: tl.tensor,
    whole_ptr: tl.tensor,
    fractions_ptr: tl.tensor,
    whole_out_ptr: tl.tensor,
    temperature_out_ptr: tl.tensor,
    token_out_ptr: tl.tensor,
    position_out_ptr: tl.tensor,
    beyond_out_ptr: tl.tensor,
    num_requests: tl.tensor,
    mask_id: tl.tensor,
    vocab_size: tl.tensor,
    max_positions: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_WHOLE: tl.constexpr,
    NUM_FRACTIONS: tl.constexpr,
    LENGTH: tl.constexpr,
    ANCHOR: tl.constexpr,
    STEP: tl.constexpr,
    SEED: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    own = whole_ptr + slot * NUM_WHOLE
    length = tl.load(own + LENGTH)
    anchor = tl.minimum(tl.maximum(tl.load(own + ANCHOR), 0), vocab_size - 1)
    out = whole_out_ptr + request
    tl.store(out, length)
    tl.store(out + num_requests, anchor)
    tl.store(out + 2 * num_requests, tl.load(own + STEP))
    tl.store(out + 3 * num_requests, tl.load(own + SEED))
    tl.store(temperature_out_ptr + request, tl.load(fractions_ptr + slot * NUM_FRACTIONS + TEMPERATURE))
    tl.store(beyond_out_ptr + request, length + NUM_ROWS > max_positions)
    row = tl.arange(0, ROWS)
    is_row = row < NUM_ROWS
    tl.store(token_out_ptr + request * NUM_ROWS + row, tl.where(row == 0, anchor, mask_id), mask=is_row)
    position = tl.minimum(length + row, max_positions - 1)
    tl.store(position_out_ptr + request * NUM_ROWS + row, position, mask=is_row)


def block_rows_triton(
    columns: SlotColumns, slots_B: Tensor, num_rows: int, mask_id: int, vocab_size: int, max_positions: int
) -> BlockRows:
    """Launch one program per request."""
    num_requests, device = slots_B.shape[0], slots_B.device
    whole = torch.empty(4, num_requests, dtype=torch.int64, device=device)
    temperature_B = torch.empty(num_requests, dtype=torch.float32, device=device)
    token_ids_BQ, positions_BQ = whole.new_empty(2, num_requests, num_rows)
    is_beyond_B = torch.empty(num_requests, dtype=torch.bool, device=device)
    with torch.cuda.device_of(whole):
        _block_rows_kernel[(num_requests,)](
            slots_B.contiguous(),
            *columns,
            whole,
            temperature_B,
            token_ids_BQ,
            positions_BQ,
            is_beyond_B,
            num_requests,
            mask_id,
            vocab_size,
            max_positions,
            NUM_ROWS=num_rows,
            NUM_WHOLE=NUM_WHOLE,
            NUM_FRACTIONS=NUM_FRACTIONS,
            LENGTH=LENGTH,
            ANCHOR=ANCHOR,
            STEP=STEP,
            SEED=SEED,
            TEMPERATURE=TEMPERATURE,
            ROWS=triton.next_power_of_2(num_rows),
            num_warps=1,
        )
    lengths_B, anchors_B, steps_B, seeds_B = whole
    return BlockRows(lengths_B, anchors_B, steps_B, seeds_B, temperature_B, token_ids_BQ, positions_BQ, is_beyond_B)


def block_rows_native(
    columns: SlotColumns, slots_B: Tensor, num_rows: int, mask_id: int, vocab_size: int, max_positions: int
) -> BlockRows:
    """The same as the reference, on a CPU."""
    found = native.block_rows(columns, slots_B, num_rows, mask_id, vocab_size, max_positions)
    whole_4B, temperature_B, rows_2BQ, is_beyond_B = found
    lengths_B, anchors_B, steps_B, seeds_B = whole_4B.unbind()
    token_ids_BQ, positions_BQ = rows_2BQ.unbind()
    return BlockRows(lengths_B, anchors_B, steps_B, seeds_B, temperature_B, token_ids_BQ, positions_BQ, is_beyond_B)


def block_rows(
    columns: SlotColumns, slots_B: Tensor, *, num_rows: int, mask_id: int, vocab_size: int, max_positions: int
) -> BlockRows:
    """Look up the rows of a draft block; no tensor is read on the host.

    Args:
        columns: of all slots.
        slots_B: int64, one per request.
        num_rows: Q.
        mask_id: the mask token.
        vocab_size: ids that an anchor may have.
        max_positions: of the drafter's table. The last predicted token needs no position of its own.
    """
    on_cpu = block_rows_native if native.can_run(*columns) else None
    run = choose("block_rows", slots_B, block_rows_reference, block_rows_triton, on_cpu)
    return run(columns, slots_B, num_rows, mask_id, vocab_size, max_positions)
