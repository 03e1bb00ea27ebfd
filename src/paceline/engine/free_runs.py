"""Free blocks as runs of neighbours, so that a request can get one run and grow in it.

Host only. On a CPU a request whose blocks are one run is read through a view; any other is gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class FreeRuns:
    """The free blocks of a pool, kept as maximal runs; all but `take_run` is O(1) per block.

    A claim is room behind a request's last block that others stay out of while there is another place. It is no
    promise: nobody waits for blocks because of a claim. Blocks in it need not be free: what is cached there stays to be
    found until the request gets there.

    Args:
        first: lowest block; all blocks from it on are free at first.
        num_blocks: one more than the highest block.
    """

    def __init__(self, first: int, num_blocks: int) -> None:
        self._lengths: dict[int, int] = {}  # first block of a run -> its length
        self._starts: dict[int, int] = {}  # last block of a run -> its first
        self._claims: dict[int, int] = {}  # last block of a request -> blocks behind it that the request may need
        self._is_free = bytearray(num_blocks)
        self._num_free = 0
        if num_blocks > first:
            self._is_free[first:] = b"\x01" * (num_blocks - first)
            self._num_free = num_blocks - first
            self._put(first, num_blocks - first)

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block: int) -> bool:
        return bool(self._is_free[block])

    def runs(self) -> list[tuple[int, int]]:
        """(first block, length) of every run, ascending."""
        return sorted(self._lengths.items())

    def add(self, block: int) -> None:
        """A block becomes free; it joins its free neighbours."""
        assert not self._is_free[block], f"block {block} is free already"
        self._is_free[block] = 1
        self._num_free += 1
        start, length = block, 1
        left = self._starts.pop(block - 1, None)
        if left is not None:
            start, length = left, length + self._lengths.pop(left)
        right = self._lengths.pop(block + 1, None)
        if right is not None:
            length += right
        self._put(start, length)  # overwrites the right run's end

    def unclaim(self, block: int) -> None:
        """The request that ended with this block is gone, or goes on elsewhere."""
        self._claims.pop(block, None)

    def take_behind(self, block: int, count: int, *, room: int | None) -> list[int] | None:
        """The `count` blocks right behind a block, if all are free; the block's claim moves on to their last."""
        if self._lengths.get(block + 1, 0) < count:
            return None
        claim = max(self._claims.pop(block, 0), room or 0) - count
        return self._cut(block + 1, 0, count, claim)

    def take_run(self, count: int, *, room: int) -> list[int] | None:
        """`count` free neighbours where `room` fit, as tightly as possible; else where most do; None if nowhere.

        Looks at every run, which is meant for admission and not for every step.
        """
        best: tuple[int, int, int] | None = None  # (free blocks beside claims, first of the run, claimed)
        widest: tuple[int, int, int] | None = None
        for start, length in self._lengths.items():
            claimed = min(self._claims.get(start - 1, 0), length)
            found = (length - claimed, start, claimed)
            if found[0] >= room and (best is None or found < best):
                best = found
            if widest is None or found > widest:
                widest = found
        chosen = best or widest
        if chosen is not None and chosen[0] >= count:
            return self._cut(chosen[1], chosen[2], count, room - count)
        if not self._lengths:
            return None
        start, length = max(self._lengths.items(), key=lambda run: run[1])
        if length < count:
            return None
        return self._cut(start, length - count, count, room - count)  # inside somebody's claim, at its far end

    def take_any(self, count: int) -> list[int]:
        """`count` free blocks, ascending, from the far ends of runs; that many are free."""
        taken: list[int] = []
        while len(taken) < count:
            start, length = self._lengths.popitem()
            self._lengths[start] = length
            part = min(length, count - len(taken))
            taken += self._cut(start, length - part, part, 0)
        return sorted(taken)

    def take_window(self, first: int, count: int, *, room: int) -> list[int]:
        """`count` free blocks from `first` on, with a claim to the others of `room`, free or not."""
        start = max(start for start in self._lengths if start <= first)
        assert start + self._lengths[start] >= first + count, "a window must be free to be taken"
        return self._cut(start, first - start, count, room - count)

    def claim(self, block: int) -> int:
        """Blocks behind a request's last one that it claims."""
        return self._claims.get(block, 0)

    def claimed(self) -> set[int]:
        """All blocks that somebody claims."""
        return {block for last, length in self._claims.items() for block in range(last + 1, last + 1 + length)}

    def _put(self, start: int, length: int) -> None:
        self._lengths[start] = length
        self._starts[start + length - 1] = start

    def _cut(self, start: int, offset: int, count: int, claim: int) -> list[int]:
        length = self._lengths.pop(start)
        del self._starts[start + length - 1]
        first = start + offset
        if offset:
            self._put(start, offset)
        if offset + count < length:
            self._put(first + count, length - offset - count)
        self._is_free[first : first + count] = bytes(count)
        self._num_free -= count
        if claim > 0:
            self._claims[first + count - 1] = claim
        return list(range(first, first + count))


def coldest_window(last_used: Sequence[int | None], count: int) -> int | None:
    """First of the `count` neighbours whose latest use is longest ago; None where no such window is.

    Args:
        last_used: per block; None for one that cannot be had.
        count: at least 1.
    """
    best: tuple[int, int] | None = None  # (latest use, first block)
    peaks: deque[tuple[int, int]] = deque()  # (use, block) of the window that no later block of it outdoes
    length = 0
    for block, used in enumerate(last_used):
        if used is None:
            peaks.clear()
            length = 0
            continue
        length += 1
        while peaks and peaks[-1][0] <= used:
            peaks.pop()
        peaks.append((used, block))
        if peaks[0][1] <= block - count:
            peaks.popleft()
        if length >= count and (best is None or peaks[0][0] < best[0]):
            best = (peaks[0][0], block - count + 1)
    return None if best is None else best[1]
