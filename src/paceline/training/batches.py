"""Batches of a run's steps, read ahead in a thread. Data order and anchors are functions of seed, step and part."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from paceline.configuration.run import TrainRun
from paceline.training.data import Batch, BatchOrder, Conversations
from paceline.training.packing import PackedOrder


class StepBatches:
    """Which batches a step learns from.

    Args:
        run: seed, sizes and number of parts.
        train: conversations to learn from.
    Raises:
        DataError: they do not fill one batch.
    """

    def __init__(self, run: TrainRun, train: Conversations) -> None:
        self._run, self._train = run, train
        lengths = np.minimum(np.diff(train.starts), run.data.max_length)
        size, seed = run.schedule.batch_size, run.seed
        self._order: BatchOrder | PackedOrder
        if run.data.packed:
            self._order = PackedOrder(lengths, run.data.max_length, size, seed)
        else:
            self._order = BatchOrder(lengths, size, seed)

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the data."""
        return self._order.batches_per_epoch

    @property
    def num_rows(self) -> int:
        """Rows in one pass over the data, those of a batch that would not be full included."""
        return self._order.num_rows

    def from_step(self, first_step: int) -> Generator[tuple[int, list[Batch]], None, None]:
        """Whole batches of every step from `first_step` on, the next one being read while this one trains."""
        with ThreadPoolExecutor(1) as loader:
            upcoming = loader.submit(self._read, first_step)
            for step in range(first_step, self._run.schedule.num_steps):
                batches = upcoming.result()
                upcoming = loader.submit(self._read, step + 1)
                yield step, batches

    def _read(self, step: int) -> list[Batch]:
        parts = self._run.schedule.accumulation
        return [self._batch(step * parts + part) for part in range(parts)]

    def _batch(self, index: int) -> Batch:
        max_length = self._run.data.max_length
        if isinstance(self._order, PackedOrder):
            return self._train.packed_batch(self._order(index), max_length)
        return self._train.batch(self._order(index), max_length)


def anchor_generators(seed: int, step: int) -> Callable[[int], torch.Generator]:
    """A generator for the anchors of each accumulation part."""

    def generator(part: int) -> torch.Generator:
        mixed = np.random.SeedSequence([seed, step, part]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(mixed) & (2**63 - 1))

    return generator
