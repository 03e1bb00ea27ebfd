"""Whole runs that ranks share: the work that `test_loop_ranks.py` gives to processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import chat_target, tiny_settings
from tests.unit.training.shared_steps import hash_of

from paceline.configuration.run import TrainRun
from paceline.errors import CapacityError, PacelineError
from paceline.models.loading import LoadedTarget
from paceline.training import loop, resume
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures
from paceline.training.loop import Outcome, TrainingProgress, train
from paceline.training.objective import Features
from paceline.training.ranks import Ranks
from paceline.training.step import StepResult, train_step

STEPS = 12


def settings(folder: Path, data: Path, strategy: str = "ddp", **changes: Any) -> TrainRun:
    """12 steps of 4 conversations, of which the last two are the second rank's."""
    base = {
        "distributed": {"strategy": strategy},
        "schedule_num_steps": STEPS,
        "schedule_batch_size": 4,
        "checkpoint_every": 5,
        "checkpoint_export_every": 4,
        "evaluate_every": 6,
        "evaluate_num_conversations": 3,
        "drafter_family": "dflash2",
        "drafter_selector_rank": 4,
    }
    return tiny_settings(folder, data, **(base | changes))


def small_target() -> LoadedTarget:
    return chat_target(vocab_size=512, hidden_size=32, intermediate_size=48, head_size=8)


@contextmanager
def after_step(act: Callable[[int], None]) -> Iterator[None]:
    """Act behind every step, counted from 1."""
    count = [0]

    def step(*arguments: Any) -> StepResult:
        result = train_step(*arguments)
        count[0] += 1
        act(count[0])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        yield


def terminate_at(step: int) -> Callable[[int], None]:
    def act(count: int) -> None:
        if count == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return act


def nothing(count: int) -> None:
    """For the ranks that are left alone."""


def run_all(ranks: Ranks, folder: Path, data: Path, strategy: str) -> dict[str, Any]:
    """Every scenario in turn; what each gave on this rank: an outcome, or an error as text."""
    target = small_target()
    before = hash_of(dict(target.model.named_parameters()))

    def attempt(name: str, *, act: Callable[[int], None] = nothing, resumes: bool = False, **changes: Any) -> Any:
        told: list[TrainingProgress] = []
        try:
            with after_step(act if ranks.rank == 1 else nothing):
                run = settings(folder / name, data, strategy, **changes)
                outcome = train(run, target, resume=resumes, on_progress=told.append, ranks=ranks)
        except PacelineError as error:
            return f"{type(error).__name__}: {error.message}"
        return outcome, [(progress.step, progress.row and progress.row["kind"]) for progress in told]

    found = {
        "whole": attempt("whole"),
        "stopped": attempt("stopped", act=terminate_at(7)),
        "resumed": attempt("stopped", resumes=True),
        "stopped for one": attempt("stopped-for-one", act=terminate_at(7)),
        "of one": attempt("of-one", resumes=True),
        "uneven": attempt("uneven", schedule_batch_size=3),
        "again": attempt("whole"),
    }
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            poison(patch, first=4)
        found["poisoned"] = attempt("poisoned", evaluate_num_conversations=0)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.is_first:
            patch.setattr(resume, "save_safetensors", full_disk)
        found["full"] = attempt("full")
    found["target"] = hash_of(dict(target.model.named_parameters())) == before
    return found


def run_three(ranks: Ranks, folder: Path, data: Path, strategy: str, resumes: bool) -> list[int]:
    """A run of three ranks as a whole and the first part of another; or the rest of that one. The steps reached."""
    whole, parts = (settings(folder / name, data, strategy, schedule_batch_size=6) for name in ("whole", "parts"))
    target = small_target()
    if resumes:
        return [train(parts, target, resume=True, ranks=ranks).step]
    reached = [train(whole, target, ranks=ranks).step]
    with after_step(terminate_at(7) if ranks.rank == 2 else nothing):
        return [*reached, train(parts, target, ranks=ranks).step]


def stop_alone(run: TrainRun, step: int) -> Outcome:
    """A run in this process that is asked to stop."""
    with after_step(terminate_at(step)):
        return train(run, small_target())


def poison(patch: pytest.MonkeyPatch, first: int) -> None:
    """Features of this rank hold a NaN from a step on."""
    original, calls = TargetFeatures.__call__, iter(range(10**6))

    def features(self: TargetFeatures, batch: Batch) -> Features:
        found = original(self, batch)
        if next(calls) >= first:
            found.taps[0][0, 0, 0] = float("nan")
        return found

    patch.setattr(TargetFeatures, "__call__", features)


def full_disk(*arguments: Any) -> None:
    raise CapacityError("the disk is full")
