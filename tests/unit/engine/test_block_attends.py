"""Attention of draft blocks over cached context, in every form and layout, against a plain formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.caches import fixed_tables, scattered_tables, stored
from tests.unit.engine.attend_cases import (
    CHOICES,
    HEADS,
    LAYOUTS,
    SLOTS,
    expected_rows,
    filled_cache,
    new_rows,
    poison_all_but,
)
from torch import Tensor

from paceline.engine.attends import AttentionChoice, attend_block
from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.models.layers import Attend
from paceline.ops.attention import attention_reference

Layout = Callable[[int, int], BlockTables]
ROWS = 4

each_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def over(
    cache: KeyValueCache,
    choice: AttentionChoice,
    lengths: list[int],
    window: int | None = None,
    is_causal: bool = False,
    firsts: list[int] | None = None,
) -> Attend:
    return attend_block(
        cache,
        choice,
        slots=SLOTS,
        slots_B=torch.tensor(SLOTS),
        lengths_B=torch.tensor(lengths),
        max_length=max(lengths) + ROWS,
        num_rows=ROWS,
        windows=(window,),
        causal=(is_causal,),
        context_starts=firsts,
        context_starts_B=None if firsts is None else torch.tensor(firsts),
    )


def seen_by(first: int, length: int, window: int | None, is_causal: bool) -> list[list[bool]]:
    return [
        [
            (not is_causal or j <= length + i) and (window is None or abs(length + i - j) < window)
            for j in range(first, length + ROWS)
        ]
        for i in range(ROWS)
    ]


def keys_of(cache: KeyValueCache, slot: int, first: int, length: int, *new_TMH: Tensor) -> list[Tensor]:
    old = stored(cache, slot, first, length)[0]
    return [torch.cat((part, new.transpose(0, 1)), dim=1) for part, new in zip(old, new_TMH, strict=True)]


@each_choice
@each_layout
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_block_sees_its_context_and_itself(
    choice: AttentionChoice, layout: Layout, window: int | None, is_causal: bool
) -> None:
    cache, lengths = filled_cache(layout(3, 24)), [11, 6]
    before = cache.planes.clone()
    q, k, v = new_rows(ROWS)
    mixed = over(cache, choice, lengths, window, is_causal)(0, q, k, v)
    assert mixed.shape == q.shape
    for index, (slot, length) in enumerate(zip(SLOTS, lengths, strict=True)):
        keys, values = keys_of(cache, slot, 0, length, k[index], v[index])
        seen = seen_by(0, length, window, is_causal)
        torch.testing.assert_close(mixed[index], expected_rows(q[index], keys, values, seen))
    assert torch.equal(cache.planes, before), "the block's own rows never enter the cache"


@each_choice
@each_layout
def test_context_below_its_start_is_never_read(choice: AttentionChoice, layout: Layout) -> None:
    """T7.7, with context that is all there, that starts late, and that is empty."""
    for firsts, lengths in (([5, 0], [11, 6]), ([8, 6], [9, 6])):
        for window, is_causal in ((None, False), (None, True), (4, False), (4, True)):
            cache = filled_cache(layout(3, 24))
            q, k, v = new_rows(ROWS)
            both = [
                keys_of(cache, slot, first, length, k[index], v[index])
                for index, (slot, first, length) in enumerate(zip(SLOTS, firsts, lengths, strict=True))
            ]
            spans = zip(SLOTS, firsts, lengths, strict=True)
            poison_all_but(cache, {slot: (first, length) for slot, first, length in spans})
            mixed = over(cache, choice, lengths, window, is_causal, firsts)(0, q, k, v)
            for index, (keys, values) in enumerate(both):
                seen = seen_by(firsts[index], lengths[index], window, is_causal)
                torch.testing.assert_close(mixed[index], expected_rows(q[index], keys, values, seen))


@each_choice
@each_layout
def test_nothing_but_a_requests_own_context_is_read(choice: AttentionChoice, layout: Layout) -> None:
    found = []
    for is_poisoned in (False, True):
        torch.manual_seed(0)
        cache, lengths = filled_cache(layout(3, 24)), [13, 0]
        if is_poisoned:
            poison_all_but(cache, {slot: (0, length) for slot, length in zip(SLOTS, lengths, strict=True)})
        q, k, v = new_rows(ROWS)
        found.append(over(cache, choice, lengths)(0, q, k, v))
    assert found[1].isfinite().all()
    assert torch.equal(found[0], found[1])


@each_choice
@each_layout
@pytest.mark.parametrize(("window", "is_causal"), [(None, False), (None, True), (5, False)])
def test_a_sink_takes_weight_of_each_head(
    choice: AttentionChoice, layout: Layout, window: int | None, is_causal: bool
) -> None:
    cache, lengths, sinks = filled_cache(layout(3, 24)), [11, 6], torch.randn(HEADS)
    q, k, v = new_rows(ROWS)
    mixed = over(cache, choice, lengths, window, is_causal)(0, q, k, v, sink_N=sinks)
    for index, (slot, length) in enumerate(zip(SLOTS, lengths, strict=True)):
        keys, values = keys_of(cache, slot, 0, length, k[index], v[index])
        visible = torch.tensor(seen_by(0, length, window, is_causal))
        expected = attention_reference(q[index].transpose(0, 1)[None], keys[None], values[None], visible, sinks)
        torch.testing.assert_close(mixed[index], expected[0].transpose(0, 1))


def test_row_invariant_bits_are_the_same_in_runs_and_in_scattered_blocks() -> None:
    q, k, v = new_rows(ROWS)
    for window, is_causal in ((None, False), (None, True), (4, True)):
        run, scattered = (
            over(filled_cache(layout(3, 24)), CHOICES["row-invariant"], [11, 6], window, is_causal)(0, q, k, v)
            for layout in (fixed_tables, scattered_tables)
        )
        assert torch.equal(run, scattered)
