"""Snapshots of recurrent state: where they are taken, what a hit starts from, and which row is given up."""

from __future__ import annotations

import random

import pytest

from paceline.engine.blocks import BlockPool, BlockState
from paceline.engine.prefix_chain import PrefixChain, PrefixIdentity
from paceline.engine.snapshots import SnapshotHit, SnapshotPool, boundaries_within, prompt_boundaries

BLOCK = 4
IDENTITY = PrefixIdentity("hybrid", "drafter")
TEXT = list(range(100, 124))


class Store:
    """A block pool and a snapshot pool with requests that come and go at once."""

    def __init__(self, num_blocks: int = 40, num_snapshots: int = 4) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.snapshots = SnapshotPool(num_snapshots, self.pool)

    def write(self, text: list[int], *boundaries: int) -> list[int]:
        """Leaves a text cached, with snapshots at some positions; its blocks."""
        chain, num_full = PrefixChain(IDENTITY, BLOCK), len(text) // BLOCK
        blocks = [cached.block for cached in self.pool.match(chain, text, most_tokens=len(text))]
        self.pool.take(blocks)
        num_hit = len(blocks)
        blocks += self.pool.allocate(num_full - num_hit) or []
        for index in range(num_hit, num_full):
            self.pool.publish(
                blocks[index],
                chain.digests(text, num_full)[index],
                blocks[index - 1] if index else None,
                text[index * BLOCK : (index + 1) * BLOCK],
                next_id=None,
                has_draft_context=True,
            )
        for boundary in boundaries:
            row = self.snapshots.allocate()
            assert row is not None
            self.snapshots.publish(row, blocks[boundary // BLOCK - 1])
        self.pool.free(blocks)
        return blocks

    def start(self, text: list[int]) -> SnapshotHit | None:
        hit = self.pool.match(PrefixChain(IDENTITY, BLOCK), text, most_tokens=len(text) - 1)
        return self.snapshots.match(hit)

    def length(self, text: list[int]) -> int:
        start = self.start(text)
        return 0 if start is None else start.num_blocks * BLOCK

    def reuse(self, text: list[int]) -> None:
        start = self.start(text)
        assert start is not None
        self.snapshots.take(start.row)
        self.snapshots.free(start.row)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(3, []), (4, [4]), (5, [4]), (8, [4, 8]), (11, [8]), (12, [8, 12]), (13, [12])]
)
def test_a_prompt_has_snapshots_that_serve_it_again_and_what_extends_it(num_tokens: int, expected: list[int]) -> None:
    assert prompt_boundaries(num_tokens, BLOCK) == expected


@pytest.mark.parametrize("num_tokens", range(5, 25))
def test_resent_and_extended_prompts_start_as_deep_as_they_can(num_tokens: int) -> None:
    store = Store()
    text = TEXT[:num_tokens]
    store.write(text, *prompt_boundaries(num_tokens, BLOCK))
    assert store.length(text) == (num_tokens - 1) // BLOCK * BLOCK
    assert store.length([*text, 1, 2]) == num_tokens // BLOCK * BLOCK


def test_passes_take_what_they_cross() -> None:
    where = {"num_prompt_tokens": 37, "block_size": 4, "spacing": 16}
    assert boundaries_within(0, 20, **where) == [16]
    assert boundaries_within(16, 37, **where) == [32, 36]
    assert boundaries_within(37, 47, **where) == []
    assert boundaries_within(47, 48, **where) == [48]
    assert boundaries_within(48, 80, **where) == [64, 80]
    with pytest.raises(AssertionError, match="multiple of the block size"):
        boundaries_within(0, 9, num_prompt_tokens=9, block_size=4, spacing=6)


def test_a_hit_ends_at_its_deepest_snapshot_and_falls_back_to_the_next() -> None:
    store = Store()
    blocks = store.write(TEXT, 8, 16)
    assert store.length(TEXT) == 16
    assert store.length([*TEXT[:14], 1, 2, 3]) == 8
    assert store.length([*TEXT[:7], 1, 2, 3]) == 0
    assert store.start(TEXT[:8]) is None  # the last token is run again, and nothing is kept before it
    store.pool.forget(blocks[3])
    assert store.length(TEXT) == 8
    assert store.snapshots.num_free == 4
    assert store.snapshots.num_cached == 1


def test_a_snapshot_evicted_leaves_the_one_before_it() -> None:
    store = Store(num_snapshots=2)
    store.write(TEXT, 16, 8)
    store.reuse(TEXT[:9])
    store.write([1, 2, 3, 4], 4)
    assert store.length(TEXT) == 8
    assert store.snapshots.num_evictions == 1


def test_of_equal_use_the_oldest_goes_and_reuse_counts_for_a_while() -> None:
    store = Store(num_snapshots=3)
    names = [[name] * BLOCK for name in range(20)]
    for name in names[:3]:
        store.write(name, BLOCK)
    store.reuse([*names[0], 99])
    store.reuse([*names[0], 99])
    kept = []
    for name in names[3:]:
        store.write(name, BLOCK)
        kept.append([at for at, other in enumerate(names) if store.length([*other, 99])])
    assert kept[:2] == [[0, 2, 3], [0, 3, 4]]  # the first of those used once went first
    ages = [at for at, rows in enumerate(kept) if 0 in rows]
    assert 3 <= len(ages) < len(kept)  # two uses outlast newer rows, and not for ever


def test_blocks_behind_the_deepest_snapshot_go_first() -> None:
    store = Store(num_blocks=13)
    old = store.write(TEXT[:16], 8)
    new = store.write([9] * 24)
    order = [block for _ in range(12) for block in store.pool.allocate(1) or []]
    assert set(order[:2]) == {block for block in range(1, 13) if block not in [*old, *new]}
    assert order[2:] == [*reversed(old[2:]), *reversed(new), *reversed(old[:2])]
    assert store.snapshots.num_cached == 0
    assert store.snapshots.num_free == 4


def test_blocks_of_a_lost_snapshot_lose_their_place() -> None:
    store = Store(num_blocks=13, num_snapshots=1)
    first = store.write(TEXT[:8], 8)
    second = store.write([9] * 8, 8)
    assert store.length([*TEXT[:8], 1]) == 0
    third = store.write([9] * 12)[2]
    order = [block for _ in range(12) for block in store.pool.allocate(1) or []]
    assert order[-5:] == [*reversed(first), third, *reversed(second)]


def test_rows_in_use_are_nobody_elses() -> None:
    store = Store(num_snapshots=2)
    own = store.snapshots.allocate()
    assert own is not None
    store.write(TEXT[:8], 8)
    start = store.start(TEXT[:9])
    assert start is not None
    store.snapshots.take(start.row)
    assert store.snapshots.num_free == 0
    assert store.snapshots.allocate() is None
    store.snapshots.free(start.row, fence=5)
    assert store.snapshots.allocate() is None
    store.snapshots.retire(4)
    assert store.snapshots.allocate() is None
    store.snapshots.retire(5)
    assert store.snapshots.allocate() == start.row
    assert store.length(TEXT[:9]) == 0


def test_a_row_whose_text_goes_while_it_is_read_is_free_afterwards() -> None:
    store = Store(num_snapshots=1)
    blocks = store.write(TEXT[:8], 8)
    start = store.start(TEXT[:9])
    assert start is not None
    store.snapshots.take(start.row)
    store.pool.forget(blocks[0])
    assert store.start(TEXT[:9]) is None
    assert store.snapshots.allocate() is None
    store.snapshots.free(start.row, fence=3)
    store.snapshots.retire(3)
    assert store.snapshots.allocate() == start.row


def test_a_row_that_waited_twice_is_free_once() -> None:
    store = Store(num_snapshots=2)
    blocks = store.write(TEXT[:8], 8)
    start = store.start(TEXT[:9])
    assert start is not None
    for _ in range(2):
        store.snapshots.take(start.row)
        store.snapshots.free(start.row, fence=5)
    store.pool.forget(blocks[0])
    store.snapshots.retire(5)
    assert [store.snapshots.allocate() for _ in range(3)].count(None) == 1


def test_a_snapshot_published_late_leaves_its_block_within_reach() -> None:
    store = Store(num_blocks=9)
    blocks = store.write(TEXT[:16])
    row = store.snapshots.allocate()
    assert row is not None
    assert store.snapshots.publish(row, blocks[3])  # the request has ended, and its blocks are idle
    taken = store.pool.allocate(8)
    assert taken is not None
    assert len(taken) == 8


def test_only_states_behind_published_text_are_kept_and_the_first_wins() -> None:
    store = Store(num_snapshots=3)
    unpublished = store.pool.allocate(1)
    assert unpublished is not None
    row = store.snapshots.allocate()
    assert row is not None
    assert not store.snapshots.publish(row, unpublished[0])
    assert store.snapshots.num_free == 3
    blocks = store.write(TEXT[:8], 8)
    first = store.start(TEXT[:9])
    again = store.snapshots.allocate()
    assert again is not None
    assert not store.snapshots.publish(again, blocks[1], fence=2)
    assert store.start(TEXT[:9]) == first
    assert store.snapshots.num_free == 2
    store.snapshots.retire(2)
    assert store.snapshots.num_free == 3


def test_misuse_is_an_error_of_ours() -> None:
    store = Store()
    row = store.snapshots.allocate()
    assert row is not None
    with pytest.raises(AssertionError, match="holds no snapshot"):
        store.snapshots.take(row)
    store.snapshots.free(row)
    with pytest.raises(AssertionError, match="more often"):
        store.snapshots.free(row)
    with pytest.raises(AssertionError, match="nobody's to publish"):
        store.snapshots.publish(row, 1)


@pytest.mark.parametrize("seed", range(10))
def test_random_use_loses_no_row_and_starts_nobody_elsewhere(seed: int) -> None:
    draw = random.Random(seed)
    store = Store(num_blocks=12, num_snapshots=4)
    pool, snapshots = store.pool, store.snapshots
    own: list[int] = []
    taken: list[tuple[int, int]] = []  # row, fence
    states: dict[int, list[int]] = {}  # row -> the text that its state stands behind
    step, num_free = 0, 4
    for _ in range(600):
        text = [*[draw.randrange(2)] * BLOCK, *[draw.randrange(2)] * BLOCK, *[draw.randrange(2)] * BLOCK]
        action = draw.randrange(6)
        if action == 0 and pool.num_free >= 3:
            boundary = draw.choice([4, 8, 12])
            row = snapshots.allocate()
            if row is not None:
                blocks = store.write(text)
                if snapshots.publish(row, blocks[boundary // BLOCK - 1], fence=draw.choice([0, step])):
                    states[row] = text[:boundary]
        elif action == 1:
            row = snapshots.allocate()
            assert (row is None) == (num_free == 0)
            own += [] if row is None else [row]
        elif action == 2 and own:
            snapshots.free(own.pop(draw.randrange(len(own))), fence=draw.choice([0, step]))
        elif action == 3:
            start = store.start([*text, 9])
            if start is not None:
                assert states[start.row] == text[: start.num_blocks * BLOCK]
                snapshots.take(start.row)
                taken.append((start.row, step))
        elif action == 4 and taken:
            row, fence = taken.pop(draw.randrange(len(taken)))
            snapshots.free(row, fence=fence)
        else:
            step += 1
            snapshots.retire(step - draw.randrange(2))
            pool.allocate(draw.randrange(3))
            used = [block for block in range(1, 12) if pool.state(block) == BlockState.USED]
            pool.free(used)
        num_free = snapshots.num_free
        assert not {row for row, _ in taken} & set(own)
        assert not (set(snapshots._free) & (set(own) | {row for row, _ in taken}))
        assert len(set(snapshots._free)) == len(snapshots._free)
        assert snapshots.num_cached == sum(text.snapshot is not None for text in pool.index)
        assert len(snapshots._evictable) <= 10
    for row in own:
        snapshots.free(row)
    for row, fence in taken:
        snapshots.free(row, fence=fence)
    snapshots.retire(step + 1)
    assert snapshots.num_free == 4


def test_after_an_interruption_nobody_holds_a_row_and_none_is_lost() -> None:
    store = Store(num_snapshots=5)
    store.write(TEXT, 8, 16)
    snapshots = store.snapshots
    hit = store.start(TEXT)
    assert hit is not None
    snapshots.take(hit.row)
    own = [snapshots.allocate() for _ in range(2)]
    snapshots.free(own[0] if own[0] is not None else -1, fence=7)  # a step that was launched may still write to it
    assert snapshots.num_used == 2 and len(snapshots.free_rows()) == 1
    snapshots.reclaim(fence=7)
    assert snapshots.num_used == 0
    assert store.length(TEXT) == 16 and set(snapshots.published_rows()) == {0, 1}
    assert len(snapshots.free_rows()) == 0  # until that step is done
    store.pool.retire(7)
    assert snapshots.allocate() is not None
    assert len(snapshots.free_rows()) == 2 and snapshots.num_cached == 2
