"""Which block holds which position: the host's lists, the device's table, and physical rows from either."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches import CPU, scattered_tables

from paceline.engine.block_tables import BlockTables

NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE, MAX_BLOCKS = 3, 12, 4, 5

CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["assign", "append", "clear", "flush"]),
        st.integers(0, NUM_SLOTS),
        st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=MAX_BLOCKS),
    ),
    max_size=20,
)


def empty() -> BlockTables:
    return BlockTables(NUM_SLOTS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_blocks=MAX_BLOCKS, device=CPU)


def check(changes: Sequence[tuple[str, int, list[int]]]) -> None:
    """Compare everything that tables say with plain lists that went through the same."""
    tables, lists = empty(), [[] for _ in range(NUM_SLOTS + 1)]
    for kind, slot, blocks in changes:
        if kind == "flush":
            tables.flush()
        elif kind == "clear":
            tables.clear(slot)
            lists[slot] = []
        elif kind == "assign":
            tables.assign(slot, blocks)
            lists[slot] = list(blocks)
        else:
            more = blocks[: MAX_BLOCKS - len(lists[slot])]
            tables.append(slot, more)
            lists[slot] += more
    tables.flush()
    positions = torch.arange(MAX_BLOCKS * BLOCK_SIZE + 7)
    written = tables.rows_of(torch.arange(NUM_SLOTS + 1), positions.expand(NUM_SLOTS + 1, -1)).tolist()
    ends = [max(0, len(own) * BLOCK_SIZE - slot) for slot, own in enumerate(lists)]
    starts = [slot for slot in range(NUM_SLOTS + 1)]
    read = tables.readable_rows(
        torch.arange(NUM_SLOTS + 1), torch.tensor(ends), len(positions), torch.tensor(starts)
    ).tolist()
    for slot, own in enumerate(lists):
        rows = [block * BLOCK_SIZE + offset for block in own for offset in range(BLOCK_SIZE)]
        assert tables.blocks(slot) == own
        assert tables.capacity(slot) == len(rows)
        assert tables.table[slot].tolist() == own + [0] * (MAX_BLOCKS - len(own))
        assert tables.is_one_run(slot) == (rows == list(range(rows[0], rows[-1] + 1)) if rows else True)
        if rows and tables.is_one_run(slot):
            assert tables.first_row(slot) == rows[0]
        assert tables.rows(slot, 0, len(rows)).tolist() == rows
        assert tables.rows(slot, len(rows) // 2, len(rows) - len(rows) // 2).tolist() == rows[len(rows) // 2 :]
        assert written[slot][: len(rows)] == rows
        assert all(0 < row < BLOCK_SIZE for row in written[slot][len(rows) :])
        inside = [starts[slot] <= position < ends[slot] for position in positions.tolist()]
        assert read[slot] == [rows[p] if inside[p] else 0 for p in positions.tolist()]


@given(CHANGES)
@settings(max_examples=60, deadline=None)
def test_tables_say_what_plain_lists_say(changes: list[tuple[str, int, list[int]]]) -> None:
    check(changes)


WALK = [
    ("assign", 0, [3, 4]),
    ("append", 0, [5]),
    ("assign", 1, [9, 2, 7]),
    ("flush", 0, []),
    ("assign", 1, [6]),
    ("append", 0, [1]),
    ("clear", 2, []),
    ("assign", 3, [8]),
    ("flush", 0, []),
    ("clear", 3, []),
    ("append", 1, [7]),
    ("assign", 2, [10, 11]),
    ("assign", 2, [2]),
]


def lose_what_shrinks(patch: pytest.MonkeyPatch) -> None:
    """Entries beyond a shorter list stay on the device."""
    honest = BlockTables._set

    def keeping(self: BlockTables, slot: int, first: int, blocks: Sequence[int]) -> None:
        honest(self, slot, first, blocks)
        self._unflushed = {where: block for where, block in self._unflushed.items() if block != 0}

    patch.setattr(BlockTables, "_set", keeping)


def keep_old_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows that were asked for once are not made again after a change."""
    honest, made = BlockTables.rows, {}

    def first(self: BlockTables, slot: int, start: int, count: int) -> torch.Tensor:
        return made.setdefault((slot, start, count), honest(self, slot, start, count))

    made.update({(1, 0, 8): torch.arange(8)})
    patch.setattr(BlockTables, "rows", first)


def append_without_a_look(patch: pytest.MonkeyPatch) -> None:
    """Growth is taken for a run, as it mostly is."""
    honest = BlockTables.append

    def hopeful(self: BlockTables, slot: int, blocks: Sequence[int]) -> None:
        before = self._is_one_run[slot]
        honest(self, slot, blocks)
        self._is_one_run[slot] = before

    patch.setattr(BlockTables, "append", hopeful)


def first_change_wins(patch: pytest.MonkeyPatch) -> None:
    """Of two changes of an entry between two flushes the device sees the first."""
    honest = BlockTables._set

    def late(self: BlockTables, slot: int, first: int, blocks: Sequence[int]) -> None:
        before = dict(self._unflushed)
        honest(self, slot, first, blocks)
        self._unflushed |= before

    patch.setattr(BlockTables, "_set", late)


@pytest.mark.parametrize("plant", [lose_what_shrinks, keep_old_rows, append_without_a_look, first_change_wins])
def test_planted_faults_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    check(WALK)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(WALK)


def test_what_changed_goes_to_the_device_in_one_transfer_and_nothing_in_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables, made = empty(), []
    real = torch.tensor

    def counted(values, **options):
        made.append(len(values))
        return real(values, **options)

    monkeypatch.setattr("paceline.engine.block_tables.torch.tensor", counted)
    tables.flush()
    tables.assign(0, [3, 4])
    tables.assign(1, [5])
    tables.append(0, [6])
    tables.flush()
    tables.flush()
    assert made == [4]
    tables.append(1, [7])
    tables.flush()
    assert made == [4, 1], "what the device knows is not sent again"


def test_fixed_tables_give_every_slot_a_run_of_its_own_and_nobody_block_0() -> None:
    tables = BlockTables.fixed(3, capacity=50, device=CPU, block_size=16)
    assert tables.num_blocks == 1 + 3 * 4
    given_out = [block for slot in range(3) for block in tables.blocks(slot)]
    assert sorted(given_out) == list(range(1, 13))
    assert all(tables.is_one_run(slot) and tables.capacity(slot) == 64 for slot in range(3))
    assert tables.table.tolist() == [tables.blocks(slot) for slot in range(3)] + [[0] * 4]


def test_rows_of_several_slots_are_those_of_each() -> None:
    tables = scattered_tables(3, 16, block_size=4)
    found = tables.rows_of_slots([2, 0, 3], [5, 0, 9], 6)
    assert found[:2].tolist() == [tables.rows(2, 5, 6).tolist(), tables.rows(0, 0, 6).tolist()]
    assert all(0 < row < 4 for row in found[2].tolist()), "those of nobody"
    positions = torch.tensor([[5], [0]]) + torch.arange(6)
    assert torch.equal(found[:2], tables.rows_of(torch.tensor([2, 0]), positions))
    assert torch.equal(tables.rows_of_slots([2], [5], 6), found[:1])


def test_what_does_not_exist_is_refused() -> None:
    tables = scattered_tables(2, 16, block_size=4)
    for wrong, message in (
        (lambda: tables.append(0, [1]), "no further than the table"),
        (lambda: tables.assign(0, [9]), "a block of these planes"),
        (lambda: tables.rows(0, 14, 3), "have no rows"),
        (lambda: tables.first_row(0), "only a run"),
        (lambda: tables.first_row(2), "only a run"),
    ):
        with pytest.raises(AssertionError, match=message):
            wrong()
