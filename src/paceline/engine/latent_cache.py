"""Rows of latent attention in blocks: one row per position and layer, from which every head's keys and values follow.

B requests, T new rows, S positions, X width of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

WriteLatents = Callable[[int, Tensor], None]  # layer, rows [B, T, X]
ReadLatents = Callable[[int], Tensor]  # layer to [1, S, X]


class LatentCache:
    """Latent rows of every block: [layers, 1, 1, blocks, block_size, X], zero at first.

    Args:
        tables: which blocks a slot has; shared by all caches of an engine.
        num_layers: layers with latent attention; they are counted by themselves.
        width: X.
        dtype: the model's.
        device: the model's.

    Raises:
        CapacityError: the memory is not there.
    """

    def __init__(
        self, tables: BlockTables, *, num_layers: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.planes = allocate_planes(tables, layers=(num_layers, 1, 1), width=width, dtype=dtype, device=device)
        self.tables = tables
        num_rows = tables.num_blocks * tables.block_size
        self._flat = self.planes.view(num_layers, num_rows, width).unbind(0)
        self._paged = self.planes.view(num_layers, tables.num_blocks, tables.block_size, 1, width).unbind(0)

    @property
    def num_bytes(self) -> int:
        """Memory of the planes."""
        return self.planes.numel() * self.planes.element_size()

    def paged(self, layer: int) -> Tensor:
        """One layer's rows, [blocks, block_size, 1, X]."""
        return self._paged[layer]

    def writer(self, rows_BT: Tensor) -> WriteLatents:
        """What stores the rows of a pass in any layer; settled once for it.

        Args:
            rows_BT: int64 physical rows, such as `BlockTables.rows_of` gives.
        """
        to = rows_BT.flatten()

        def write(layer: int, rows_BTX: Tensor) -> None:
            self._flat[layer].index_copy_(0, to, rows_BTX.flatten(0, 1))

        return write

    def reader(self, slot: int, length: int) -> ReadLatents:
        """What gives a slot's rows at positions 0 to length - 1 in any layer: a view where its blocks are one run."""
        tables = self.tables
        if tables.is_one_run(slot) and tables.capacity(slot) > 0:
            assert length <= tables.capacity(slot), "positions beyond a slot's blocks hold nothing"
            first = tables.first_row(slot)
            return lambda layer: self._flat[layer][first : first + length].unsqueeze(0)
        rows_S = tables.rows(slot, 0, length)
        return lambda layer: self._flat[layer].index_select(0, rows_S).unsqueeze(0)

    def clear_rows(self, slot: int, start: int = 0) -> None:
        """Zero a slot's rows from a position on; needed only after NaN or infinity got into them."""
        rows = self.tables.rows(slot, start, self.tables.capacity(slot) - start)
        for layer in self._flat:
            layer.index_fill_(0, rows, 0.0)

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
        self.planes = torch.empty(0)
        self._flat = self._paged = ()
