"""Cached attention of causal models, in every form and layout, against a plain formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.caches import bystanders, fixed_tables, scattered_tables, store, stored
from tests.unit.engine.attend_cases import (
    CHOICES,
    LAYOUTS,
    SLOTS,
    expected_rows,
    filled_cache,
    new_rows,
    poison_all_but,
    where,
)
from torch import Tensor

from paceline.engine.attends import AttentionChoice, write_then_attend
from paceline.engine.block_tables import BlockTables

Layout = Callable[[int, int], BlockTables]
BATCHED, ROW_INVARIANT = CHOICES["batched"], CHOICES["row-invariant"]

each_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@each_choice
@each_layout
@pytest.mark.parametrize(("starts", "num_rows"), [([0, 0], 5), ([7, 3], 1), ([7, 3], 4), ([0, 9], 3), ([12, 12], 8)])
def test_rows_are_stored_and_see_what_came_before(
    choice: AttentionChoice, layout: Layout, starts: list[int], num_rows: int
) -> None:
    cache = filled_cache(layout(3, 24))
    before, others = {slot: stored(cache, slot)[0] for slot in SLOTS}, bystanders(cache, SLOTS)
    q, k, v = new_rows(num_rows)
    mixed = write_then_attend(cache, choice, **where(choice, starts), num_rows=num_rows)(0, q, k, v)
    assert mixed.shape == q.shape
    for index, (slot, start) in enumerate(zip(SLOTS, starts, strict=True)):
        end = start + num_rows
        keys, values = (
            torch.cat((old[:, :start], new[index].transpose(0, 1)), dim=1)
            for old, new in zip(before[slot], (k, v), strict=True)
        )
        seen = [[j <= start + i for j in range(end)] for i in range(num_rows)]
        torch.testing.assert_close(mixed[index], expected_rows(q[index], keys, values, seen))
        found = stored(cache, slot)[0]
        assert torch.equal(found[:, :, :end], torch.stack((keys, values)))
        assert torch.equal(found[:, :, end:], before[slot][:, :, end:])
    assert torch.equal(bystanders(cache, SLOTS), others)


@each_choice
@each_layout
@pytest.mark.parametrize(("starts", "num_rows"), [([0, 0], 5), ([7, 3], 1), ([7, 3], 4)])
@pytest.mark.parametrize("window", [None, 1, 4, 8, 100])
def test_a_window_counts_the_row_itself(
    choice: AttentionChoice, layout: Layout, starts: list[int], num_rows: int, window: int | None
) -> None:
    cache = filled_cache(layout(3, 24), num_layers=2)
    before = {slot: stored(cache, slot)[1] for slot in SLOTS}
    q, k, v = new_rows(num_rows)
    attend = write_then_attend(cache, choice, **where(choice, starts), num_rows=num_rows, windows=(2, window))
    first, mixed = attend(0, q, k, v), attend(1, q, k, v)
    assert not torch.equal(first, mixed)
    for index, (slot, start) in enumerate(zip(SLOTS, starts, strict=True)):
        keys, values = (
            torch.cat((old[:, :start], new[index].transpose(0, 1)), dim=1)
            for old, new in zip(before[slot], (k, v), strict=True)
        )
        seen = [
            [j <= start + i and (window is None or start + i - j < window) for j in range(start + num_rows)]
            for i in range(num_rows)
        ]
        torch.testing.assert_close(mixed[index], expected_rows(q[index], keys, values, seen))


@each_choice
@each_layout
def test_keys_below_the_context_start_are_never_read(choice: AttentionChoice, layout: Layout) -> None:
    """T7.7: what a prefix hit left without draft context may hold anything."""
    firsts, starts = [5, 0], [9, 3]
    for num_rows in (1, 4):
        for window in (None, 3):
            cache = filled_cache(layout(3, 24))
            old = {slot: stored(cache, slot)[0] for slot in SLOTS}
            spans = zip(SLOTS, firsts, starts, strict=True)
            poison_all_but(cache, {slot: (first, start) for slot, first, start in spans})
            q, k, v = new_rows(num_rows)
            attend = write_then_attend(
                cache,
                choice,
                **where(choice, starts),
                num_rows=num_rows,
                windows=(window,),
                context_starts=firsts,
                context_starts_B=torch.tensor(firsts),
            )
            mixed = attend(0, q, k, v)
            for index, (slot, first, start) in enumerate(zip(SLOTS, firsts, starts, strict=True)):
                keys, values = (
                    torch.cat((part[:, first:start], new[index].transpose(0, 1)), dim=1)
                    for part, new in zip(old[slot], (k, v), strict=True)
                )
                seen = [
                    [
                        j <= start + i and (window is None or start + i - j < window)
                        for j in range(first, start + num_rows)
                    ]
                    for i in range(num_rows)
                ]
                torch.testing.assert_close(mixed[index], expected_rows(q[index], keys, values, seen))


@each_choice
def test_a_prompt_that_begins_at_its_context_start_sees_itself_alone(choice: AttentionChoice) -> None:
    cache = filled_cache(fixed_tables(3, 24))
    cache.planes.fill_(torch.nan)
    cache.planes[:, :, :, 0] = 0
    q, k, v = new_rows(4, 1)
    where_from = {"context_starts": [8], "context_starts_B": torch.tensor([8])}
    mixed = write_then_attend(cache, choice, **where(choice, [8], [1]), num_rows=4, **where_from)(0, q, k, v)
    seen = [[j <= i for j in range(4)] for i in range(4)]
    torch.testing.assert_close(mixed[0], expected_rows(q[0], k[0].transpose(0, 1), v[0].transpose(0, 1), seen))


@each_choice
@each_layout
def test_nothing_but_a_requests_own_rows_is_read(choice: AttentionChoice, layout: Layout) -> None:
    """0 * NaN is NaN: a mask is not enough. Every other row of the planes holds NaN."""
    for starts, num_rows in (([4, 9], 3), ([15, 0], 1), ([0, 20], 4)):
        found = []
        for is_poisoned in (False, True):
            torch.manual_seed(0)
            cache = filled_cache(layout(3, 24))
            if is_poisoned:
                poison_all_but(cache, {slot: (0, start) for slot, start in zip(SLOTS, starts, strict=True)})
            q, k, v = new_rows(num_rows)
            found.append(write_then_attend(cache, choice, **where(choice, starts), num_rows=num_rows)(0, q, k, v))
        assert found[1].isfinite().all()
        assert torch.equal(found[0], found[1])


def test_a_padded_batch_is_not_spoiled_by_stale_rows_of_refused_drafts() -> None:
    for value in (1e30, torch.nan, torch.inf):
        cache = filled_cache(fixed_tables(3, 24))
        q, k, v = new_rows(3)
        clean = write_then_attend(cache, BATCHED, **where(BATCHED, [4, 9]), num_rows=3)(0, q, k, v)
        store(cache, 2, torch.full_like(stored(cache, 2, 7), value), 7)
        assert torch.equal(clean, write_then_attend(cache, BATCHED, **where(BATCHED, [4, 9]), num_rows=3)(0, q, k, v))


def test_padding_rows_leave_the_row_of_zeros_alone() -> None:
    """I9: rows of the trash slot, and rows past a request's blocks, hold anything and are stored in block 0."""
    cache = filled_cache(fixed_tables(3, 16))
    others = bystanders(cache, [1])
    q, k, v = new_rows(4, 3)
    k[1:], v[1:] = torch.nan, torch.nan
    slots, starts = [1, 3, 0], [6, 0, 16]
    attend = write_then_attend(cache, BATCHED, **where(BATCHED, starts, slots), num_rows=4)
    alone = write_then_attend(cache, BATCHED, **where(BATCHED, [6], [1]), num_rows=4)
    mixed = attend(0, q, k, v)
    assert not cache.planes[:, :, :, 0, 0].any()
    torch.testing.assert_close(mixed[:1], alone(0, q[:1], k[:1], v[:1]))
    assert torch.equal(bystanders(cache, [1]), others)


def test_row_invariant_attention_has_the_same_bits_row_by_row_in_runs_and_in_scattered_blocks() -> None:
    q, k, v = new_rows(6)

    def run(pieces: list[int], layout: Layout) -> Tensor:
        cache, outputs, start = filled_cache(layout(3, 24)), [], 5
        for size in pieces:
            rows = slice(start - 5, start - 5 + size)
            attend = write_then_attend(cache, ROW_INVARIANT, **where(ROW_INVARIANT, [start], [1]), num_rows=size)
            outputs.append(attend(0, q[:1, rows], k[:1, rows], v[:1, rows]))
            start += size
        return torch.cat(outputs, dim=1)

    whole = run([6], fixed_tables)
    for layout in (fixed_tables, scattered_tables):
        for pieces in ([6], [1] * 6, [4, 2]):
            assert torch.equal(run(pieces, layout), whole)
