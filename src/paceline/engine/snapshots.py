"""Snapshots of recurrent state: which rows hold one, behind which text, and which of them is given up. Host only.

Keys can be cut anywhere; recurrent state cannot. A target that has any can start only where all of its states were
kept, so a hit of such a target ends at its deepest snapshot, and a snapshot is worth as much as the blocks before it.
The rows themselves, on the device, are somebody else's.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.blocks import BlockPool
from paceline.engine.prefix_index import CachedBlock, CachedText


def prompt_boundaries(num_tokens: int, block_size: int) -> list[int]:
    """Where a prompt's own snapshots are: each serves the prompt sent again, and what goes on behind it.

    The last boundary that leaves a token to run, and the prompt's end if that is a boundary, too.
    """
    last = (num_tokens - 1) // block_size * block_size
    return [at for at in (last, last + block_size) if 0 < at <= num_tokens]


def boundaries_within(start: int, end: int, *, num_prompt_tokens: int, block_size: int, spacing: int) -> list[int]:
    """Positions that a pass reaches or crosses and that get a snapshot.

    Args:
        start: n before the pass.
        end: n after it.
        num_prompt_tokens: of the request.
        block_size: positions per block; hits end at multiples of it.
        spacing: a multiple of it; there is a snapshot at each multiple of this, in text of any origin.
    """
    assert spacing % block_size == 0, "a hit can end at a multiple of the block size alone"
    regular = range(start // spacing * spacing + spacing, end + 1, spacing)
    own = [at for at in prompt_boundaries(num_prompt_tokens, block_size) if start < at <= end]
    return sorted({*regular, *own})


@dataclass(frozen=True)
class SnapshotHit:
    """Where a request can start: behind `num_blocks` blocks, with the state in `row`."""

    num_blocks: int
    row: int


class SnapshotPool:
    """Owners, worth and fences of the rows 0 to `num_snapshots` - 1.

    A row belongs to whoever allocated it until it is published; from then on to the text whose end its state stands at,
    for as long as that is cached. Those who read a published row take it meanwhile.

    What is given up is the row that was used least, counting only recent uses: a row's rank is that of the last one
    given up, as of the row's last use, plus its uses. Rows of one rank go by age.

    Attributes:
        num_evictions: published rows that were given up for another.

    Args:
        num_snapshots: how many rows.
        pool: of the blocks; texts that it evicts take their snapshots along, and texts without any are evicted first.

    Source: the rank is that of GreedyDual with frequency and equal sizes (Cherkasova, HPL-98-69R1).
    """

    def __init__(self, num_snapshots: int, pool: BlockPool) -> None:
        self.num_snapshots = num_snapshots
        self.num_evictions = 0
        self._pool = pool
        pool.on_snapshot_lost = self._lose
        self._free = list(reversed(range(num_snapshots)))
        self._texts: list[CachedText | None] = [None] * num_snapshots
        self._owners = [0] * num_snapshots
        self._uses = [0] * num_snapshots
        self._num_given = [0] * num_snapshots
        self._ranks = [(0, 0)] * num_snapshots  # (rank, last use)
        self._fences = [0] * num_snapshots
        self._waiting: list[tuple[int, int]] = []  # (fence, row)
        self._evictable: list[tuple[tuple[int, int], int]] = []  # (rank, row); entries may be out of date
        self._clock = self._floor = self._retired = 0

    @property
    def num_cached(self) -> int:
        """Rows that a hit can start from."""
        return sum(text is not None for text in self._texts)

    @property
    def num_used(self) -> int:
        """Rows that somebody holds, to write or to read."""
        return sum(owners > 0 for owners in self._owners)

    @property
    def num_free(self) -> int:
        """Rows that `allocate` can give, by giving up a published one where needed."""
        idle = sum(text is not None and self._is_idle(row) for row, text in enumerate(self._texts))
        return len(self._free) + idle

    def published_rows(self) -> dict[int, CachedText]:
        """Rows that a hit can start from, and the texts before them."""
        return {row: text for row, text in enumerate(self._texts) if text is not None}

    def free_rows(self) -> dict[int, int]:
        """Rows that hold nothing and that no step may still touch, with how often each was given away before."""
        return {row: self._num_given[row] for row in self._free}

    def allocate(self) -> int | None:
        """A row of one's own, to be written to; None if each is in use or behind a fence."""
        self.retire(self._pool.retired)
        if not self._free and not self._evict_one():
            return None
        row = self._free.pop()
        self._owners[row] = 1
        self._num_given[row] += 1
        return row

    def publish(self, row: int, block: int, *, fence: int = 0) -> bool:
        """Let requests start from a row.

        Args:
            row: one's own until now; it holds the state right behind the last position of `block`.
            block: published in the block pool.
            fence: the last step that was launched and writes the row; 0 if none does.

        Returns:
            False, and the row is free again, if the block was not published or there is a snapshot behind its text.
        """
        assert self._owners[row] == 1 and self._texts[row] is None, f"row {row} is nobody's to publish"
        text = self._pool.index.text(block)
        if text is None or text.snapshot is not None:
            if text is not None and text.snapshot is not None:
                self._use(text.snapshot)
            self.free(row, fence=fence)
            return False
        text.snapshot = row
        self._texts[row] = text
        self._uses[row] = 0
        self._use(row)
        self._pool.reconsider(text)
        self.free(row, fence=fence)
        return True

    def match(self, hit: Sequence[CachedBlock]) -> SnapshotHit | None:
        """The deepest snapshot behind the blocks of a hit; None if there is none, and the hit is worth nothing.

        Changes nothing: `take` the row that is to be read.
        """
        for num_blocks in range(len(hit), 0, -1):
            text = self._pool.index.text(hit[num_blocks - 1].block)
            if text is not None and text.snapshot is not None:
                return SnapshotHit(num_blocks, text.snapshot)
        return None

    def take(self, row: int) -> None:
        """Keep a published row until it is freed: somebody is about to read it."""
        assert self._texts[row] is not None, f"row {row} holds no snapshot"
        self._owners[row] += 1
        self._use(row)

    def free(self, row: int, *, fence: int = 0) -> None:
        """Give a row back: one's own, or one that was taken.

        Args:
            row: which.
            fence: the last step that was launched and reads or writes it; 0 if none does.
        """
        assert self._owners[row] > 0, f"row {row} is freed more often than it was taken"
        self._owners[row] -= 1
        self._fences[row] = max(self._fences[row], fence)
        self._settle(row)

    def retire(self, step: int) -> None:
        """The device has finished step `step` and all before it."""
        self._retired = max(self._retired, step)
        while self._waiting and self._waiting[0][0] <= self._retired:
            fence, row = heapq.heappop(self._waiting)
            if self._fences[row] == fence:
                self._fences[row] = 0
                self._settle(row)

    def reclaim(self, *, fence: int) -> None:
        """After an interruption: nobody holds a row any more, and those that are not published are free.

        Args:
            fence: the last step that was launched.
        """
        self._owners = [0] * self.num_snapshots
        self._free, self._waiting = [], []
        for row in reversed(range(self.num_snapshots)):
            self._fences[row] = max(self._fences[row], fence)
            self._settle(row)

    def _is_idle(self, row: int) -> bool:
        return self._owners[row] == 0 and self._fences[row] <= self._retired

    def _settle(self, row: int) -> None:
        if self._owners[row]:
            return
        if self._fences[row] > self._retired:
            heapq.heappush(self._waiting, (self._fences[row], row))
        elif self._texts[row] is None:
            self._free.append(row)
        else:
            self._offer(row)

    def _use(self, row: int) -> None:
        self._clock += 1
        self._uses[row] += 1
        self._ranks[row] = (self._floor + self._uses[row], self._clock)
        if self._is_idle(row):
            self._offer(row)

    def _offer(self, row: int) -> None:
        heapq.heappush(self._evictable, (self._ranks[row], row))
        if len(self._evictable) > 2 * self.num_snapshots + 1:  # each row counts once, the rest was overtaken
            self._evictable = sorted({entry for entry in self._evictable if self._is_current(entry)})

    def _is_current(self, entry: tuple[tuple[int, int], int]) -> bool:
        rank, row = entry
        return self._texts[row] is not None and self._is_idle(row) and self._ranks[row] == rank

    def _evict_one(self) -> bool:
        while self._evictable:
            entry = heapq.heappop(self._evictable)
            if self._is_current(entry):
                self._floor = entry[0][0]
                text = self._texts[entry[1]]
                assert text is not None
                self._lose(text)
                self.num_evictions += 1
                self._pool.reconsider(text)
                return True
        return False

    def _lose(self, text: CachedText) -> None:
        """A text and its snapshot part: the row is free once nobody reads it."""
        row = text.snapshot
        assert row is not None
        text.snapshot = self._texts[row] = None
        if self._is_idle(row):
            self._free.append(row)
