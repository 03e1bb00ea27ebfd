"""Latent rows in blocks: written through tables, read as views or copies, cleared and moved block by block."""

from __future__ import annotations

import pytest
import torch
from tests.caches import CPU, fixed_tables, scattered_tables

from paceline.engine.block_tables import BlockTables
from paceline.engine.latent_cache import LatentCache


def cache_over(tables: BlockTables) -> LatentCache:
    return LatentCache(tables, num_layers=2, width=3, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("make_tables", [fixed_tables, scattered_tables], ids=["one run", "scattered"])
def test_rows_are_read_where_they_were_written(make_tables) -> None:
    cache = cache_over(make_tables(2, 24))
    rows_BTX = torch.randn(2, 3, 4, 3).unbind(0)
    for layer in range(2):
        spans = torch.stack([cache.tables.rows(slot, start, 4) for slot, start in ((0, 5), (1, 9))])
        cache.writer(spans)(layer, torch.stack([rows_BTX[0][layer], rows_BTX[1][layer]]))
    for slot, start in ((0, 5), (1, 9)):
        read = cache.reader(slot, start + 4)
        for layer in range(2):
            assert torch.equal(read(layer)[0, start:], rows_BTX[slot][layer])
            assert not read(layer)[0, :start].any()
            paged = cache.paged(layer)
            assert paged.shape == (cache.tables.num_blocks, 8, 1, 3)
            block, row = cache.tables.blocks(slot)[start // 8], start % 8
            assert torch.equal(paged[block, row, 0], rows_BTX[slot][layer][0])


def test_blocks_are_poisoned_copied_and_cleared() -> None:
    cache = cache_over(fixed_tables(2, 16))
    cache.writer(cache.tables.rows(0, 0, 16).unsqueeze(0))(1, torch.randn(1, 16, 3))
    first, second = cache.tables.blocks(0)
    target = cache.tables.blocks(1)
    cache.copy_blocks([first, second], target)
    assert [cache.checksum(block) for block in target] == [cache.checksum(first), cache.checksum(second)]
    cache.poison_blocks([first])
    assert not cache.are_finite([first, second]) and cache.are_finite([second])
    cache.clear_blocks([first])
    cache.clear_rows(1, 4)
    assert not cache.reader(0, 8)(1).any()
    assert cache.reader(1, 16)(1)[0, :4].any() and not cache.reader(1, 16)(1)[0, 4:].any()
    assert cache.num_bytes == 2 * cache.tables.num_blocks * 8 * 3 * 4
    cache.release()
    assert cache.num_bytes == 0
