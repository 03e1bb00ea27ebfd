"""The block pool: what is hit, what is given up, when a block may be had again, and who may publish."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from paceline.engine import prefix_chain
from paceline.engine.blocks import BlockPool, BlockState, CachedBlock
from paceline.engine.prefix_chain import PrefixChain, PrefixIdentity
from paceline.engine.prefix_index import CachedText

BLOCK = 4
DFLASH = PrefixIdentity("target", "dflash")
EAGLE = PrefixIdentity("target", "eagle", reads_ahead=True)
TEXT = list(range(100, 140))


class Writer:
    """A request as the pool sees one: it holds blocks for its text and publishes the full ones."""

    def __init__(self, pool: BlockPool, text: list[int], identity: PrefixIdentity = DFLASH, **options: Any) -> None:
        self.pool, self.text = pool, text
        self.chain = PrefixChain(identity, BLOCK)
        self.hit = pool.match(self.chain, text, most_tokens=len(text) - 1)
        self.blocks = [cached.block for cached in self.hit]
        pool.take(self.blocks)
        self.blocks += pool.allocate(-(-len(text) // BLOCK) - len(self.hit), **options) or []

    @property
    def num_hit(self) -> int:
        return len(self.hit) * BLOCK

    def publish(self, *, first: int | None = None, has_draft_context: bool = True) -> list[bool]:
        num_full = self.chain.num_blocks(len(self.text))
        digests = self.chain.digests(self.text, num_full)
        return [
            self.pool.publish(
                self.blocks[index],
                digests[index],
                self.blocks[index - 1] if index else None,
                self.text[index * BLOCK : (index + 1) * BLOCK],
                next_id=self.chain.next_id(self.text, index),
                has_draft_context=has_draft_context,
            )
            for index in range(len(self.hit) if first is None else first, num_full)
        ]

    def finish(self, fence: int = 0) -> None:
        self.pool.free(self.blocks, fence=fence)


def cached(pool: BlockPool, text: list[int], identity: PrefixIdentity = DFLASH, **options: Any) -> list[int]:
    """Leaves a text in the cache; the blocks of it."""
    writer = Writer(pool, text, identity)
    writer.publish(**options)
    writer.finish()
    return writer.blocks


def hit_blocks(pool: BlockPool, text: list[int], identity: PrefixIdentity = DFLASH) -> list[int]:
    return [hit.block for hit in pool.match(PrefixChain(identity, BLOCK), text, most_tokens=len(text))]


@pytest.mark.parametrize("num_cached", [BLOCK * 3 - 1, BLOCK * 3, BLOCK * 3 + 1])
@pytest.mark.parametrize("identity", [DFLASH, EAGLE], ids=["dflash", "eagle"])
def test_hit_lengths_are_exact(num_cached: int, identity: PrefixIdentity) -> None:
    pool = BlockPool(32, BLOCK)
    first = TEXT[:num_cached]
    cached(pool, first, identity)
    ahead = identity.reads_ahead  # a block then counts once the token behind it is known
    num_published = (num_cached - ahead) // BLOCK * BLOCK

    resent = Writer(pool, first, identity)  # its last token is run again, for its logits
    assert resent.num_hit == min(num_published, (num_cached - 1) // BLOCK * BLOCK)
    resent.finish()
    extended = Writer(pool, [*first, 7, 8, 9], identity)
    assert extended.num_hit == num_published
    extended.finish()
    for changed in range(num_cached):
        diverging = [*TEXT[:changed], 5, *TEXT[changed + 1 : num_cached], 7, 8, 9]
        other = Writer(pool, diverging, identity)
        assert other.num_hit == max(min(num_published, (changed - ahead) // BLOCK * BLOCK), 0)
        other.finish()
    shorter = Writer(pool, TEXT[: BLOCK + 1], identity)
    assert shorter.num_hit == BLOCK


def test_a_hit_stays_within_the_tokens_asked_for() -> None:
    pool = BlockPool(32, BLOCK)
    cached(pool, TEXT)
    chain = PrefixChain(DFLASH, BLOCK)
    for most in range(len(TEXT) + 1):
        assert len(pool.match(chain, TEXT, most_tokens=most)) == most // BLOCK


def test_blocks_of_another_identity_are_not_hit() -> None:
    pool = BlockPool(64, BLOCK)
    cached(pool, TEXT[:13])
    for other in (
        replace(DFLASH, drafter="another"),
        replace(DFLASH, drafter=None),
        replace(DFLASH, target="another"),
        replace(DFLASH, adapter="a"),
        replace(DFLASH, salt="a"),
        replace(DFLASH, reads_ahead=True),
    ):
        assert Writer(pool, TEXT[:13], other).num_hit == 0
    assert Writer(pool, TEXT[:13]).num_hit == 12


def test_draft_keys_that_depend_on_the_next_token_are_not_hit_before_another_one() -> None:
    pool = BlockPool(32, BLOCK)
    cached(pool, TEXT[:9], EAGLE)
    assert Writer(pool, [*TEXT[:8], 5, 6], EAGLE).num_hit == 4
    assert Writer(pool, [*TEXT[:8], TEXT[8], 6], EAGLE).num_hit == 8


def test_a_planted_collision_is_seen_by_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_chain, "digest_block", lambda parent, content: b"same")
    pool = BlockPool(32, BLOCK)
    first = cached(pool, TEXT[:4])
    assert hit_blocks(pool, TEXT[:4]) == first
    assert hit_blocks(pool, TEXT[4:8]) == []
    other = Writer(pool, TEXT[4:12])
    assert other.publish() == [False, False]
    assert not pool.is_hashed(other.blocks[0])
    monkeypatch.setattr(CachedText, "equals", lambda *_: True)  # digests alone
    assert hit_blocks(pool, TEXT[4:8]) == first


def test_a_text_behind_a_collision_is_not_taken_for_one_behind_its_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts with one digest, and the same tokens behind both: the second digests agree by construction."""
    honest = prefix_chain.digest_block

    def confusing(parent: bytes, content: bytes) -> bytes:
        first = prefix_chain.pack_tokens([1, 2, 3, 4]), prefix_chain.pack_tokens([9, 9, 9, 9])
        return b"same" if content in first else honest(parent, content)

    monkeypatch.setattr(prefix_chain, "digest_block", confusing)
    pool = BlockPool(32, BLOCK)
    cached(pool, [1, 2, 3, 4])
    cached(pool, [9, 9, 9, 9, 5, 6, 7, 8])
    assert len(hit_blocks(pool, [1, 2, 3, 4, 5, 6, 7, 8])) == 1


def test_children_go_before_their_parents_and_the_oldest_first() -> None:
    pool = BlockPool(9, BLOCK)
    old, new = cached(pool, TEXT[:16]), cached(pool, TEXT[16:32])
    for expected in [*reversed(old), *reversed(new)]:
        assert pool.allocate(1) == [expected]
    assert pool.num_evictions == 8
    assert pool.allocate(1) is None


def test_a_hit_is_a_use_and_one_put_back_is_none() -> None:
    pool = BlockPool(9, BLOCK)
    old, new = cached(pool, TEXT[:16]), cached(pool, TEXT[16:32])
    pool.take(old)
    pool.put_back(old)
    assert pool.allocate(1) == [old[-1]]
    pool.free([old[-1]])
    Writer(pool, TEXT[:13]).finish()
    pool.allocate(1)  # the free one
    assert pool.allocate(1) == [new[-1]]


def test_used_blocks_are_never_given_up() -> None:
    pool = BlockPool(9, BLOCK)
    cached(pool, TEXT[:16])
    writer = Writer(pool, TEXT[:16])
    taken = pool.allocate(pool.num_free)
    assert taken is not None and not set(taken) & set(writer.blocks)
    assert pool.allocate(1) is None
    assert hit_blocks(pool, TEXT[:12]) == writer.blocks[:3]


def test_nothing_is_given_where_too_little_is_free() -> None:
    pool = BlockPool(9, BLOCK)
    cached(pool, TEXT[:16])
    assert pool.allocate(9) is None
    assert pool.allocate(0) == []
    assert (pool.num_free, pool.num_cached, pool.num_evictions) == (8, 4, 0)


def test_blocks_come_back_behind_their_fence() -> None:
    pool = BlockPool(5, BLOCK)
    writer = Writer(pool, TEXT[:6])
    writer.publish()
    writer.finish(fence=7)
    assert (pool.num_free, pool.num_fenced, pool.num_used) == (2, 2, 0)
    assert hit_blocks(pool, TEXT[:4]) == writer.blocks[:1]  # its numbers are final: a hit need not wait
    pool.retire(6)
    assert pool.num_fenced == 2
    assert pool.allocate(3) is None
    pool.take(writer.blocks[:1])
    pool.retire(7)
    assert (pool.num_free, pool.num_fenced, pool.num_used) == (3, 0, 1)
    pool.free(writer.blocks[:1], fence=3)
    assert (pool.num_free, pool.num_fenced) == (4, 0)


def test_an_early_second_free_does_not_shorten_a_fence() -> None:
    pool = BlockPool(5, BLOCK)
    writer = Writer(pool, TEXT[:4])
    writer.publish()
    writer.finish(fence=7)
    pool.take(writer.blocks)
    pool.free(writer.blocks, fence=2)
    pool.retire(5)
    assert pool.state(writer.blocks[0]) == BlockState.FENCED


def test_a_second_block_with_draft_context_replaces_one_without() -> None:
    pool = BlockPool(16, BLOCK)
    plain, drafted, late = (Writer(pool, TEXT[:4]) for _ in range(3))
    assert plain.publish(has_draft_context=False) == [True]
    assert drafted.publish() == [True]
    assert late.publish() == [False]
    chain = PrefixChain(DFLASH, BLOCK)
    assert pool.match(chain, TEXT, most_tokens=4) == [CachedBlock(drafted.blocks[0], True)]
    for writer in (plain, late, drafted):
        writer.finish()
    assert (pool.num_free, pool.num_cached) == (15, 1)
    assert pool.match(chain, TEXT, most_tokens=4) == [CachedBlock(drafted.blocks[0], True)]


def test_an_unused_block_that_is_replaced_is_free() -> None:
    pool = BlockPool(16, BLOCK)
    plain, drafted = Writer(pool, TEXT[:4]), Writer(pool, TEXT[:4])
    plain.publish(has_draft_context=False)
    plain.finish()
    assert pool.state(plain.blocks[0]) == BlockState.IDLE
    drafted.publish()
    assert pool.state(plain.blocks[0]) == BlockState.FREE


def test_a_copy_stands_in_for_a_block_that_leaves() -> None:
    pool = BlockPool(6, BLOCK)
    first, second = Writer(pool, TEXT[:4]), Writer(pool, TEXT[:6])
    first.publish()
    second.publish()
    second.text = TEXT[:8]
    assert second.publish(first=1) == [True]  # behind its own copy
    first.finish()
    assert pool.state(first.blocks[0]) == BlockState.FREE
    assert hit_blocks(pool, TEXT[:8]) == second.blocks
    assert pool.allocate(pool.num_free) is not None  # every idle block can be had while others hold its text
    assert hit_blocks(pool, TEXT[:8]) == second.blocks


def test_a_request_that_moves_takes_its_text_along() -> None:
    pool = BlockPool(12, BLOCK)
    cached(pool, TEXT[:8])
    writer = Writer(pool, TEXT[:12])
    writer.publish()
    old, moved = writer.blocks, pool.allocate_run(3)
    assert moved is not None
    writer.blocks = moved
    writer.publish(first=0)
    pool.free(old)
    assert hit_blocks(pool, TEXT[:12]) == moved
    assert pool.num_free == 8
    assert pool.num_cached == 3


def test_bad_numbers_are_forgotten_with_all_behind_them() -> None:
    pool = BlockPool(32, BLOCK)
    writer, other = Writer(pool, TEXT[:16]), Writer(pool, [*TEXT[:4], 1, 2, 3, 4])
    writer.publish()
    other.publish()
    pool.forget(writer.blocks[1])
    assert hit_blocks(pool, TEXT[:16]) == writer.blocks[:1]
    assert hit_blocks(pool, [*TEXT[:4], 1, 2, 3, 4]) == [writer.blocks[0], other.blocks[1]]
    assert [pool.is_hashed(block) for block in writer.blocks] == [True, False, False, False]
    pool.forget(writer.blocks[1])
    writer.text = TEXT[:20]
    writer.blocks += pool.allocate(1) or []
    assert writer.publish(first=4) == [False]  # nothing reaches it
    writer.finish()
    again = Writer(pool, TEXT[:16])
    assert again.num_hit == 4
    assert again.publish() == [True, True, True]


def test_clearing_drops_what_nobody_uses() -> None:
    pool = BlockPool(32, BLOCK)
    cached(pool, TEXT[:16])
    cached(pool, TEXT[20:32])
    writer = Writer(pool, TEXT[:8])
    assert pool.clear_cache() == 6
    assert hit_blocks(pool, TEXT[:16]) == writer.blocks[:1]
    assert (pool.num_free, pool.num_cached, pool.num_evictions) == (29, 1, 0)
    assert pool.clear_cache() == 0


def test_a_pool_without_a_prefix_cache_finds_and_keeps_nothing() -> None:
    pool = BlockPool(8, BLOCK, prefix_cache=False)
    writer = Writer(pool, TEXT[:8])
    assert writer.publish() == [False, False]
    writer.finish()
    assert hit_blocks(pool, TEXT[:8]) == []
    assert (pool.num_free, pool.num_cached) == (7, 0)


def test_requests_get_one_run_and_grow_in_it() -> None:
    pool = BlockPool(40, BLOCK)
    first, second = pool.allocate(2, room=8), pool.allocate(2, room=8)
    assert first is not None and second is not None
    for _ in range(6):
        first += pool.allocate(1, behind=first[-1]) or []
        second += pool.allocate(1, behind=second[-1]) or []
    assert first == list(range(first[0], first[0] + 8))
    assert second == list(range(second[0], second[0] + 8))
    assert pool.allocate(1, behind=first[-1]) != [second[0]]


def test_a_hit_goes_on_behind_itself_where_that_is_free() -> None:
    pool = BlockPool(40, BLOCK)
    blocks = cached(pool, TEXT[:15])
    writer = Writer(pool, TEXT[:14], behind=blocks[2], room=6)
    assert writer.blocks == list(range(blocks[0], blocks[0] + 4))


def test_a_run_of_the_coldest_blocks_is_made_where_none_is_free() -> None:
    pool = BlockPool(13, BLOCK)
    cold = cached(pool, TEXT[:16])
    between = cached(pool, TEXT[16:32])
    warm = cached(pool, [1, *TEXT[:15]])
    pool.take(cold[:3])
    pool.free(cold[:3])
    assert pool.allocate_run(13) is None
    assert pool.num_cached == 12
    assert pool.allocate_run(2, room=4) == between[:2]
    assert pool.allocate_run(2, behind=between[1]) == between[2:], "texts behind those that were evicted"
    assert (pool.num_free, pool.num_cached) == (8, 8)
    assert pool.allocate_run(3, room=99) == warm[:3]
    assert pool.allocate_run(1, behind=cold[0]) is None
    assert hit_blocks(pool, TEXT[:16]) == cold
    assert hit_blocks(pool, [1, *TEXT[:15]]) == []


def test_a_run_takes_what_it_needs_and_the_rest_when_it_gets_there() -> None:
    """Room for growth costs no cached text before it is grown into."""
    pool = BlockPool(9, BLOCK)
    texts = [[mark, *TEXT[1:BLOCK]] for mark in range(100, 108)]
    blocks = [cached(pool, text)[0] for text in texts]
    assert sorted(blocks) == list(range(1, 9))
    text_of = dict(zip(blocks, texts, strict=True))
    run = pool.allocate_run(2, room=6)
    assert run is not None and (pool.num_cached, pool.num_evictions) == (6, 2)
    others = pool.allocate_run(1, room=1)
    assert others is not None and others[0] not in range(run[0], run[0] + 6), "not in the way of the first"
    for count in (1, 2):
        way = list(range(run[-1] + 1, run[-1] + 1 + count))
        assert all(hit_blocks(pool, text_of[block]) == [block] for block in way)
        assert pool.allocate(count, behind=run[-1]) == way
        run += way
    assert (pool.num_cached, pool.num_evictions) == (2, 6)


def test_a_hit_in_the_room_of_another_request_is_not_evicted() -> None:
    pool = BlockPool(9, BLOCK)
    blocks = [cached(pool, [mark, *TEXT[1:BLOCK]])[0] for mark in range(100, 108)]
    run = pool.allocate_run(2, room=6)
    assert run is not None
    pool.take([run[-1] + 2])
    grown = pool.allocate(2, behind=run[-1], room=4)
    assert grown is not None and run[-1] + 2 not in grown
    assert pool.references(run[-1] + 2) == 1 and set(grown) <= set(blocks)


def test_a_run_is_made_where_there_is_room_to_grow() -> None:
    pool = BlockPool(9, BLOCK)
    pair, wall, four = cached(pool, TEXT[:8]), pool.allocate(1), cached(pool, TEXT[8:24])
    assert (pair, wall, four) == ([7, 8], [6], [2, 3, 4, 5])
    assert pool.allocate(1) == [1]
    assert pool.allocate_run(2, room=4) == [2, 3]
    assert pool.allocate_run(2, room=4) == [4, 5]
    assert hit_blocks(pool, TEXT[:8]) == pair


def test_requests_that_left_or_grew_elsewhere_claim_nothing() -> None:
    pool = BlockPool(20, BLOCK)
    first = pool.allocate(2, room=10)
    assert first == [1, 2]
    pool.free(first)
    second, third = pool.allocate(2, room=2), pool.allocate(2, room=2)
    assert (second, third) == ([1, 2], [3, 4])

    pool = BlockPool(11, BLOCK)
    first, others = pool.allocate(2, room=10), pool.allocate(8)
    assert (first, others) == ([1, 2], list(range(3, 11)))
    pool.free(others[1:])
    assert pool.allocate(1, behind=2) == [10]
    pool.free(others[:1])
    assert pool.allocate(3, room=3) == [3, 4, 5]


def test_misuse_is_an_error_of_ours() -> None:
    pool = BlockPool(8, BLOCK)
    writer = Writer(pool, TEXT[:8])
    with pytest.raises(AssertionError, match="nothing to take"):
        pool.take([1])
    writer.publish()
    with pytest.raises(AssertionError, match="published before"):
        writer.publish()
    other = Writer(pool, [1, 2, 3, 4])
    pool.take(other.blocks)
    with pytest.raises(AssertionError, match="2 owners"):
        other.publish()
    pool.free(other.blocks)
    pool.free(other.blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.free(other.blocks)
    with pytest.raises(AssertionError, match="block 0"):
        BlockPool(1, BLOCK)


def test_an_admission_counts_its_own_query() -> None:
    pool = BlockPool(8, BLOCK)
    pool.record_query(num_queried_tokens=12, num_hit_tokens=8)
    pool.record_query(num_queried_tokens=5, num_hit_tokens=0)
    assert (pool.num_queried_tokens, pool.num_hit_tokens) == (17, 8)


@pytest.mark.parametrize("repeats", [500])
def test_events_that_were_overtaken_do_not_pile_up(repeats: int) -> None:
    pool = BlockPool(16, BLOCK)
    cached(pool, TEXT[:16])
    for _ in range(repeats):
        Writer(pool, TEXT[:17]).finish()
    assert len(pool._evictable) <= 2 * 16 + 1


def lines_per_request(num_blocks: int) -> float:
    """Lines of the engine that one short request costs in a pool full of cached text, admission's search left out."""
    pool = BlockPool(num_blocks, BLOCK)
    texts = iter(range(10**6))
    while pool.num_evictions < 8:
        cached(pool, [next(texts)] * 8)
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if "engine" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(100):
            cached(pool, [next(texts)] * 8)
    finally:
        sys.settrace(before)
    return count / 100


def test_a_requests_cost_does_not_grow_with_the_pool() -> None:
    small, large = lines_per_request(100), lines_per_request(3000)
    assert small > 100
    assert large < 1.1 * small


def any_token_behind(self: CachedText, parent: CachedText | None, content: bytes, next_id: int | None) -> bool:
    return self.parent is parent and self.content == content


def test_a_pool_that_ignores_the_token_behind_a_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest has that token in it, so this takes a collision of just these two."""
    honest = prefix_chain.digest_block
    monkeypatch.setattr(prefix_chain, "digest_block", lambda parent, content: honest(parent, content[: BLOCK * 8]))
    pool = BlockPool(16, BLOCK)
    cached(pool, TEXT[:5], EAGLE)
    other = [*TEXT[:4], 5]
    assert hit_blocks(pool, other, EAGLE) == []
    monkeypatch.setattr(CachedText, "equals", any_token_behind)
    assert hit_blocks(pool, other, EAGLE) != []
