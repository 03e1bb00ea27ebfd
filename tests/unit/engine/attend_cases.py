"""What the tests of attention over the cache share: every form, every layout, and the formula they are held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.caches import fixed_tables, make_cache, scattered_tables
from torch import Tensor

from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.ops.attention import attention_reference

CHOICES = {
    "per-request": AttentionChoice(is_batched=False, is_row_invariant=False),
    "batched": AttentionChoice(is_batched=True, is_row_invariant=False),
    "paged": AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True),
    "row-invariant": AttentionChoice(is_batched=False, is_row_invariant=True),
}
LAYOUTS = {"runs": fixed_tables, "scattered": scattered_tables}
SLOTS = [2, 0]
HEADS, KV_HEADS, SIZE = 4, 2, 8


def filled_cache(tables: BlockTables, num_layers: int = 1, seed: int = 5) -> KeyValueCache:
    """Random keys and values at every position of every slot, the same for the same seed, wherever its blocks lie."""
    cache = make_cache(tables, num_layers=num_layers, num_kv_heads=KV_HEADS, head_size=SIZE)
    generator = torch.Generator().manual_seed(seed)
    by_row = cache.planes.flatten(3, 4)
    for slot in range(tables.num_slots):
        rows = tables.rows(slot, 0, tables.capacity(slot))
        by_row[:, :, :, rows] = torch.randn(num_layers, 2, KV_HEADS, len(rows), SIZE, generator=generator)
    return cache


def new_rows(num_rows: int, num_requests: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(num_requests, num_rows, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


def where(choice: AttentionChoice, starts: Sequence[int], slots: Sequence[int] = SLOTS) -> dict[str, Any]:
    """Arguments that say which rows; the batched form is asked with a bound alone, as it may be."""
    return {
        "slots": slots,
        "slots_B": torch.tensor(slots),
        "starts": [max(starts) + 2] * len(starts) if choice.is_batched else list(starts),
        "starts_B": torch.tensor(starts),
    }


def expected_rows(q_TNH: Tensor, keys_MSH: Tensor, values_MSH: Tensor, seen: list[list[bool]]) -> Tensor:
    """The formula, [T, N, H]: of one request, with all keys up to its last row and who sees which."""
    visible = torch.tensor(seen)
    mixed = attention_reference(q_TNH.transpose(0, 1)[None], keys_MSH[None], values_MSH[None], visible)
    return mixed[0].transpose(0, 1)


def poison_all_but(cache: KeyValueCache, spans: dict[int, tuple[int, int]]) -> None:
    """NaN in every row but those that a request may read, (first, end) by slot, and the row of zeros."""
    by_row = cache.planes.flatten(3, 4)
    kept = [torch.tensor([0])]
    kept += [cache.tables.rows(slot, first, end - first) for slot, (first, end) in spans.items()]
    rows = torch.cat(kept)
    old = by_row[:, :, :, rows].clone()
    cache.planes.fill_(torch.nan)
    by_row[:, :, :, rows] = old
