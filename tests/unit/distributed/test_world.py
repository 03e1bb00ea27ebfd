"""Failures of one rank are failures of all, and torchrun's variables make the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.training.processes import run_ranks, values

from paceline.distributed.world import OtherRankFailedError, World, join_world
from paceline.errors import CheckpointError, CompatibilityError
from paceline.training.ranks import Ranks


def fail_on_one(ranks: Ranks) -> list[str]:
    world = World(ranks.rank, ranks.size, ranks.device)

    def act() -> int:
        if world.rank == 1:
            raise CheckpointError("a file is gone")
        return world.rank

    told = []
    for attempt in (lambda: world.together(act), lambda: world.agree(lambda: {"name": str(world.rank // 2)})):
        try:
            attempt()
        except (CheckpointError, OtherRankFailedError, CompatibilityError) as error:
            told.append(f"{type(error).__name__}: {error.message}, exit {error.exit_code}")
    world.agree(lambda: {"name": "one"})
    return [*told, world.given_by(1, f"from {world.rank}"), str(world.gathered(world.rank))]


def test_a_failure_anywhere_is_one_everywhere(tmp_path: Path) -> None:
    found = values(run_ranks(fail_on_one, tmp_path / "run", size=3))
    assert [rank[0] for rank in found] == [
        "OtherRankFailedError: rank 1 failed: a file is gone, exit 1",
        "CheckpointError: a file is gone, exit 1",
        "OtherRankFailedError: rank 1 failed: a file is gone, exit 1",
    ]
    disagreement = "they disagree on name: 0 on ranks 0 1, 1 on rank 2"
    assert all(disagreement in rank[1] for rank in found)
    assert all(rank[2:] == ["from 1", "[0, 1, 2]"] for rank in found)


def test_a_process_that_nobody_launched_is_alone() -> None:
    with join_world("cpu") as world:
        assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu"))
        assert world.together(lambda: 5) == 5 and world.gathered(3) == [3]
        with pytest.raises(CheckpointError):
            world.together(lambda: (_ for _ in ()).throw(CheckpointError("gone")))
