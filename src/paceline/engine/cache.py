"""Key/value planes in blocks. One block id addresses the target's keys and the drafter's context keys alike.

B requests, T new rows, M key/value heads, S positions, H head size, R physical rows: block * block_size + offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.engine.block_contents import (
    allocate_planes,
    are_finite,
    are_poisoned,
    checksums,
    copy_blocks,
    fill_blocks,
    poison_blocks,
)
from paceline.engine.block_tables import BlockTables
from paceline.ops.paged_attention_kernel import new_arrivals
from paceline.ops.skinny_launch import new_counters

Write = Callable[[int, Tensor, Tensor], None]  # layer, keys, values
Read = Callable[[int], tuple[Tensor, Tensor]]


class KeyValueCache:
    """Keys and values of every block: [layers, 2, M, blocks, block_size, H], keys before values, zero at first.

    Rows of a head lie together, over all blocks, as attention on a CPU reads them fastest. A slot whose blocks are one
    run reads its context as a view; any other gathers it.

    Args:
        tables: which blocks a slot has; shared by all caches of an engine.
        num_layers: layers that keep keys.
        num_kv_heads: M.
        head_size: H.
        dtype: the model's.
        device: the model's.

    Raises:
        CapacityError: the memory is not there.
    """

    def __init__(
        self,
        tables: BlockTables,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.planes = allocate_planes(
            tables, layers=(num_layers, 2, num_kv_heads), width=head_size, dtype=dtype, device=device
        )
        self.tables = tables
        # What kernels count in, at fixed addresses: another engine on another stream has its own.
        self.counters, self.arrivals = new_counters(device), new_arrivals(device)
        self.num_kv_heads, self.head_size = num_kv_heads, head_size
        num_rows = tables.num_blocks * tables.block_size
        # Made once, in the shapes that are asked for: a decode step on a CPU feels every view it makes.
        self._flat = self.planes.view(num_layers, -1, head_size).unbind(0)
        self._as_read = self.planes.view(num_layers * 2, 1, num_kv_heads, num_rows, head_size)
        self._as_written = self._as_read.transpose(2, 3)
        self._first_of_head = torch.arange(2 * num_kv_heads, device=device) * num_rows

    @property
    def num_bytes(self) -> int:
        """Memory of the planes."""
        return self.planes.numel() * self.planes.element_size()

    def writer(self, slots: Sequence[int], starts: Sequence[int], num_rows: int) -> Write:
        """What stores the same rows of several requests in any layer; settled once for a pass.

        Args:
            slots: one per request.
            starts: positions of the first rows.
            num_rows: T.

        Returns:
            A function of a layer and its keys and values [B, T, M, H].
        """
        tables = self.tables
        if len(slots) == 1 and tables.is_one_run(slots[0]) and tables.capacity(slots[0]) > 0:
            start, end = starts[0], starts[0] + num_rows
            assert end <= tables.capacity(slots[0]), "rows of a request go to its own blocks"
            to = self._as_written.narrow(2, tables.first_row(slots[0]) + start, num_rows).unbind(0)

            def write(layer: int, k_BTMH: Tensor, v_BTMH: Tensor) -> None:
                to[2 * layer].copy_(k_BTMH)
                to[2 * layer + 1].copy_(v_BTMH)

            return write
        return partial(self.write_batch, cells=self.cells_to_write(tables.rows_of_slots(slots, starts, num_rows)))

    def reader(self, slot: int, length: int, start: int = 0) -> Read:
        """What gives a slot's keys and values at positions start to length - 1 in any layer; settled once for a pass.

        Args:
            slot: whose.
            length: the first position behind.
            start: the first position.

        Returns:
            A function of a layer; it gives [1, M, length - start, H] twice: views where the slot's blocks are one run,
            copies elsewhere.
        """
        tables, count = self.tables, length - start
        if count > 0 and tables.is_one_run(slot) and tables.capacity(slot) > 0:
            assert length <= tables.capacity(slot), "positions beyond a slot's blocks hold nothing"
            views = self._as_read.narrow(3, tables.first_row(slot) + start, count).unbind(0)
            return list(zip(views[::2], views[1::2], strict=True)).__getitem__
        return partial(self.gather, cells_2BMS=self.cells_to_read(tables.rows(slot, start, count).unsqueeze(0)))

    def write_rows(self, layer: int, slot: int, start: int, k_TMH: Tensor, v_TMH: Tensor) -> None:
        """Store one request's rows, [T, M, H] or as a batch of one, at positions start, start + 1, ..."""
        num_rows = k_TMH.shape[-3]
        k_1TMH, v_1TMH = (rows.view(1, num_rows, *rows.shape[-2:]) for rows in (k_TMH, v_TMH))
        self.writer([slot], [start], num_rows)(layer, k_1TMH, v_1TMH)

    def context(self, layer: int, slot: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """One slot's keys and values in one layer, as `reader` gives them."""
        return self.reader(slot, length, start)(layer)

    def cells_to_write(self, rows_BT: Tensor) -> Tensor:
        """Where keys and values at physical rows lie in any layer, for `write_batch`."""
        return (rows_BT.reshape(-1, 1) + self._first_of_head).flatten()

    def cells_to_read(self, rows_BS: Tensor) -> Tensor:
        """The same, for `gather`: [2, B, M, S]."""
        first_2M = self._first_of_head.view(2, 1, self.num_kv_heads, 1)
        return rows_BS.unsqueeze(1) + first_2M

    def write_batch(self, layer: int, k_BTMH: Tensor, v_BTMH: Tensor, cells: Tensor) -> None:
        """Store rows of several requests at given cells, without reading a tensor on the host."""
        rows = torch.cat((k_BTMH, v_BTMH), dim=-2).view(-1, self.head_size)
        self._flat[layer].index_copy_(0, cells, rows)

    def gather(self, layer: int, cells_2BMS: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of several slots' keys and values, each [B, M, S, H]."""
        both = self._flat[layer].index_select(0, cells_2BMS.view(-1))
        keys, values = both.view(*cells_2BMS.shape, self.head_size).unbind(0)
        return keys, values

    def clear_rows(self, slot: int, start: int = 0) -> None:
        """Zero a slot's rows from a position on; needed only after NaN or infinity got into them."""
        rows = self.tables.rows(slot, start, self.tables.capacity(slot) - start)
        self._as_read.index_fill_(3, rows, 0.0)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero whole blocks; needed only after NaN or infinity got into them."""
        fill_blocks(self.planes, blocks, 0.0)

    def poison_blocks(self, blocks: Sequence[int]) -> None:
        """Fill blocks that nobody should read with NaN, for whoever looks for a reader."""
        poison_blocks(self.planes, blocks)

    def are_poisoned(self, blocks: Sequence[int]) -> list[bool]:
        """Whether nobody has written to each of some poisoned blocks; waits for the device."""
        return are_poisoned(self.planes, blocks)

    def are_finite(self, blocks: Sequence[int]) -> bool:
        """Whether there is neither NaN nor infinity in blocks; waits for the device."""
        return are_finite(self.planes, blocks)

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks; none is both copied from and copied to."""
        copy_blocks(self.planes, source, target)

    def checksums(self, blocks: Sequence[int]) -> list[bytes]:
        """A digest of everything in each of some blocks, for debug mode and tests."""
        return checksums(self.planes, blocks)

    def checksum(self, block: int) -> bytes:
        """The digest of a single one."""
        return self.checksums([block])[0]

    def release(self) -> None:
        """Give the memory back; nothing can be read or written any more."""
        self.planes = self._as_read = self._as_written = self.planes.new_empty(0)
        self._flat = ()
