"""What must hold between the steps of an engine, asserted in debug mode (`engine/debug.py`).

I1   n counts positions whose keys are all final. Host and device agree on n, but for the rows of passes that the host
     has not read; it grows by 1 to T rows of a decode step and by the whole of a chunk; full blocks below n keep their
     bits, through moves to other blocks too.
I2   The blocks of a request reach `lookahead` positions beyond n before every decode step that it takes part in.
I3   Only blocks that have one owner and no published text are written to, at n and beyond. References are as many as
     owners, host and device tables agree with them, published blocks keep their bits.
I4   A block is published only once n has passed its end.
I5   A freed block is given again only after the last step that was launched while somebody held it. Steps are noted
     here as they are launched, so this does not lean on the pool's fences.
I6   A step reads Python values from settings alone. Not seen from here: a step on a device that copies or reads once it
     has queued work fails `test_nothing_is_copied_to_the_device_once_a_step_has_queued_work`.
I7   No persistent buffer changes its address. Planes, tables and lengths, since set-up; a graph's own buffers need
     their own test.
I8   Draft noise and target noise share no stream. A property of formulas: `test_domains_are_separate_streams` and
     `test_streams_of_target_and_draft_do_not_know_each_other`.
I9   Rows of padding write to block 0 alone. Free blocks are filled with NaN and must stay so; the slot of padding has
     no block; the row of zeros in block 0, read in place of what must not be seen, stays zero.
I10  A result does not depend on row, neighbours or bucket. It takes a second run:
     `test_a_request_has_the_same_bits_alone_and_in_company` and
     `test_a_batch_leaves_other_slots_and_their_order_alone`.

Whoever reads a position that nobody wrote meets NaN, so a wrong table or length ends a request with the reason "error".
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from torch import Tensor

from paceline.engine.block_planes import BlockCache
from paceline.engine.block_tables import TRASH_BLOCK, BlockTables
from paceline.engine.blocks import BlockPool, BlockState

_SMALL_POOL = 512  # blocks; in larger pools each step looks at a sample
_SAMPLE = 64
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class CheckedRequest:
    """A request that has a slot, as the engine sees it.

    Attributes:
        request_id: whose.
        slot: its row in the tables.
        blocks: by position.
        num_final: n: positions whose keys are final; while the prompt is run, those of it that were.
        is_decoding: whether its prompt is done, and its first token known.
        is_chunk: whether the coming pass runs a part of its prompt.
        num_unread: tokens that passes may have given it whose results are not read.
        num_rows: rows that the coming pass writes; 0 where it takes no part.
    """

    request_id: str
    slot: int
    blocks: Sequence[int]
    num_final: int
    is_decoding: bool
    num_unread: int = 0
    num_rows: int = 0
    is_chunk: bool = False


class InvariantChecks:
    """Raises AssertionError, named I1 to I9, at the first call that finds an invariant broken.

    Args:
        pool: of the engine.
        tables: of the engine.
        caches: all that are addressed through the tables; free blocks of theirs are filled with NaN at once.
        lengths: n per slot on the device; None leaves the comparison out.
        lookahead: positions beyond n that I2 promises.
        runs_ahead: results of a pass may be read only after the next one was launched.
        seed: of the samples taken in large pools.
    """

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        *,
        caches: Sequence[BlockCache],
        lengths: Tensor | None,
        lookahead: int,
        runs_ahead: bool = False,
        seed: int = 0,
    ) -> None:
        self._pool, self._tables, self._caches, self._lengths = pool, tables, caches, lengths
        self._lookahead, self._runs_ahead = lookahead, runs_ahead
        self._random = random.Random(seed)
        self._published: dict[int, tuple[bytes, ...]] = {}  # block -> a checksum per cache
        self._final: dict[tuple[str, int], tuple[int, tuple[bytes, ...]]] = {}  # (request, index) -> block, checksums
        self._poisoned: set[int] = set()
        self._before: dict[str, CheckedRequest] = {}
        self._last_launch: dict[int, int] = {}
        self._launcher: dict[int, str] = {}
        self._addresses = self._find_addresses()
        self._poison_free_blocks()

    def on_admission(self, held: CheckedRequest) -> None:
        """A slot's blocks were set: admission, resume, or a move to other blocks, before the old ones are freed."""
        self._before.pop(held.request_id, None)
        self._check_blocks(held)
        for index, block in enumerate(held.blocks):  # a move takes its bits along
            where = (held.request_id, index)
            if where in self._final:
                self._final[where] = (block, self._final[where][1])

    def before_step(self, step: int, held: Sequence[CheckedRequest]) -> None:
        """A pass is about to be launched.

        Args:
            step: counts launches, from 1 on.
            held: every request that has a slot.
        """
        references = Counter(block for one in held for block in one.blocks)
        for block in range(self._pool.num_blocks):
            if references[block] != self._pool.references(block):
                _broken(
                    "I3",
                    f"block {block} is held {references[block]} times, the pool counts {self._pool.references(block)}",
                )
        for one in held:
            self._check_blocks(one)
            self._check_reach(one)
            if self._lengths is not None and one.is_decoding:
                length = int(self._lengths[one.slot])
                if not one.num_final <= length <= one.num_final + one.num_unread:
                    _broken(
                        "I1",
                        f"{one.request_id} stands at {one.num_final} on the host and at {length} on the device, with "
                        f"{one.num_unread} rows unread",
                    )
            for block in one.blocks:
                self._last_launch[block] = step
                self._launcher[block] = one.request_id
        self._check_device_table(held)
        self._before = {one.request_id: one for one in held}

    def after_step(self, step: int, held: Sequence[CheckedRequest]) -> None:
        """The results of a pass were taken in, and requests that it ended have freed their blocks.

        Args:
            step: as of `before_step`.
            held: every request that still has a slot.
        """
        for one in held:
            self._check_growth(one)
        if self._find_addresses() != self._addresses:
            _broken("I7", "a buffer moved since the engine was set up")
        digests: dict[int, tuple[bytes, ...]] = {}
        self._check_published(digests)
        self._check_final(held, digests)
        self._check_padding()
        self._poison_free_blocks()

    def on_publish(self, held: CheckedRequest, index: int) -> None:
        """Block `index` of a request is about to be published."""
        block, end = held.blocks[index], (index + 1) * self._pool.block_size
        if end > held.num_final:
            _broken("I4", f"block {block} ends at {end}; {held.request_id} is final up to {held.num_final}")
        if self._pool.references(block) != 1 or self._pool.is_hashed(block):
            _broken("I3", f"block {block} is shared or published already")
        (self._published[block],) = self._checksums([block])

    def on_free(self, blocks: Sequence[int], *, fence: int) -> None:
        """Blocks are about to be freed behind a fence."""
        for block in blocks:
            last = self._last_launch.get(block, 0)
            if last > max(fence, self._pool.retired):
                _broken("I5", f"block {block} is freed behind step {fence}; step {last} may still write to it")
            self._launcher.pop(block, None)
            self._poisoned.discard(block)
        self._forget_final(blocks)

    def on_clear(self, blocks: Sequence[int]) -> None:
        """Blocks with bad numbers were zeroed or forgotten: their bits may change."""
        for block in blocks:
            self._published.pop(block, None)
        self._forget_final(blocks)

    def _forget_final(self, blocks: Sequence[int]) -> None:
        gone = set(blocks)
        self._final = {where: found for where, found in self._final.items() if found[0] not in gone}

    def _check_blocks(self, held: CheckedRequest) -> None:
        blocks, pool = list(held.blocks), self._pool
        if self._tables.blocks(held.slot) != blocks:
            _broken("I3", f"slot {held.slot} has blocks {self._tables.blocks(held.slot)}, its request has {blocks}")
        if TRASH_BLOCK in blocks or len(set(blocks)) != len(blocks):
            _broken("I9", f"{held.request_id} has block 0, or one block twice: {blocks}")
        for block in blocks:
            if pool.references(block) < 1:
                _broken("I3", f"{held.request_id} has block {block}, which is {pool.state(block).name.lower()}")
        for block in blocks[held.num_final // pool.block_size :]:
            if pool.references(block) != 1:
                _broken("I3", f"{held.request_id} may write to block {block}, which {pool.references(block)} share")
            if pool.is_hashed(block):
                _broken("I3", f"{held.request_id} may write to block {block}, which is published")
            if self._launcher.get(block) != held.request_id and self._last_launch.get(block, 0) > self._pool.retired:
                _broken("I5", f"{held.request_id} got block {block} before step {self._last_launch[block]} finished")

    def _check_reach(self, held: CheckedRequest) -> None:
        size = self._pool.block_size
        reach = len(held.blocks) * size
        needed = held.num_final + held.num_unread + held.num_rows
        if held.is_decoding and held.num_rows > 0:
            needed = max(needed, min(held.num_final + self._lookahead, self._tables.max_blocks * size))
        if reach < needed:
            _broken("I2", f"the blocks of {held.request_id} hold {reach} positions, {needed} are needed")

    def _check_growth(self, held: CheckedRequest) -> None:
        before = self._before.pop(held.request_id, None)
        if before is None:
            return
        grown = held.num_final - before.num_final
        least, most = before.num_rows, before.num_rows
        if not before.is_chunk:
            # With a pass unread, what is taken in here is the one before it, or nothing of this request.
            least, most = 0 if self._runs_ahead else min(before.num_rows, 1), before.num_unread + before.num_rows
        if not least <= grown <= most:
            _broken("I1", f"{held.request_id} grew by {grown} in passes over {most} rows")

    def _check_device_table(self, held: Sequence[CheckedRequest]) -> None:
        rows = self._tables.table.tolist()
        if any(rows[self._tables.num_slots]):
            _broken("I9", "the slot of padding rows has blocks")
        for one in held:
            expected = [*one.blocks, *[TRASH_BLOCK] * (self._tables.max_blocks - len(one.blocks))]
            if rows[one.slot] != expected:
                _broken("I3", f"the device's table of slot {one.slot} is behind the host's")

    def _check_published(self, digests: dict[int, tuple[bytes, ...]]) -> None:
        gone = [block for block in self._published if not self._pool.is_hashed(block)]
        for block in gone:
            del self._published[block]
        sample = self._sample(self._published)
        self._digest(sample, digests)
        for block in sample:
            if digests[block] != self._published[block]:
                _broken("I3", f"published block {block} changed")

    def _check_final(self, held: Sequence[CheckedRequest], digests: dict[int, tuple[bytes, ...]]) -> None:
        size = self._pool.block_size
        places = {(one.request_id, i): one.blocks[i] for one in held for i in range(one.num_final // size)}
        self._final = {where: found for where, found in self._final.items() if where in places}
        sample = self._sample(places)
        self._digest([places[where] for where in sample], digests)
        for where in sample:
            found = digests[places[where]]
            if self._final.setdefault(where, (places[where], found))[1] != found:
                _broken("I1", f"block {where[1]} of {where[0]} changed below the positions that are final")
            self._final[where] = (places[where], found)

    def _check_padding(self) -> None:
        self._poisoned = {block for block in self._poisoned if self._pool.state(block) == BlockState.FREE}
        sample = self._sample(self._poisoned)
        for cache in self._caches:
            for block, is_untouched in zip(sample, cache.are_poisoned(sample), strict=True):
                if not is_untouched:
                    _broken("I9", f"somebody wrote to block {block}, which nobody has")
            if cache.planes[:, :, :, TRASH_BLOCK, 0].any():
                _broken("I9", "the row of zeros in block 0 was written to")

    def _poison_free_blocks(self) -> None:
        free = {block for block in range(1, self._pool.num_blocks) if self._pool.state(block) == BlockState.FREE}
        for block in free:
            if self._last_launch.get(block, 0) > self._pool.retired:
                _broken("I5", f"block {block} is free, and step {self._last_launch[block]} has not finished")
        fresh = sorted(free - self._poisoned)
        if not fresh:
            return
        for cache in self._caches:
            cache.poison_blocks(fresh)
        self._poisoned |= free

    def _digest(self, blocks: Iterable[int], known: dict[int, tuple[bytes, ...]]) -> None:
        """Add the digests of blocks that have none yet: what was published is final for its request, too."""
        fresh = sorted({*blocks} - known.keys())
        known.update(zip(fresh, self._checksums(fresh), strict=True))

    def _checksums(self, blocks: Sequence[int]) -> list[tuple[bytes, ...]]:
        """Of each block, a digest per cache."""
        return list(zip(*(cache.checksums(blocks) for cache in self._caches), strict=True))

    def _find_addresses(self) -> list[int]:
        buffers = [self._tables.table, *(cache.planes for cache in self._caches)]
        if self._lengths is not None:
            buffers.append(self._lengths)
        return [buffer.data_ptr() for buffer in buffers]

    def _sample(self, population: Iterable[_Item]) -> list[_Item]:
        everything = list(population)
        if self._pool.num_blocks <= _SMALL_POOL or len(everything) <= _SAMPLE:
            return everything
        return self._random.sample(everything, _SAMPLE)


def _broken(name: str, what: str) -> NoReturn:
    raise AssertionError(f"{name}: {what}")
