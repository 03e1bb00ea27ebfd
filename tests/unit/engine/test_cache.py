"""The cache stores rows where it is told to, and views are views."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.cache import KeyValueCache
from paceline.errors import CapacityError


def make_cache(**changes: int) -> KeyValueCache:
    sizes = {"num_layers": 2, "num_slots": 3, "num_kv_heads": 2, "capacity": 10, "head_size": 4} | changes
    return KeyValueCache(**sizes, dtype=torch.float32, device=torch.device("cpu"))


def test_single_and_batched_writes_agree() -> None:
    single, batched = make_cache(), make_cache()
    k, v = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2, 4)
    slots, starts = [2, 0], [4, 1]
    for index in range(2):
        single.write_rows(1, slots[index], starts[index], k[index], v[index])
    positions = torch.tensor(starts).unsqueeze(1) + torch.arange(3)
    batched.write_batch(1, torch.tensor(slots), positions, k, v)
    assert torch.equal(single.planes, batched.planes)
    assert not single.planes[0].any()
    assert not single.planes[1, :, 1].any()


def test_context_is_a_view_and_gather_a_copy_of_the_same() -> None:
    cache = make_cache()
    cache.planes.copy_(torch.randn_like(cache.planes))
    keys, values = cache.context(1, 2, 7)
    gathered_k, gathered_v = cache.gather(1, torch.tensor([0, 2]), 7)
    assert torch.equal(keys, gathered_k[1:])
    assert torch.equal(values, gathered_v[1:])
    cache.planes[1, 0, 2, 0, 0, 0] = 99.0
    assert keys[0, 0, 0, 0] == 99.0
    assert gathered_k[1, 0, 0, 0] != 99.0


def test_cleared_rows_leave_the_others_alone() -> None:
    cache = make_cache()
    cache.planes.fill_(torch.nan)
    cache.clear_rows(1, 6)
    assert not cache.planes[:, :, 1, :, 6:].any()
    assert cache.planes[:, :, 1, :, :6].isnan().all()
    cache.clear_rows(1)
    assert not cache.planes[:, :, 1].any()
    assert cache.planes[:, :, [0, 2, 3]].isnan().all()
    assert cache.num_bytes == 2 * 2 * 4 * 2 * 10 * 4 * 4


def test_a_cache_larger_than_memory_says_how_large() -> None:
    with pytest.raises(CapacityError, match="MiB"):
        make_cache(capacity=2**45)
