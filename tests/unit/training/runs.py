"""What tests of whole runs do to them and read from them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.weights import open_safetensors_file
from paceline.configuration.run import TrainRun

Act = Callable[[int], None]


class Crash(Exception):
    """The process dies."""


def crash_at(step: int) -> Act:
    def act(count: int) -> None:
        if count == step:
            raise Crash

    return act


def signal_at(step: int, times: int = 1) -> Act:
    def act(count: int) -> None:
        if count == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return act


def nothing(count: int) -> None:
    """Undo an earlier act."""


def metrics(run: TrainRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]


def timeless(run: TrainRun) -> list[dict[str, Any]]:
    timed = {"seconds", "tokens_per_second"}
    return [{key: value for key, value in row.items() if key not in timed} for row in metrics(run)]


def state(run: TrainRun, step: int) -> dict[str, Tensor]:
    source = open_safetensors_file(run.output / "checkpoints" / f"step-{step:07d}" / "state.safetensors")
    return {name: source.load(name) for name in source.names()}


def differs(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name in left.keys() | right.keys() if not torch.equal(left[name], right[name])]


def exported(run: TrainRun) -> dict[str, bytes]:
    names = ("model.safetensors", "fingerprint.safetensors", "config.json", "provenance.json")
    return {name: (run.output / "drafter" / name).read_bytes() for name in names}


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
