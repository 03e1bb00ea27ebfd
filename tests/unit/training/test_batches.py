"""Batches of steps: every conversation once an epoch, however a step is cut into parts, wherever a run goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.tiny_run import random_rows, tiny_settings, write_token_file

from paceline.configuration.run import TrainRun
from paceline.training.batches import StepBatches, anchor_generators
from paceline.training.data import Conversations, read_conversations


@pytest.fixture
def run(tmp_path: Path) -> TrainRun:
    rows = [row[: 6 + index % 7] for index, row in enumerate(random_rows(48, 12, vocab_size=64))]
    data = write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=2)
    return tiny_settings(tmp_path / "run", data, schedule_accumulation=3, schedule_num_steps=16)


def conversations(run: TrainRun) -> Conversations:
    return read_conversations(run.data.files[0], vocab_size=64)


def read(run: TrainRun, first_step: int = 0) -> dict[int, list[list[int]]]:
    """Step to the conversations of each of its parts."""
    steps = StepBatches(run, conversations(run)).from_step(first_step)
    return {
        step: [[index for row in batch.rows or () for index in row] for batch in batches] for step, batches in steps
    }


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_a_step_go_on_where_the_last_one_ended(run: TrainRun, packed: bool) -> None:
    run = run.model_copy(update={"data": run.data.model_copy(update={"packed": packed})})
    batches = [part for parts in read(run).values() for part in parts]
    assert len(batches) == 16 * 3
    per_epoch = StepBatches(run, conversations(run)).per_epoch
    for first in range(0, len(batches) - per_epoch + 1, per_epoch):
        seen = Counter(index for part in batches[first : first + per_epoch] for index in part)
        assert set(seen.values()) == {1}
        # rows that do not fill a batch wait; without packing every one does
        assert packed or len(seen) == 48


def test_a_resumed_run_reads_what_it_would_have_read(run: TrainRun) -> None:
    whole = read(run)
    assert list(whole) == list(range(16))
    assert read(run, 11) == {step: parts for step, parts in whole.items() if step >= 11}


def test_every_part_of_every_step_draws_its_own_anchors() -> None:
    def drawn(seed: int, step: int, part: int) -> int:
        return anchor_generators(seed, step)(part).initial_seed()

    places = [(seed, step, part) for seed in (0, 1) for step in range(8) for part in range(4)]
    assert len({drawn(*place) for place in places}) == len(places)
    assert [drawn(*place) for place in places] == [drawn(*place) for place in places]
    assert all(0 <= drawn(*place) < np.iinfo(np.int64).max for place in places)
