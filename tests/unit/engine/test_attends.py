"""The form follows the device; and the faults that every form has to survive, planted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.unit.engine import test_block_attends as block
from tests.unit.engine import test_causal_attends as causal
from tests.unit.engine.attend_cases import CHOICES, LAYOUTS, filled_cache, where

from paceline.engine import attends, paged_attends
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_attends import BlockBatched
from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.engine.causal_attends import CausalBatched
from paceline.ops.dispatch import HAS_TRITON

BATCHED, PAGED = CHOICES["batched"], CHOICES["paged"]


def test_the_form_follows_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert AttentionChoice.for_device(cpu, is_row_invariant=False) == CHOICES["per-request"]
    assert AttentionChoice.for_device(cpu, is_row_invariant=False, is_paged=True) == CHOICES["paged"]
    assert AttentionChoice.for_device(cuda, is_row_invariant=False) == CHOICES["paged" if HAS_TRITON else "batched"]
    for device in (cpu, cuda):
        found = AttentionChoice.for_device(device, is_row_invariant=True, is_paged=True)
        assert found == CHOICES["row-invariant"]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_blocks_that_the_kernel_does_not_take_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attends, "can_attend_paged", lambda cache: False)
    cache = filled_cache(LAYOUTS["runs"](3, 24))
    where_to = where(CHOICES["paged"], [7, 3])
    assert isinstance(attends.write_then_attend(cache, CHOICES["paged"], **where_to, num_rows=2), CausalBatched)
    assert isinstance(block.over(cache, CHOICES["paged"], [7, 3]), BlockBatched)


def read_all_blocks(patch: pytest.MonkeyPatch) -> None:
    """A padded batch reads what lies beyond a request's own rows, and hides it behind the mask alone."""
    honest = BlockTables.readable_rows

    def careless(self: BlockTables, slots_B, ends_B, num_positions, starts_B=None):
        return honest(self, slots_B, torch.full_like(ends_B, num_positions))

    patch.setattr(BlockTables, "readable_rows", careless)


def write_to_row_0(patch: pytest.MonkeyPatch) -> None:
    """Rows of padding land where reads that must not see anything are sent."""

    def first(self: BlockTables, slots_B, positions_BT):
        return self._look_up(slots_B, positions_BT)

    patch.setattr(BlockTables, "rows_of", first)


def take_blocks_for_a_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTables, "is_one_run", lambda self, slot: True)


def forget_where_context_starts(patch: pytest.MonkeyPatch) -> None:
    honest, honest_rows = KeyValueCache.reader, BlockTables.readable_rows
    patch.setattr(KeyValueCache, "reader", lambda self, slot, length, start=0: honest(self, slot, length))
    patch.setattr(BlockTables, "readable_rows", lambda self, *arguments: honest_rows(self, *arguments[:3]))


def forget_of_paged(name: str, value: object = None) -> Callable[[pytest.MonkeyPatch], None]:
    """The operation is called without one of its arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = paged_attends.paged_attention
        patch.setattr(
            paged_attends, "paged_attention", lambda *where_from, **rest: honest(*where_from, **rest | {name: value})
        )

    return plant


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (read_all_blocks, lambda: causal.test_nothing_but_a_requests_own_rows_is_read(BATCHED, LAYOUTS["runs"])),
    (read_all_blocks, lambda: block.test_nothing_but_a_requests_own_context_is_read(BATCHED, LAYOUTS["runs"])),
    (write_to_row_0, causal.test_padding_rows_leave_the_row_of_zeros_alone),
    (
        take_blocks_for_a_run,
        lambda: causal.test_rows_are_stored_and_see_what_came_before(
            CHOICES["per-request"], LAYOUTS["scattered"], [7, 3], 4
        ),
    ),
    (
        take_blocks_for_a_run,
        lambda: block.test_a_block_sees_its_context_and_itself(
            CHOICES["per-request"], LAYOUTS["scattered"], None, False
        ),
    ),
    (
        forget_of_paged("firsts_B"),
        lambda: causal.test_keys_below_the_context_start_are_never_read(PAGED, LAYOUTS["runs"]),
    ),
    (
        forget_of_paged("firsts_B"),
        lambda: block.test_context_below_its_start_is_never_read(PAGED, LAYOUTS["scattered"]),
    ),
    (
        forget_of_paged("window"),
        lambda: causal.test_a_window_counts_the_row_itself(PAGED, LAYOUTS["runs"], [7, 3], 4, 4),
    ),
    (
        forget_of_paged("is_causal", value=True),
        lambda: block.test_a_block_sees_its_context_and_itself(PAGED, LAYOUTS["runs"], 4, False),
    ),
    (
        forget_of_paged("sink_N"),
        lambda: block.test_a_sink_takes_weight_of_each_head(PAGED, LAYOUTS["runs"], None, False),
    ),
    (
        forget_of_paged("tail"),
        lambda: block.test_a_block_sees_its_context_and_itself(PAGED, LAYOUTS["runs"], None, True),
    ),
    *(
        (
            forget_where_context_starts,
            lambda choice=choice, test=test: test(choice, LAYOUTS["runs"]),
        )
        for choice in (CHOICES["per-request"], BATCHED)
        for test in (
            causal.test_keys_below_the_context_start_are_never_read,
            block.test_context_below_its_start_is_never_read,
        )
    ),
]


@pytest.mark.parametrize(
    ("plant", "test"), PLANTED, ids=[f"{plant.__name__}-{i}" for i, (plant, _) in enumerate(PLANTED)]
)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test()
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        test()
