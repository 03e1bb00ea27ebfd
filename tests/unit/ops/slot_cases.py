"""Slots of several requests, some of which have ended, for the operations that read and write them."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.slot_columns import (
    ANCHOR,
    FIRST_STOP,
    IS_ALIVE,
    LENGTH,
    LIMIT,
    NUM_FRACTIONS,
    NUM_STOPS,
    NUM_WHOLE,
    SEED,
    STEP,
    TOP_K,
    SlotColumns,
)
from paceline.ops.step_rows import CacheCells, WaitingDrafts

VOCAB_SIZE = 50
BLOCK_SIZE = 8
MAX_BLOCKS = 5


def odd_slots(
    num_slots: int, num_kept: int, num_candidates: int, *, seed: int = 0
) -> tuple[SlotColumns, WaitingDrafts]:
    """Every third slot has ended; drafts are missing in places and some ids are none of the vocabulary's."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows = num_slots + 1
    whole = torch.zeros(rows, NUM_WHOLE, dtype=torch.int64)
    whole[:, LENGTH], whole[:, STEP] = numbers(0, BLOCK_SIZE * MAX_BLOCKS, rows), numbers(0, 9, rows)
    whole[:, ANCHOR] = numbers(-1, VOCAB_SIZE, rows)
    whole[1, ANCHOR] = 2**31 - 1
    whole[:, IS_ALIVE], whole[:, LIMIT] = 1, whole[:, LENGTH] + numbers(1, 12, rows)
    whole[2::3, IS_ALIVE] = 0
    whole[num_slots, IS_ALIVE] = 0
    whole[:, TOP_K], whole[:, SEED] = numbers(0, 99, rows), numbers(-(2**60), 2**60, rows)
    whole[:, FIRST_STOP:] = numbers(-1, VOCAB_SIZE, rows, NUM_STOPS)
    whole[:, FIRST_STOP + 2 :] = -1
    ids = numbers(-1, VOCAB_SIZE, rows, num_kept)
    ids[0, -1:] = 2**31 - 1
    candidates = numbers(-1, VOCAB_SIZE + 2, rows, num_kept, num_candidates)
    log_q = torch.rand(rows, num_kept, num_candidates, generator=generator).log()
    columns = SlotColumns(whole, torch.rand(rows, NUM_FRACTIONS, generator=generator))
    return columns, WaitingDrafts(ids, candidates, log_q)


def tables(num_slots: int) -> CacheCells:
    """Blocks of every slot but the trash slot; the last of them are missing."""
    table = torch.arange(1, num_slots * MAX_BLOCKS + 1, dtype=torch.int32).view(num_slots, MAX_BLOCKS)
    table[:, -1] = 0
    return CacheCells(torch.cat((table, torch.zeros(1, MAX_BLOCKS, dtype=torch.int32))), BLOCK_SIZE)


def moved(parts: tuple[Tensor | None, ...], device: torch.device) -> list[Tensor | None]:
    """Copies, which an operation may change, on a device."""
    return [None if part is None else part.clone().to(device) for part in parts]


def assert_same(found: object, expected: object, name: str = "") -> None:
    """Compare tensors within tuples, to the bit."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and found.dtype == expected.dtype, name
        assert torch.equal(found.cpu(), expected.cpu()), name
    elif isinstance(expected, tuple):
        assert isinstance(found, tuple)
        fields = getattr(expected, "_fields", range(len(expected)))
        for field, one, other in zip(fields, found, expected, strict=True):
            assert_same(one, other, f"{name}.{field}")
    else:
        assert found == expected, name
