"""Runs in a process that kills itself with signal 9: the work that `test_kill.py` gives to processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tests.tiny_run import chat_target
from torch import Tensor

from paceline.checkpoint import export
from paceline.configuration.run import TrainRun
from paceline.training import batches, resume
from paceline.training.loop import train
from paceline.training.resume import latest_checkpoint

Moment = int | str  # a number of function calls, "saving" or "exporting"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class CallCounter:
    """Counts Python function calls of this thread, and dies at one of them: any place, and the same every time."""

    def __init__(self, dies_at: int | None) -> None:
        self.count, self._dies_at = 0, dies_at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.count += 1
            if self.count == self._dies_at:
                die()


def attempt(run: TrainRun, moment: Moment | None, note: Path, forgets_position: bool = False) -> None:
    """Start a run, or resume it if it has a checkpoint, up to a moment.

    Args:
        run: its settings.
        moment: when to die; None goes to the end.
        note: where the number of calls goes, if it comes to the end.
        forgets_position: the planted fault, a resumed run that starts the data from the beginning.
    """
    torch.set_num_threads(1)
    target = chat_target(vocab_size=512, hidden_size=32, intermediate_size=48, head_size=8)
    if moment == "saving":
        die_in(resume)
    if moment == "exporting":
        die_in(export)
    if forgets_position:
        forget_position()
    counter = CallCounter(moment if isinstance(moment, int) else None)
    sys.setprofile(counter)
    train(run, target, resume=latest_checkpoint(run.output / "checkpoints") is not None)
    sys.setprofile(None)
    note.write_text(str(counter.count))


def die_in(module: Any) -> None:
    """Die when the module has written its tensors and nothing else yet."""
    save = module.save_safetensors

    def save_and_die(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        save(path, tensors, metadata)
        die()

    module.save_safetensors = save_and_die


def forget_position() -> None:
    original = batches.StepBatches.from_step

    def from_start(self: batches.StepBatches, first_step: int) -> Any:
        for step, (_, found) in enumerate(original(self, 0), start=first_step):
            yield step, found
            if step + 1 == self._run.schedule.num_steps:
                return

    setattr(batches.StepBatches, "from_step", from_start)  # noqa: B010
