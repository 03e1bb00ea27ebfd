"""The folder of a run: one process at a time, whatever becomes of it, and a record of what was asked for."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.tiny_run import tiny_settings
from tests.unit.training.processes import start
from tests.unit.training.runs import files_below

from paceline.errors import ConfigError
from paceline.models.loading import LoadedTarget
from paceline.training import run_folder
from paceline.training.loop import train
from paceline.training.run_folder import locked, prepare_folder


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "run"),
        pytest.raises(ConfigError, match="is being trained into by another process"),
        locked(tmp_path / "run"),
    ):
        pass
    assert files_below(tmp_path) == ["run"], "the lock leaves nothing"
    with locked(tmp_path / "run"):
        pass


def hold_and_die(folder: Path) -> None:
    with locked(folder):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    process = start(hold_and_die, tmp_path / "run")
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with locked(tmp_path / "run"):
        pass
    assert files_below(tmp_path / "run") == []


def test_many_at_once_take_turns(tmp_path: Path) -> None:
    inside, most, done = [0], [0], [0]

    def enter() -> None:
        while done[0] < 200:
            try:
                with locked(tmp_path / "run"):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    done[0] += 1
                    inside[0] -= 1
            except ConfigError:
                continue

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_a_run_that_is_being_trained_is_left_alone(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=4)
    with locked(run.output):
        with pytest.raises(ConfigError, match="is being trained into"):
            train(run, target)
        assert files_below(run.output) == []
    assert train(run, target).is_finished


def test_without_a_lock_two_runs_would_share_a_folder(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault of the test above."""
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=4)
    with locked(run.output):
        monkeypatch.setattr(run_folder.fcntl, "flock", lambda *_: None)
        assert train(run, target).is_finished


def test_command_and_versions_are_recorded(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=2)
    sys_argv, sys.argv = sys.argv, ["paceline", "train", "my run.toml"]
    try:
        train(run, target)
        train(run, target, resume=True)
    finally:
        sys.argv = sys_argv
    assert (run.output / "command.txt").read_text() == "paceline train 'my run.toml'\n" * 2
    assert json.loads((run.output / "versions.json").read_text())["torch"] == str(torch.__version__)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path, data: Path) -> None:
    run = tiny_settings(tmp_path / "run", data)
    kept = ["checkpoints/step-0000010/state.json", "notes.md", "exports/step-0000010/config.json"]
    left = [
        "checkpoints/step-0000020.unfinished/state.safetensors",
        ".metrics.jsonl.tmp-0a1b2c3d",
        "drafter.tmp-0a1b2c3d/config.json",
        "drafter.old-0a1b2c3d/config.json",
        "exports/step-0000010.old-0a1b2c3d/config.json",
        "exports/step-0000020.tmp-0a1b2c3d/config.json",
    ]
    for name in kept + left:
        path = run.output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    prepare_folder(run, ["paceline"])
    found = [str(path.relative_to(run.output)) for path in run.output.rglob("*") if path.is_file()]
    written = ["command.txt", "config.toml", "versions.json"]
    # A drafter that was moved aside for one that never came is back.
    assert sorted(found) == sorted([*kept, *written, "drafter/config.json"])
    folders = sorted(path.name for path in run.output.iterdir() if path.is_dir())
    assert folders == ["checkpoints", "drafter", "exports"]
    assert [path.name for path in (run.output / "exports").iterdir()] == ["step-0000010"]
