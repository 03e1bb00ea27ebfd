"""The block pool: who holds which block, what is given up for whom, and when a block may be written again.

Host only, no torch. One block id indexes the target's keys and the drafter's context keys alike: a hit restores both.
Block 0 takes the writes of padding rows; the pool never gives it to anybody.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from enum import IntEnum

from paceline.engine.free_runs import FreeRuns, coldest_window
from paceline.engine.prefix_chain import PrefixChain
from paceline.engine.prefix_index import CachedBlock, CachedText, PrefixIndex

__all__ = ["BlockPool", "BlockState", "CachedBlock"]


class BlockState(IntEnum):
    """Where a block is in its life.

    Attributes:
        FREE: it holds nothing.
        IDLE: nobody refers to it, and the index holds its text: a hit, or room for another text.
        FENCED: nobody refers to it, but a step launched while somebody did has not finished. It may be hit, not given.
        USED: some request refers to it.
        LEAVING: none of these, within one call.
    """

    FREE, IDLE, FENCED, USED, LEAVING = range(5)


class BlockPool:
    """Reference counts, fences and the eviction order of the blocks 1 to `num_blocks` - 1.

    A request refers to all blocks of its text, from the first on, and frees them in one call; one whose keys were
    copied elsewhere publishes the new blocks before it frees the old. So no used text lies behind an idle one, and
    every idle block can be evicted.

    Attributes:
        index: the published texts; to read.
        runs: the free blocks; to read.
        on_snapshot_lost: told of every text that leaves the index with a snapshot.
        num_hit_tokens: tokens of admitted requests that were found cached.
        num_queried_tokens: tokens of admitted requests that were looked for.
        num_evictions: texts that were given up for room.

    Args:
        num_blocks: blocks of every cache, block 0 included.
        block_size: positions per block.
        prefix_cache: False publishes and finds nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        assert num_blocks >= 2 and block_size >= 1, "a pool needs block 0 and one to give away"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.index = PrefixIndex(num_blocks, block_size)
        self.runs = FreeRuns(1, num_blocks)
        self.num_hit_tokens = self.num_queried_tokens = self.num_evictions = 0
        self.on_snapshot_lost: Callable[[CachedText], None] | None = None
        self._references = [0] * num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._counts = [0] * len(BlockState)
        self._counts[BlockState.FREE] = num_blocks - 1
        self._fences = [0] * num_blocks
        self._last_used = [0] * num_blocks
        # Both heaps keep entries that events have overtaken; these are recognised and dropped when they surface.
        self._evictable: list[tuple[bool, int, int]] = []  # (has a snapshot, last used, block)
        self._waiting: list[tuple[int, int]] = []  # (fence, block)
        self._clock = 0
        self._retired = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: free ones, and idle ones by eviction."""
        return self._counts[BlockState.FREE] + self._counts[BlockState.IDLE]

    @property
    def num_used(self) -> int:
        """Blocks that some request refers to."""
        return self._counts[BlockState.USED]

    @property
    def num_fenced(self) -> int:
        """Blocks that nobody refers to and that wait for a step to finish."""
        return self._counts[BlockState.FENCED]

    @property
    def num_cached(self) -> int:
        """Texts that a later request can hit, those of used blocks included."""
        return len(self.index)

    @property
    def retired(self) -> int:
        """The last step that is known to have finished."""
        return self._retired

    def state(self, block: int) -> BlockState:
        """Where a block is in its life."""
        return self._states[block]

    def references(self, block: int) -> int:
        """How many requests refer to a block."""
        return self._references[block]

    def is_hashed(self, block: int) -> bool:
        """Whether a block's text was published, so that nobody may write to it."""
        return self.index.text(block) is not None

    def match(self, chain: PrefixChain, token_ids: Sequence[int], *, most_tokens: int) -> list[CachedBlock]:
        """The longest cached prefix of a text, in whole blocks.

        It changes nothing: `take` what is to be kept, before anything is allocated.

        Args:
            chain: of the text.
            token_ids: the text.
            most_tokens: the hit covers no more than these.
        """
        return self.index.match(chain, token_ids, most_tokens=most_tokens)

    def record_query(self, *, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Count one admission's look-up; `match` does not, since a waiting request may ask many times."""
        self.num_queried_tokens += num_queried_tokens
        self.num_hit_tokens += num_hit_tokens

    def take(self, blocks: Sequence[int]) -> None:
        """Refer to blocks of a hit once more."""
        for block in blocks:
            assert self._references[block] or self.is_hashed(block), f"block {block} holds nothing to take"
        for block in blocks:
            if not self._references[block]:
                self._enter(block, BlockState.USED)
            self._references[block] += 1

    def allocate(self, count: int, *, behind: int | None = None, room: int | None = None) -> list[int] | None:
        """Blocks of one's own, ascending; None, and none given, if not that many can be had.

        Looks behind `behind` first, where idle blocks that it claims are evicted, then for a free run, and evicts only
        what free blocks do not cover: least recently used first, and no text before those behind it.

        Args:
            count: how many.
            behind: the last block that the request has.
            room: how many the request may need in all from here on; others stay out of them while they can.
        """
        if count > self.num_free:
            return None
        if count == 0:
            return []
        taken = None
        if behind is not None:
            self._clear_behind(behind, count)
            taken = self.runs.take_behind(behind, count, room=room)
            if taken is None:
                self.runs.unclaim(behind)
        if taken is None:
            while len(self.runs) < count:
                if not self._evict_one():
                    return None
            if room is not None:
                taken = self.runs.take_run(count, room=max(room, count))
            if taken is None:
                taken = self.runs.take_any(count)
        self._own(taken)
        return taken

    def allocate_run(self, count: int, *, behind: int | None = None, room: int | None = None) -> list[int] | None:
        """`count` neighbours, ascending; None, and none given or evicted, if there are no such blocks.

        The tightest run of free blocks comes first. Where none is long enough, idle blocks are evicted, with the texts
        behind theirs: the first `count` of the neighbours whose latest use is longest ago, of `room` neighbours if so
        many can be had. The others of them are claimed, and stay to be found until the request gets there. Looks at
        every block.

        Args:
            count: how many.
            behind: no blocks but the free ones right behind this one will do.
            room: how many the request may need in all from here on.
        """
        if not 0 < count <= self.num_free:
            return None
        room = max(room or 0, count)
        if behind is not None:
            taken = self.runs.take_behind(behind, count, room=room)
        else:
            taken = self.runs.take_run(count, room=room) or self._evict_window(count, room)
        self._own(taken or ())
        return taken

    def free(self, blocks: Sequence[int], *, fence: int = 0) -> None:
        """Refer to blocks once less. Those that nobody refers to any more become idle or free, behind the fence.

        Args:
            blocks: a request's.
            fence: the last step launched while the request referred to them; steps count from 1, 0 is none.
        """
        self._clock += 1
        for block in blocks:
            self._last_used[block] = self._clock
            self._release(block, fence)

    def put_back(self, blocks: Sequence[int]) -> None:
        """Undo a `take` that came to nothing: as `free`, but it was no use, so they are no younger for it."""
        for block in blocks:
            self._release(block, 0)

    def retire(self, step: int) -> None:
        """The device has finished step `step` and all before it: blocks that waited for them may be had again."""
        self._retired = max(self._retired, step)
        while self._waiting and self._waiting[0][0] <= self._retired:
            _, block = heapq.heappop(self._waiting)
            if self._states[block] == BlockState.FENCED:
                self._settle(block)

    def publish(
        self,
        block: int,
        digest: bytes,
        parent: int | None,
        token_ids: Sequence[int],
        *,
        next_id: int | None,
        has_draft_context: bool,
    ) -> bool:
        """Let later requests hit a full block. From here on nobody writes to it.

        The first block of a text wins; a later one replaces it if it alone has draft context, and is a copy otherwise,
        which stands in for it should it leave. A block behind one that was not published, or was forgotten, cannot be
        hit and stays as it is, and so does one whose digest belongs to another text.

        Args:
            block: referred to by one request, and not published yet.
            digest: of its text.
            parent: the block before it in that request; None for the first.
            token_ids: the block's own.
            next_id: the token behind it where its keys depend on that one (`PrefixChain.next_id`), else None.
            has_draft_context: whether the drafter's context keys of all its positions were written.

        Returns:
            Whether a hit of this text gets this very block.
        """
        assert self._references[block] == 1, f"block {block} has {self._references[block]} owners; one may publish"
        assert not self.is_hashed(block), f"block {block} was published before"
        assert len(token_ids) == self.block_size, "only full blocks are published"
        before = None if parent is None else self.index.text(parent)
        if not self.prefix_cache or (parent is not None and before is None):
            return False
        text = self.index.enter(block, digest, before, token_ids, next_id=next_id, has_draft_context=has_draft_context)
        if text is None:
            return False
        if text.block != block:
            if has_draft_context and not self.index.has_draft_context(text.block):
                self._hand_over(text, block)
            else:
                self._offer(text.block)  # with a copy it may go before the texts behind it
        return text.block == block

    def forget(self, block: int) -> None:
        """Take a block's text out of the index with every text behind it: its numbers are bad."""
        text = self.index.text(block)
        if text is not None:
            self._remove(text)

    def clear_cache(self) -> int:
        """Take every block that no request uses out of the index; how many those were."""
        num_dropped = 0
        for text in reversed(list(self.index)):  # children before parents
            if self._references[text.block] == 0:
                self._leave(text)
                num_dropped += 1
        return num_dropped

    def reconsider(self, text: CachedText) -> None:
        """A text got or lost its snapshot, and its place in the order of eviction with that."""
        self._offer(text.block)

    def _enter(self, block: int, state: BlockState) -> None:
        self._counts[self._states[block]] -= 1
        self._counts[state] += 1
        self._states[block] = state

    def _own(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._enter(block, BlockState.USED)
            self._references[block] = 1

    def _release(self, block: int, fence: int) -> None:
        assert self._references[block] > 0, f"block {block} is freed more often than it was taken"
        self._fences[block] = max(self._fences[block], fence)
        self._references[block] -= 1
        if self._references[block] == 0:
            self._enter(block, BlockState.LEAVING)
            self.runs.unclaim(block)
            self._find_stand_in(block)
            self._settle(block)

    def _find_stand_in(self, block: int) -> None:
        """A block lost its last reference: it stays in the index unless a used block can stand in for it."""
        text = self.index.text(block)
        if text is None:
            return
        if text.block == block:
            copy = self.index.best_copy(text)
            if copy is not None and self.index.has_draft_context(copy) >= self.index.has_draft_context(block):
                self._hand_over(text, copy)
        else:
            self.index.drop_copy(block)
            self._inherit(text.block, block)
            if self._references[text.block] == 0:
                self._settle(text.block)

    def _settle(self, block: int) -> None:
        """A block without references enters the state that its fence and its text ask for."""
        if self._fences[block] > self._retired:
            self._enter(block, BlockState.FENCED)
            heapq.heappush(self._waiting, (self._fences[block], block))
        elif self.is_hashed(block):
            self._enter(block, BlockState.IDLE)
            self._offer(block)
        else:
            self._enter(block, BlockState.FREE)
            self.runs.add(block)

    def _inherit(self, block: int, former: int) -> None:
        """Whatever one block of a text went through counts for the one that keeps it.

        The texts behind it may be as young and as fenced as the former block; none of them may outlast this one.
        """
        self._last_used[block] = max(self._last_used[block], self._last_used[former])
        self._fences[block] = max(self._fences[block], self._fences[former])

    def _hand_over(self, text: CachedText, copy: int) -> None:
        block = text.block
        self._inherit(copy, block)
        self.index.exchange(text, copy, keep=self._references[block] > 0)
        if self._states[block] == BlockState.IDLE:
            self._settle(block)

    def _remove(self, text: CachedText) -> None:
        for gone in self.index.remove(text):
            if gone.snapshot is not None and self.on_snapshot_lost is not None:
                self.on_snapshot_lost(gone)
            for block in (gone.block, *gone.copies):
                if self._states[block] == BlockState.IDLE:
                    self._settle(block)
        if text.parent is not None:
            self._offer(text.parent.block)

    def _leave(self, text: CachedText) -> None:
        """An unused block leaves its text, which lives on in a copy, or goes with all behind it."""
        copy = self.index.best_copy(text)
        if copy is not None:
            self._hand_over(text, copy)
        else:
            self._remove(text)

    def _evict(self, block: int) -> None:
        text = self.index.text(block)
        assert text is not None, f"idle block {block} has no text"
        num_texts = len(self.index)
        self._leave(text)
        self.num_evictions += num_texts - len(self.index)

    def _eviction_key(self, block: int) -> tuple[bool, int, int] | None:
        """What orders the blocks that may be evicted as they are; None for any other.

        A target with recurrent state cannot use blocks behind its deepest snapshot: those go first.
        """
        text = self.index.text(block)
        if text is None or self._states[block] != BlockState.IDLE or (text.children and not text.copies):
            return None
        return (text.snapshot is not None, self._last_used[block], block)

    def _offer(self, block: int) -> None:
        key = self._eviction_key(block)
        if key is None:
            return
        heapq.heappush(self._evictable, key)
        if len(self._evictable) > 2 * self.num_blocks:  # each block counts once, the rest was overtaken
            self._evictable = sorted({key for key in self._evictable if key == self._eviction_key(key[-1])})

    def _evict_one(self) -> bool:
        while self._evictable:
            key = heapq.heappop(self._evictable)
            if key == self._eviction_key(key[-1]):
                self._evict(key[-1])
                return True
        return False

    def _evict_window(self, count: int, room: int) -> list[int] | None:
        ages = [self._age_for_window(block) for block in range(self.num_blocks)]
        claimed = self.runs.claimed()
        unclaimed = [None if block in claimed else age for block, age in enumerate(ages)]
        for length, choice in ((room, unclaimed), (count, unclaimed), (count, ages)):
            first = coldest_window(choice, length)
            if first is not None:
                self._evict_idle(range(first, first + count))
                return self.runs.take_window(first, count, room=length)
        return None

    def _clear_behind(self, block: int, count: int) -> None:
        """Evict what lies in a request's way, if that is in its claim and nobody uses it."""
        way = range(block + 1, block + 1 + count)
        if count > self.runs.claim(block) or way.stop > self.num_blocks:
            return
        if all(self._states[other] in (BlockState.FREE, BlockState.IDLE) for other in way):
            self._evict_idle(way)

    def _evict_idle(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._states[block] == BlockState.IDLE:  # evicting one may have freed the next
                self._evict(block)

    def _age_for_window(self, block: int) -> int | None:
        state = self._states[block]
        if block == 0 or state in (BlockState.USED, BlockState.FENCED):
            return None
        return self._last_used[block] if state == BlockState.IDLE else 0
