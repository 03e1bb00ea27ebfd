"""Kill -9 at 20 random moments of a capture, then resume: equal bytes, no shard lost, no conversation repeated."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests.unit.capture.chatting import capture_run, chat_target

from paceline.capture.prompts import PromptCapture, read_captured
from paceline.capture.shards import ShardFolder
from paceline.models.layers import set_linear_mode
from paceline.models.loading import LoadedTarget

NUM_KILLS, NUM_SHARDS = 20, 30


def _capture(folder: Path, target: LoadedTarget) -> None:
    run = capture_run(folder, self_chat=8 * NUM_SHARDS, shard_size=8, max_user_tokens=40, backend="lockstep")
    PromptCapture(run, target).run_all()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_capture_survives_kills(tmp_path: Path) -> None:
    target = chat_target(num_layers=1)
    set_linear_mode(target.model, "plain")
    began = time.perf_counter()
    _capture(tmp_path / "whole", target)
    took_s = time.perf_counter() - began
    whole = _files(tmp_path / "whole")
    moments = random.Random(7)
    context = multiprocessing.get_context("fork")  # torch and the target are there already
    num_kills = num_finished = 0
    folder = tmp_path / "killed-0"
    while num_kills < NUM_KILLS:
        process = context.Process(target=_capture, args=(folder, target))
        process.start()
        process.join(moments.uniform(0.0, took_s / 5))
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        if process.exitcode == -signal.SIGKILL:
            num_kills += 1
            continue
        assert process.exitcode == 0
        assert _files(folder) == whole
        num_finished += 1
        folder = tmp_path / f"killed-{num_finished}"
    _capture(folder, target)
    assert _files(folder) == whole
    shards = ShardFolder.read(folder)
    assert len(shards.records()) == NUM_SHARDS
    rows = [np.load(shards.path(index)) for index in range(NUM_SHARDS)]
    names = [name for arrays in rows for key in ("id", "dropped_id") for name in arrays[key].tolist()]
    for arrays in rows:
        arrays.close()
    assert sorted(names) == sorted(f"self-{index}" for index in range(8 * NUM_SHARDS))
    assert len(read_captured(folder)) > NUM_SHARDS


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
