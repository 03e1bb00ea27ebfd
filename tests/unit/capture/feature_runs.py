"""Captures of features that take a fraction of a second, in this process and in others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.tiny import tiny_prompts, tiny_target, wrap_target

from paceline.capture.feature_plan import CaptureSettings
from paceline.capture.feature_record import Texts, feature_record
from paceline.capture.features import FeatureCapture
from paceline.capture.shards import MANIFEST_FILE, ShardFolder
from paceline.checkpoint.contract import TargetLayerId
from paceline.models.layers import LinearMode
from paceline.models.loading import LoadedTarget

LAYERS = (TargetLayerId(0), TargetLayerId(2))
NUM_PROMPT_TOKENS = 4


def small_target(linear_mode: LinearMode = "plain", seed: int = 0, **changes: Any) -> LoadedTarget:
    """Width 32, four layers."""
    fields: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "head_size": 8, **changes}
    return wrap_target(tiny_target(seed=seed, **fields), linear_mode)


def random_texts(count: int = 30, seed: int = 0, longest: int = 40) -> Texts:
    """Conversations of several lengths, of which all but the first tokens are the answer."""
    lengths = np.random.default_rng(seed).integers(NUM_PROMPT_TOKENS + 2, longest, count).tolist()
    rows = tiny_prompts(lengths, seed=seed)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    supervised = np.ones(int(starts[-1]), bool)
    for start in starts[:-1].tolist():
        supervised[start : start + NUM_PROMPT_TOKENS] = False
    return Texts(np.concatenate([np.array(row, np.int32) for row in rows]), supervised, starts)


def make_capture(target: LoadedTarget, texts: Texts, **changes: Any) -> FeatureCapture:
    """Shards of a few conversations; `changes` replace fields of the settings."""
    fields: dict[str, Any] = {
        "layer_ids": LAYERS,
        "keeps_hidden": True,
        "batch_tokens": 256,
        "shard_bytes": 40_000,
        "high_bytes": 200_000,
        "low_bytes": 50_000,
        "timeout_s": 30.0,
    }
    settings = CaptureSettings(**{**fields, **changes})
    record = feature_record(
        target,
        [texts],
        layer_ids=settings.layer_ids,
        stream=settings.stream,
        keeps_hidden=settings.keeps_hidden,
        max_length=64,
    )
    return FeatureCapture(target, texts, settings, record)


def write_all(folder: Path, capture: FeatureCapture) -> ShardFolder:
    """All shards, by the threads of one process; not finished."""
    shards = capture.open(folder)
    capture.run(shards)
    return shards


def files_of(folder: Path) -> Mapping[str, bytes]:
    """What a folder holds, without the lock and what a killed process left half-written."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def shard_files(folder: Path) -> Mapping[str, bytes]:
    """The same without the manifest, which tells a finished folder from an unfinished one."""
    return {name: content for name, content in files_of(folder).items() if name != MANIFEST_FILE}


@dataclass(frozen=True)
class TinyJob:
    """A capture in another process.

    Attributes:
        folder: of the features.
        dies_at: shard in the middle of which its process is killed, once.
    """

    folder: Path
    dies_at: int | None = None

    def open(self) -> Callable[[int], object]:
        """Make the target anew; returns what writes a shard."""
        torch.set_num_threads(1)
        capture = make_capture(small_target(), random_texts())
        shards = capture.open(self.folder)

        def write(index: int) -> None:
            mark = self.folder.with_suffix(".died")
            if index == self.dies_at and not mark.exists():
                mark.touch()
                shards.write(index, _half_a_shard)
            capture.write(shards, index)

        return write


def _half_a_shard(path: Path) -> Mapping[str, int]:
    path.write_bytes(b"half a shard")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")
