"""Which physical blocks hold which positions of each slot; one object for every cache of an engine.

A block id means the same rows in every plane, the target's and the drafter's, so what is known of a block holds for
both. Block 0 belongs to nobody. Table entries that are not set are 0, and so is the whole row of the trash slot: rows
of padding and rows beyond a request's blocks land in block 0 without a mask. Its first row is never written, so it is
zero for good: reads that must not see a thing are sent there (`readable_rows`).

B requests, T rows per request, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.transfers import to_device

TRASH_BLOCK = 0
ZERO_ROW = 0  # of block 0
_FIRST_TRASH_ROW = 1


class BlockTables:
    """Which blocks hold which positions of each slot.

    The host's lists are the truth. The device's table follows at `flush`, which the engine calls before a pass: only
    batched forms read it.

    Args:
        num_slots: S, requests at the same time; one more slot is for padding rows.
        num_blocks: of every plane, block 0 included.
        block_size: positions per block.
        max_blocks: of one slot.
        device: of the planes.

    Attributes:
        table: int32 [num_slots + 1, max_blocks].
    """

    def __init__(
        self, num_slots: int, *, num_blocks: int, block_size: int, max_blocks: int, device: torch.device
    ) -> None:
        self.num_slots, self.num_blocks = num_slots, num_blocks
        self.block_size, self.max_blocks, self.device = block_size, max_blocks, device
        self.table = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device)
        self._blocks: list[list[int]] = [[] for _ in range(num_slots + 1)]
        self._is_one_run = [True] * (num_slots + 1)
        self._rows: list[Tensor | None] = [None] * (num_slots + 1)
        self._unflushed: dict[tuple[int, int], int] = {}  # (slot, index) to block: a later entry replaces an earlier

    @classmethod
    def fixed(cls, num_slots: int, *, capacity: int, device: torch.device, block_size: int = 32) -> BlockTables:
        """Tables in which every slot owns one run of blocks for good.

        Args:
            num_slots: S.
            capacity: positions of a slot, at least.
            device: of the planes.
            block_size: positions per block.
        """
        each = -(-capacity // block_size)
        tables = cls(num_slots, num_blocks=1 + num_slots * each, block_size=block_size, max_blocks=each, device=device)
        for slot in range(num_slots):
            tables.assign(slot, range(1 + slot * each, 1 + (slot + 1) * each))
        tables.flush()
        return tables

    def assign(self, slot: int, blocks: Sequence[int]) -> None:
        """Replace a slot's list."""
        self._set(slot, 0, blocks)

    def append(self, slot: int, blocks: Sequence[int]) -> None:
        """Give a slot further blocks behind those that it has."""
        self._set(slot, len(self._blocks[slot]), blocks)

    def clear(self, slot: int) -> None:
        """Take all blocks from a slot: what it still writes lands in block 0."""
        self._set(slot, 0, ())

    def _set(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        own = self._blocks[slot]
        assert first + len(blocks) <= self.max_blocks, "a slot's blocks reach no further than the table"
        for index in range(first + len(blocks), len(own)):
            self._unflushed[slot, index] = TRASH_BLOCK
        for index, block in enumerate(blocks, start=first):
            assert 0 <= block < self.num_blocks, "a block of these planes"
            self._unflushed[slot, index] = block
        own[first:] = blocks
        was_one_run = first == 0 or self._is_one_run[slot]  # further blocks are set behind all that were there
        self._is_one_run[slot] = was_one_run and all(
            block == own[0] + index for index, block in enumerate(blocks, start=first)
        )
        self._rows[slot] = None

    def blocks(self, slot: int) -> list[int]:
        """A slot's blocks, by position."""
        return list(self._blocks[slot])

    def capacity(self, slot: int) -> int:
        """Positions that a slot's blocks hold."""
        return len(self._blocks[slot]) * self.block_size

    def is_one_run(self, slot: int) -> bool:
        """Whether a slot's blocks follow each other, so that its keys are a view; true of no blocks."""
        return self._is_one_run[slot]

    def first_row(self, slot: int) -> int:
        """Physical row of position 0 of a slot whose blocks are one run."""
        assert self._is_one_run[slot] and self._blocks[slot], "only a run starts somewhere"
        return self._blocks[slot][0] * self.block_size

    def rows(self, slot: int, start: int, count: int) -> Tensor:
        """Physical rows of positions start, start + 1, ... that a slot's blocks hold, int64 on the device."""
        if slot == self.num_slots and not self._blocks[slot]:  # what requests write that have ended
            return _FIRST_TRASH_ROW + torch.arange(count, device=self.device) % (self.block_size - _FIRST_TRASH_ROW)
        assert start + count <= self.capacity(slot), "positions beyond a slot's blocks have no rows"
        rows = self._rows[slot]
        if rows is None:
            blocks_N1 = torch.tensor(self._blocks[slot], dtype=torch.int64).unsqueeze(1)
            rows = (blocks_N1 * self.block_size + torch.arange(self.block_size)).flatten().to(self.device)
            self._rows[slot] = rows
        return rows.narrow(0, start, count)

    def rows_of_slots(self, slots: Sequence[int], starts: Sequence[int], num_rows: int) -> Tensor:
        """`rows` of several slots, int64 [B, T].

        Args:
            slots: one per request.
            starts: positions of the first rows.
            num_rows: T.
        """
        rows = [self.rows(slot, start, num_rows) for slot, start in zip(slots, starts, strict=True)]
        return torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)

    def rows_of(self, slots_B: Tensor, positions_BT: Tensor) -> Tensor:
        """Physical rows to write to, without reading a tensor on the host.

        Args:
            slots_B: int64; `num_slots` for padding.
            positions_BT: int64, from 0 on.

        Returns:
            int64 [B, T]; in block 0 where a slot has no block for a position.
        """
        return self._look_up(slots_B, positions_BT).clamp(min=_FIRST_TRASH_ROW)

    def readable_rows(
        self, slots_B: Tensor, ends_B: Tensor, num_positions: int, starts_B: Tensor | None = None
    ) -> Tensor:
        """Physical rows to read at positions 0, 1, ..., without reading a tensor on the host.

        What lies outside a request's own positions may be anything, NaN included, and 0 * NaN is NaN. So no such row
        is read at all: a row of zeros takes its place.

        Args:
            slots_B: int64.
            ends_B: int64, positions from here on are not read.
            num_positions: S.
            starts_B: int64, nor are those below; None is 0.

        Returns:
            int64 [B, S].
        """
        position_S = torch.arange(num_positions, device=slots_B.device)
        is_read_BS = position_S < ends_B.unsqueeze(1)
        if starts_B is not None:
            is_read_BS &= position_S >= starts_B.unsqueeze(1)
        rows_BS = self._look_up(slots_B, position_S.expand(slots_B.shape[0], -1))
        return rows_BS.masked_fill_(~is_read_BS, ZERO_ROW)

    def _look_up(self, slots_B: Tensor, positions_BT: Tensor) -> Tensor:
        index_BT = positions_BT // self.block_size
        last = self.max_blocks - 1
        blocks_BT = self.table[slots_B].gather(1, index_BT.clamp(max=last)).masked_fill_(index_BT > last, TRASH_BLOCK)
        return blocks_BT.long() * self.block_size + positions_BT % self.block_size

    def flush(self) -> None:
        """Bring the device's table up to date: what changed since the last time, in one small transfer."""
        if not self._unflushed:
            return
        triples = torch.tensor([(*where, block) for where, block in self._unflushed.items()], dtype=torch.int32)
        slots, indices, blocks = to_device(triples, self.device).unbind(1)
        self.table.index_put_((slots.long(), indices.long()), blocks)
        self._unflushed.clear()
