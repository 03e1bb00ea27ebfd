"""Caches over block tables for tests: every slot one run, or every slot scattered, and what a slot holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache

CPU = torch.device("cpu")


def fixed_tables(num_slots: int, capacity: int, *, block_size: int = 8) -> BlockTables:
    """Every slot owns one run of blocks."""
    return BlockTables.fixed(num_slots, capacity=capacity, device=CPU, block_size=block_size)


def scattered_tables(num_slots: int, capacity: int, *, block_size: int = 8, seed: int = 0) -> BlockTables:
    """Every slot owns blocks from all over, in no order."""
    each = -(-capacity // block_size)
    num_blocks = 1 + num_slots * each
    tables = BlockTables(num_slots, num_blocks=num_blocks, block_size=block_size, max_blocks=each, device=CPU)
    blocks = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))).tolist()
    for slot in range(num_slots):
        own = blocks[slot * each : (slot + 1) * each]
        tables.assign(slot, own[::-1] if own == list(range(own[0], own[0] + each)) else own)
    tables.flush()
    return tables


def make_cache(
    tables: BlockTables,
    *,
    num_layers: int = 1,
    num_kv_heads: int = 2,
    head_size: int = 8,
    dtype: torch.dtype = torch.float32,
) -> KeyValueCache:
    """A cache of zeros."""
    return KeyValueCache(
        tables, num_layers=num_layers, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype, device=CPU
    )


def stored(cache: KeyValueCache, slot: int, start: int = 0, end: int | None = None) -> Tensor:
    """A copy of what a slot holds, [layers, 2, M, S, H]."""
    tables = cache.tables
    end = tables.capacity(slot) if end is None else end
    rows = tables.rows(slot, start, end - start)
    return cache.planes.flatten(3, 4).index_select(3, rows)


def store(cache: KeyValueCache, slot: int, planes: Tensor, start: int = 0) -> None:
    """Overwrite a slot's rows with [layers, 2, M, S, H]."""
    rows = cache.tables.rows(slot, start, planes.shape[3])
    cache.planes.flatten(3, 4).index_copy_(3, rows, planes)


def bystanders(cache: KeyValueCache, slots: Sequence[int]) -> Tensor:
    """A copy of all blocks but block 0 and those of some slots."""
    theirs = {block for slot in slots for block in cache.tables.blocks(slot)}
    others = [block for block in range(1, cache.tables.num_blocks) if block not in theirs]
    return cache.planes[:, :, :, others].clone()
