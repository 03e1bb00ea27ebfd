"""Which physical rows of the caches the rows of a pass go to, found through the table of blocks.

    row[b, t] = max(1, table[slots[b], p // block_size] * block_size + p % block_size),  p = starts[b] + t

Positions behind a slot's row of the table go to block 0, as do those of entries that are not set. The first row of
block 0 is never given: it stays zero for good.

B requests, T rows of each, S slots, J blocks of a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.native import steps as native

_FIRST_ROW = 1
_TILE = 128  # rows of a program


def table_rows_reference(table_SJ: Tensor, slots_B: Tensor, starts_B: Tensor, num_rows: int, block_size: int) -> Tensor:
    """The definition."""
    last = table_SJ.shape[1] - 1
    position_BT = starts_B.unsqueeze(1) + torch.arange(num_rows, device=starts_B.device)
    index_BT = position_BT // block_size
    block_BT = table_SJ[slots_B].gather(1, index_BT.clamp(max=last)).masked_fill_(index_BT > last, 0)
    return (block_BT.long() * block_size + position_BT % block_size).clamp_(min=_FIRST_ROW)


@kernel
def _table_rows_kernel(
    table_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    start_ptr: tl.tensor,
    row_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    request, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row = row < num_rows
    position = tl.load(start_ptr + request) + row
    index = position // BLOCK_SIZE
    table_at = table_ptr + tl.load(slot_ptr + request) * num_columns
    block = tl.load(table_at + index, mask=is_row & (index < num_columns), other=0).to(tl.int64)
    found = tl.maximum(block * BLOCK_SIZE + position % BLOCK_SIZE, FIRST_ROW)
    tl.store(row_ptr + request * num_rows + row, found, mask=is_row)


def table_rows_triton(table_SJ: Tensor, slots_B: Tensor, starts_B: Tensor, num_rows: int, block_size: int) -> Tensor:
    """Launch one program per request and tile of rows."""
    num_requests = slots_B.shape[0]
    rows_BT = torch.empty(num_requests, num_rows, dtype=torch.int64, device=starts_B.device)
    with torch.cuda.device_of(rows_BT):
        _table_rows_kernel[num_requests, triton.cdiv(num_rows, _TILE)](
            table_SJ.contiguous(),
            slots_B.contiguous(),
            starts_B.contiguous(),
            rows_BT,
            num_rows,
            table_SJ.shape[1],
            BLOCK_SIZE=block_size,
            FIRST_ROW=_FIRST_ROW,
            TILE=_TILE,
            num_warps=4,
        )
    return rows_BT


def table_rows(table_SJ: Tensor, slots_B: Tensor, starts_B: Tensor, num_rows: int, *, block_size: int) -> Tensor:
    """Physical rows of the rows of a pass, without reading a tensor on the host.

    Args:
        table_SJ: int32, which block holds which positions of a slot; 0 where none does.
        slots_B: int64, rows of the table.
        starts_B: int64, positions of the first rows, from 0 on.
        num_rows: T.
        block_size: positions of a block.

    Returns:
        int64 [B, T].

    Raises:
        ShapeError: the tensors do not fit each other.
    """
    if table_SJ.dim() != 2:
        raise ShapeError("table", expected="[S, J]", found=table_SJ.shape)
    if starts_B.shape != slots_B.shape or slots_B.dim() != 1:
        raise ShapeError("starts", expected=list(slots_B.shape), found=starts_B.shape)
    if slots_B.shape[0] * num_rows == 0:
        return torch.empty(slots_B.shape[0], num_rows, dtype=torch.int64, device=slots_B.device)
    on_cpu = native.table_rows if native.can_run(table_SJ) else None
    run = choose("table_rows", slots_B, table_rows_reference, table_rows_triton, on_cpu)
    return run(table_SJ, slots_B, starts_B, num_rows, block_size)
