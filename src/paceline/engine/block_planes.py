"""Everything that is stored under block ids, the target's keys and the drafter's, handled as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from paceline.engine.cache import KeyValueCache
from paceline.engine.latent_cache import LatentCache

BlockCache: TypeAlias = KeyValueCache | LatentCache


class BlockPlanes:
    """The caches of an engine.

    Args:
        caches: all of them over the same tables.
    """

    def __init__(self, caches: Sequence[BlockCache]) -> None:
        self.caches = tuple(caches)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the contents of blocks to others."""
        for cache in self.caches:
            cache.copy_blocks(source, target)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks."""
        for cache in self.caches:
            cache.clear_blocks(blocks)

    def clear_rows(self, slot: int, start: int) -> None:
        """Zero what a slot's own blocks hold from a position on."""
        for cache in self.caches:
            cache.clear_rows(slot, start)

    def are_finite(self, blocks: Sequence[int]) -> bool:
        """Whether there is neither NaN nor infinity in blocks; waits for the device."""
        return all(cache.are_finite(blocks) for cache in self.caches)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN; for debug mode."""
        for cache in self.caches:
            cache.poison_blocks(blocks)

    def checksum(self, block: int) -> bytes:
        """A digest of a block's contents in all caches."""
        return b"".join(cache.checksum(block) for cache in self.caches)

    def release(self) -> None:
        """Give the memory back; nothing can be read or written any more."""
        for cache in self.caches:
            cache.release()
