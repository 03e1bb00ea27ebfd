"""Cached attention through one native call: the forms that go request by request are what it is held to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.caches import fixed_tables, make_cache, scattered_tables
from torch import Tensor

from paceline.engine.attends import AttentionChoice, attend_block, write_then_attend
from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.engine.native_attends import BlockNative, CausalNative, can_attend
from paceline.models.layers import Attend
from paceline.ops.native.rows import can_run

pytestmark = pytest.mark.skipif(
    not can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)

NATIVE = AttentionChoice(is_batched=False, is_row_invariant=False, is_native=True)
PER_REQUEST = AttentionChoice(is_batched=False, is_row_invariant=False)
LAYOUTS = {"runs": fixed_tables, "scattered": scattered_tables}
SLOTS, HEADS, KV_HEADS, SIZE = [2, 0], 4, 2, 8
Layout = Callable[[int, int], BlockTables]
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def half_cache(tables: BlockTables) -> KeyValueCache:
    cache = make_cache(tables, num_layers=2, num_kv_heads=KV_HEADS, head_size=SIZE)
    planes = torch.randn(cache.planes.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    planes[:, :, :, 0] = 0
    half = KeyValueCache(
        tables, num_layers=2, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16, device=planes.device
    )
    half.planes.copy_(planes)
    return half


def new_rows(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, num_rows, heads, SIZE).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


def causal(
    choice: AttentionChoice,
    cache: KeyValueCache,
    starts: list[int],
    num_rows: int,
    windows: tuple[int | None, ...] | None,
    firsts: list[int] | None,
) -> Attend:
    return write_then_attend(
        cache,
        choice,
        slots=SLOTS,
        slots_B=torch.tensor(SLOTS),
        starts=starts,
        starts_B=torch.tensor(starts),
        num_rows=num_rows,
        windows=windows,
        context_starts=firsts,
        context_starts_B=None if firsts is None else torch.tensor(firsts),
    )


@each_layout
@pytest.mark.parametrize(("starts", "num_rows"), [([0, 0], 5), ([7, 3], 1), ([7, 3], 4), ([12, 12], 8)])
@pytest.mark.parametrize("windows", [None, (2, None), (4, 100)])
@pytest.mark.parametrize("has_firsts", [False, True])
def test_causal_rows_see_and_store_the_same(
    layout: Layout, starts: list[int], num_rows: int, windows: tuple[int | None, ...] | None, has_firsts: bool
) -> None:
    firsts = [min(2, start) for start in starts] if has_firsts else None
    mixed, planes = [], []
    rows = new_rows(num_rows)
    for choice in (NATIVE, PER_REQUEST):
        cache = half_cache(layout(3, 24))
        attend = causal(choice, cache, starts, num_rows, windows, firsts)
        assert isinstance(attend, CausalNative) is choice.is_native
        mixed.append(torch.stack([attend(layer, *rows) for layer in (0, 1)]))
        planes.append(cache.planes)
    torch.testing.assert_close(mixed[0], mixed[1], rtol=2**-6, atol=2**-6)
    assert torch.equal(planes[0], planes[1])


@each_layout
@pytest.mark.parametrize("lengths", [[0, 0], [7, 3], [12, 16]])
@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_firsts", [False, True])
def test_blocks_see_the_same_and_leave_the_cache_alone(
    layout: Layout, lengths: list[int], num_rows: int, is_causal: bool, has_firsts: bool
) -> None:
    firsts = [min(2, length) for length in lengths] if has_firsts else None
    cache = half_cache(layout(3, 24))
    before, rows, mixed = cache.planes.clone(), new_rows(num_rows), []
    for choice in (NATIVE, PER_REQUEST):
        attend = attend_block(
            cache,
            choice,
            slots=SLOTS,
            slots_B=torch.tensor(SLOTS),
            lengths_B=torch.tensor(lengths),
            max_length=max(lengths) + 1,
            num_rows=num_rows,
            windows=(3, None),
            causal=(is_causal, is_causal),
            context_starts=firsts,
            context_starts_B=None if firsts is None else torch.tensor(firsts),
        )
        assert isinstance(attend, BlockNative) is choice.is_native
        mixed.append(torch.stack([attend(layer, *rows) for layer in (0, 1)]))
    torch.testing.assert_close(mixed[0], mixed[1], rtol=2**-6, atol=2**-6)
    assert torch.equal(cache.planes, before)


def test_rows_beyond_a_slots_blocks_are_nobodys() -> None:
    cache = half_cache(fixed_tables(3, 24))
    kept = cache.planes.flatten(3, 4)[:, :, :, 8:].clone()
    rows = new_rows(4)
    causal(NATIVE, cache, [22, 24], 4, None, None)(0, *rows)
    after = cache.planes.flatten(3, 4)
    changed = (after[0, 0, 0, 8:] != kept[0, 0, 0]).any(-1).nonzero().flatten() + 8
    own = cache.tables.rows(SLOTS[0], 22, 2)
    assert changed.tolist() == own.tolist()
    assert not after[:, :, :, 0].any(), "the row of zeros stays one"


def test_other_keys_go_through_torch() -> None:
    cache = make_cache(fixed_tables(3, 24), num_layers=1, num_kv_heads=KV_HEADS, head_size=SIZE)
    assert cache.planes.dtype == torch.float32 and not can_attend(cache)
    assert not isinstance(causal(NATIVE, cache, [7, 3], 1, None, None), CausalNative)
