"""The cache stores rows where its tables say, and views are views."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.caches import fixed_tables, make_cache, scattered_tables, stored
from torch import Tensor

from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.errors import CapacityError

TABLES = {"runs": fixed_tables, "scattered": scattered_tables}


def filled(tables: BlockTables, **sizes: int) -> KeyValueCache:
    cache = make_cache(tables, num_layers=2, **sizes)
    cache.planes.copy_(torch.randn(cache.planes.shape))
    return cache


def batch_cells(cache: KeyValueCache, slots: list[int], positions: Tensor) -> Tensor:
    return cache.cells_to_write(cache.tables.rows_of(torch.tensor(slots), positions))


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_single_and_batched_writes_agree(tables) -> None:
    single, batched = (make_cache(tables(3, 20, block_size=4), num_layers=2) for _ in range(2))
    k, v = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
    slots, starts = [2, 0], [6, 1]
    for index in range(2):
        single.write_rows(1, slots[index], starts[index], k[index], v[index])
        assert torch.equal(
            stored(single, slots[index], starts[index], starts[index] + 3)[1, 0], k[index].transpose(0, 1)
        )
        assert torch.equal(
            stored(single, slots[index], starts[index], starts[index] + 3)[1, 1], v[index].transpose(0, 1)
        )
    positions = torch.tensor(starts).unsqueeze(1) + torch.arange(3)
    batched.write_batch(1, k, v, batch_cells(batched, slots, positions))
    assert torch.equal(single.planes, batched.planes)
    assert not single.planes[0].any()
    assert not stored(single, 1).any()
    assert single.planes.count_nonzero() == k.numel() + v.numel()


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_context_and_gather_give_the_same(tables) -> None:
    cache = filled(tables(3, 20, block_size=4))
    rows = cache.tables.readable_rows(torch.tensor([0, 2]), torch.tensor([5, 7]), 9)
    gathered_k, gathered_v = cache.gather(1, cache.cells_to_read(rows))
    assert gathered_k.shape == (2, 2, 9, 8)
    for index, (slot, length) in enumerate(((0, 5), (2, 7))):
        for start in (0, 3, length):
            keys, values = cache.context(1, slot, length, start)
            assert keys.shape == (1, 2, length - start, 8)
            assert torch.equal(keys[0], gathered_k[index, :, start:length])
            assert torch.equal(values[0], gathered_v[index, :, start:length])
            assert torch.equal(stored(cache, slot, start, length)[1], torch.cat((keys, values)))


def test_context_of_one_run_is_a_view_and_gather_a_copy() -> None:
    cache = filled(fixed_tables(3, 10, block_size=4))
    keys, _ = cache.context(1, 2, 7)
    gathered, _ = cache.gather(1, cache.cells_to_read(cache.tables.rows(2, 0, 7)[None]))
    cache.planes[1, 0, 0, cache.tables.blocks(2)[0], 0, 0] = 99.0
    assert keys[0, 0, 0, 0] == 99.0
    assert gathered[0, 0, 0, 0] != 99.0


def test_rows_beyond_a_slots_blocks_are_refused_one_by_one_and_land_in_block_0_in_a_batch() -> None:
    cache = make_cache(fixed_tables(2, 8, block_size=4))
    k = torch.ones(3, 2, 8)
    with pytest.raises(AssertionError, match="own blocks"):
        cache.write_rows(0, 0, 6, k, k)
    with pytest.raises(AssertionError, match="hold nothing"):
        cache.context(0, 0, 9)
    positions = torch.tensor([[0, 3, 4], [7, 8, 400]])
    cache.write_batch(0, torch.ones(2, 3, 2, 8), torch.ones(2, 3, 2, 8), batch_cells(cache, [2, 1], positions))
    written = cache.planes[0].flatten(2, 3)[0, 0].any(-1).nonzero()[:, 0].tolist()
    assert 0 not in written, "reads that must see nothing are sent to row 0"
    assert [row for row in written if row >= 4] == [4 * cache.tables.blocks(1)[1] + 3]


def test_cleared_rows_leave_the_others_alone() -> None:
    for tables in TABLES.values():
        cache = make_cache(tables(3, 20, block_size=4), num_layers=2)
        cache.planes.fill_(torch.nan)
        cache.clear_rows(1, 6)
        assert not stored(cache, 1, 6).any()
        assert stored(cache, 1, 0, 6).isnan().all()
        cache.clear_rows(1)
        assert not stored(cache, 1).any()
        assert cache.planes.isnan().sum() == cache.planes.numel() * (1 + 2 * 5) / (1 + 3 * 5)


def test_blocks_are_cleared_poisoned_and_copied_whole() -> None:
    cache = filled(fixed_tables(2, 16, block_size=4))
    before = cache.planes.clone()
    cache.copy_blocks([5, 2], [3, 7])
    assert torch.equal(cache.planes[:, :, :, [3, 7]], before[:, :, :, [5, 2]])
    others = [0, 1, 2, 4, 5, 6, 8]
    assert torch.equal(cache.planes[:, :, :, others], before[:, :, :, others])
    cache.poison_blocks([4])
    assert cache.planes[:, :, :, 4].isnan().all()
    assert cache.are_poisoned([4]) == [True] and cache.are_poisoned([]) == []
    cache.planes[0, 0, 0, 4, 0, 0].neg_()  # somebody else's NaN
    assert cache.are_poisoned([5, 4]) == [False, False]
    cache.clear_blocks([6, 8])
    assert not cache.planes[:, :, :, [6, 8]].any()
    cache.clear_blocks([])
    cache.poison_blocks([])
    cache.copy_blocks([], [])
    with pytest.raises(AssertionError, match="block 0"):
        cache.poison_blocks([1, 0])
    others = [0, 1, 2, 5]
    assert torch.equal(cache.planes[:, :, :, others], before[:, :, :, others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_knows_every_number_of_its_block_and_no_other(dtype: torch.dtype) -> None:
    cache = make_cache(fixed_tables(2, 8, block_size=2), num_layers=2, dtype=dtype)
    cache.planes.copy_(torch.randn(cache.planes.shape))
    sums = [cache.checksum(block) for block in range(5)]
    assert len(set(sums)) == 5
    assert cache.checksum(3) == sums[3]
    for where in ((0, 0, 0, 3, 0, 0), (1, 1, 1, 3, 1, 7)):
        old = cache.planes[where].clone()
        cache.planes[where] += 1
        assert [cache.checksum(block) == sums[block] for block in range(5)] == [True, True, True, False, True]
        cache.planes[where] = old
    assert [cache.checksum(block) for block in range(5)] == sums
    assert cache.checksums([4, 0, 3]) == [sums[4], sums[0], sums[3]] and cache.checksums([]) == []
    cache.copy_blocks([3], [1])
    assert cache.checksum(1) == sums[3]


def test_its_size_is_known_and_one_larger_than_memory_says_how_large() -> None:
    assert make_cache(fixed_tables(3, 10, block_size=4), num_layers=2).num_bytes == 2 * 2 * 2 * (1 + 3 * 3) * 4 * 8 * 4
    tables = BlockTables(1, num_blocks=2**40, block_size=32, max_blocks=4, device=torch.device("cpu"))
    with pytest.raises(CapacityError, match="MiB"):
        make_cache(tables)


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_a_pass_stores_the_rows_of_all_its_requests_and_reads_each_ones_own(tables) -> None:
    slots, starts = [2, 0, 1], [6, 1, 3]
    cache = filled(tables(3, 20, block_size=4))
    before = cache.planes.clone()
    k, v = torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2, 8)
    write = cache.writer(slots, starts, 5)
    for layer in range(2):
        write(layer, k + layer, v - layer)
    for index, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        read = cache.reader(slot, start + 5, start)
        for layer in range(2):
            keys, values = read(layer)
            assert torch.equal(keys[0], k[index].transpose(0, 1) + layer)
            assert torch.equal(values[0], v[index].transpose(0, 1) - layer)
    assert (cache.planes != before).sum() == 2 * 2 * k.numel()


def test_what_lies_in_a_run_is_settled_before_the_layers_and_not_copied() -> None:
    cache = make_cache(fixed_tables(2, 16, block_size=4), num_layers=3)
    read = cache.reader(1, 9, 2)
    assert all(part.untyped_storage().data_ptr() == cache.planes.untyped_storage().data_ptr() for part in read(2))
    assert read(2)[0] is read(2)[0], "a layer's views are made once for a pass"
    cache.writer([1], [2], 7)(2, torch.ones(1, 7, 2, 8), torch.full((1, 7, 2, 8), 2.0))
    assert read(2)[0].eq(1).all() and read(2)[1].eq(2).all()
    assert not read(1)[0].any()


def test_bad_numbers_in_blocks_are_seen() -> None:
    cache = make_cache(fixed_tables(2, 16, block_size=4), num_layers=3)
    assert cache.are_finite([1, 2, 3, 4, 5, 6, 7, 8])
    for bad in (torch.nan, torch.inf):
        cache.planes[2, 1, 1, 3, 2, 5] = bad
        assert not cache.are_finite([2, 3])
        assert cache.are_finite([1, 2, 4])
        cache.clear_blocks([3])
        assert cache.are_finite([3])


def test_released_memory_is_free_although_the_cache_is_held() -> None:
    cache = make_cache(fixed_tables(2, 16, block_size=4), num_layers=3)
    planes = weakref.ref(cache.planes.untyped_storage())
    reader = cache.reader(1, 4)
    cache.release()
    assert planes() is not None, "a pass still reads"
    del reader
    gc.collect()
    assert planes() is None
    assert cache.num_bytes == 0
    with pytest.raises((IndexError, RuntimeError)):
        cache.context(0, 1, 4)
