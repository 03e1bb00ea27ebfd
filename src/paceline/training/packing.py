"""Several conversations per row: which ones share a row, and which rows form the batch of a step.

Rows are filled best fit, the longest conversation first. What is packed are lengths, which no epoch changes, so every
epoch has the same number of rows; which of several equally long conversations takes a place is drawn anew, as is the
order of the rows. The batch of a step is therefore a pure function of (seed, step), as it is without packing.
"""

from __future__ import annotations

import itertools

import numpy as np

from paceline.errors import DataError

Rows = tuple[tuple[int, ...], ...]


def pack_lengths(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Put each length into the fullest row that still has room for it, in the given order.

    Args:
        lengths: int, in [1, capacity]; from long to short fills best.
        capacity: of a row.
    Returns:
        Indices of the lengths in each row.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the room that is left in them
    rooms = 0  # bit r is set where a row with room r exists: the smallest sufficient one is found by a shift
    for index, length in enumerate(lengths.tolist()):
        sufficient = rooms >> length
        if sufficient:
            room = length + (sufficient & -sufficient).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        with_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


class PackedOrder:
    """Which conversations form the rows of a step.

    Args:
        lengths: int, tokens of each conversation.
        max_length: tokens of a row; longer conversations are cut to it and fill one alone.
        batch_size: rows of a batch.
        seed: of the run.
    Raises:
        DataError: there are fewer rows than a batch has.
    """

    def __init__(self, lengths: np.ndarray, max_length: int, batch_size: int, seed: int) -> None:
        self._lengths, self._batch_size, self._seed = np.minimum(lengths, max_length), batch_size, seed
        rows = pack_lengths(-np.sort(-self._lengths), max_length)
        if len(rows) < batch_size:
            raise DataError(
                f"{len(lengths)} conversations fill {len(rows)} rows of {max_length} tokens, "
                f"schedule.batch_size is {batch_size}",
                hint="a smaller batch_size or a smaller data.max_length",
            )
        self._places = np.array(list(itertools.chain.from_iterable(rows)), np.int64)  # ranks by length, row after row
        self._starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        self._epoch, self._conversations, self._rows = -1, np.empty(0, np.int64), np.empty(0, np.int64)

    @property
    def num_rows(self) -> int:
        """Rows in one pass over all conversations."""
        return len(self._starts) - 1

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass; the few rows that do not fill one wait for another epoch's order."""
        return self.num_rows // self._batch_size

    def __call__(self, index: int) -> Rows:
        """Conversation indices of every row of the batch at a global index, counted over epochs."""
        epoch, offset = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._draw(epoch)
        chosen = self._rows[offset * self._batch_size : (offset + 1) * self._batch_size]
        return tuple(
            tuple(self._conversations[self._places[self._starts[row] : self._starts[row + 1]]].tolist())
            for row in chosen
        )

    def _draw(self, epoch: int) -> None:
        random = np.random.default_rng([self._seed, epoch])
        shuffled = random.permutation(len(self._lengths))
        self._conversations = shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
        self._rows = random.permutation(self.num_rows)
        self._epoch = epoch
