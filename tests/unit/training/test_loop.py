"""A whole run on a tiny target: exact resume, stopping, and what may not be resumed or started."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file
from tests.unit.training.runs import (
    Act,
    Crash,
    crash_at,
    differs,
    exported,
    files_below,
    metrics,
    nothing,
    signal_at,
    state,
    timeless,
)

from paceline.checkpoint.calibration import Calibration, read_calibration
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError, DataError
from paceline.models.loading import LoadedTarget
from paceline.training import loop, tracking
from paceline.training.loop import Outcome, TrainingProgress, train
from paceline.training.resume import load_state, save_state


def test_100_steps_a_resume_and_100_steps_equal_200_bitwise(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    changes = {"schedule_num_steps": 200, "checkpoint_every": 100, "evaluate_every": 60}
    whole = tiny_settings(tmp_path / "whole", data, **changes)
    parts = tiny_settings(tmp_path / "parts", data, **changes)
    finished = train(whole, target)
    assert finished == Outcome(200, True, whole.output / "checkpoints" / "step-0000200", whole.output / "drafter")
    at_step(crash_at(130))
    with pytest.raises(Crash):
        train(parts, target)
    assert metrics(parts)[-1]["step"] == 120, "the first attempt got further than its checkpoint"
    at_step(nothing)
    assert train(parts, target, resume=True).is_finished
    assert differs(state(whole, 200), state(parts, 200)) == []
    assert timeless(whole) == timeless(parts)
    ours, theirs = exported(whole), exported(parts)
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    assert ours == theirs


def test_a_resume_that_forgets_the_moments_would_be_seen(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault of the test above, at a tenth of its length."""
    whole, parts = tiny_settings(tmp_path / "whole", data), tiny_settings(tmp_path / "parts", data)
    train(whole, target)
    at_step(crash_at(13))
    with pytest.raises(Crash):
        train(parts, target)
    restore = load_state

    def forgetful(folder: Path, drafter: Any, optimizer: torch.optim.Optimizer, identity: Any) -> Any:
        progress = restore(folder, drafter, optimizer, identity)
        optimizer.state.clear()
        return progress

    monkeypatch.setattr(loop, "load_state", forgetful)
    at_step(nothing)
    train(parts, target, resume=True)
    assert differs(state(whole, 20), state(parts, 20))


def test_accumulated_parts_are_resumed_too(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    """Data order and anchors are functions of step and part, so nothing of them is saved."""
    changes = {"schedule_accumulation": 2, "schedule_num_steps": 8, "checkpoint_every": 3, "objective_loss": "ce"}
    whole = tiny_settings(tmp_path / "whole", data, **changes)
    parts = tiny_settings(tmp_path / "parts", data, **changes)
    train(whole, target)
    at_step(crash_at(5))
    with pytest.raises(Crash):
        train(parts, target)
    at_step(nothing)
    train(parts, target, resume=True)
    assert differs(state(whole, 8), state(parts, 8)) == []


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_signal_saves_at_the_step_border_and_resuming_ends_bit_equal(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None], times: int
) -> None:
    """`timeout` signals the process and its group, so one request arrives twice: it once lost a checkpoint."""
    whole, parts = tiny_settings(tmp_path / "whole", data), tiny_settings(tmp_path / "parts", data)
    train(whole, target)
    at_step(signal_at(7, times))
    stopped = train(parts, target)
    assert stopped == Outcome(7, False, parts.output / "checkpoints" / "step-0000007", None)
    assert not (parts.output / "drafter").exists()
    assert metrics(parts)[-1]["step"] == 7, "what was measured up to the stop is not lost"
    at_step(nothing)
    assert train(parts, target, resume=True).is_finished
    assert differs(state(whole, 20), state(parts, 20)) == []
    assert exported(whole)["model.safetensors"] == exported(parts)["model.safetensors"]


def test_a_signal_in_the_last_step_still_finishes(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=4)
    at_step(signal_at(4))
    outcome = train(run, target)
    assert outcome.is_finished and outcome.drafter == run.output / "drafter"


def test_a_signal_while_saving_waits_for_the_next_border(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step it comes in was saved on schedule; the answer comes one step later and is saved as well."""
    run = tiny_settings(tmp_path / "run", data)
    save = save_state

    def interrupted(*arguments: Any, **options: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return save(*arguments, **options)

    monkeypatch.setattr(loop, "save_state", interrupted)
    outcome = train(run, target)
    assert (outcome.step, outcome.is_finished) == (11, False)
    assert outcome.checkpoint is not None and outcome.checkpoint.name == "step-0000011"


def test_a_finished_run_resumes_into_the_same_export(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    """Somebody who deleted the folder, or whose export failed, gets it from the last checkpoint."""
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=4)
    train(run, target)
    before = exported(run)
    for file in (run.output / "drafter").iterdir():
        file.unlink()
    outcome = train(run, target, resume=True)
    assert outcome.is_finished and exported(run) == before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"schedule_num_steps": 24}, "schedule.num_steps was 20, is 24"),
        ({"schedule_batch_size": 3}, "schedule.batch_size"),
        ({"optimizer_learning_rate": 2e-3}, "optimizer.learning_rate was 0.001, is 0.002"),
        ({"drafter_intermediate_size": 48}, "drafter.intermediate_size"),
        ({"drafter_target_layer_ids": [1, 2]}, "drafter.target_layer_ids"),
        ({"objective_gamma": None}, "objective.gamma was 4.0, is None"),
        ({"data_max_length": 20}, "data.max_length"),
    ],
)
def test_resuming_with_other_settings_is_refused_by_name(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None], change: dict[str, Any], key: str
) -> None:
    run = tiny_settings(tmp_path / "run", data)
    at_step(signal_at(1))
    train(run, target)
    before = {path.name: path.read_bytes() for path in run.output.iterdir() if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        train(tiny_settings(tmp_path / "run", data, **change), target, resume=True)
    assert key in caught.value.message
    after = {path.name: path.read_bytes() for path in run.output.iterdir() if path.is_file()}
    assert after == before, "a refused run leaves the settings and metrics of the other one"


def test_resuming_with_other_data_or_another_target_is_refused(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    run = tiny_settings(tmp_path / "run", data)
    at_step(signal_at(1))
    train(run, target)
    write_token_file(data, random_rows(40, 24, vocab_size=400, seed=9), num_prompt_tokens=6)
    with pytest.raises(ConfigError, match="data_sha256"):
        train(run, target, resume=True)
    write_token_file(data, random_rows(40, 24, vocab_size=400), num_prompt_tokens=6)
    with pytest.raises(ConfigError, match="target_weights_sha256"):
        train(run, chat_target(1, hidden_size=32, intermediate_size=48, head_size=8), resume=True)


def test_evaluation_and_checkpoint_settings_may_change(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    run = tiny_settings(tmp_path / "run", data)
    at_step(signal_at(5))
    train(run, target)
    at_step(nothing)
    again = tiny_settings(tmp_path / "run", data, evaluate_every=8, checkpoint_every=4)
    assert train(again, target, resume=True).is_finished


def test_resuming_nothing_is_refused(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        train(tiny_settings(tmp_path / "run", data), target, resume=True)
    assert not (tmp_path / "run").exists()


def test_starting_over_a_run_is_refused(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=4)
    train(run, target)
    before = files_below(run.output), (run.output / "config.toml").read_text()
    with pytest.raises(ConfigError, match="already holds a run, saved at step-0000004"):
        train(tiny_settings(tmp_path / "run", data, seed=3), target)
    assert (files_below(run.output), (run.output / "config.toml").read_text()) == before


def test_checkpoints_beyond_the_count_go(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    run = tiny_settings(tmp_path / "run", data, checkpoint_every=4, checkpoint_keep=3, schedule_num_steps=18)
    train(run, target)
    names = sorted(path.name for path in (run.output / "checkpoints").iterdir())
    assert names == ["step-0000012", "step-0000016", "step-0000018"]


def test_settings_and_rows_are_on_disk(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    from paceline.configuration.load import load_settings

    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=45, evaluate_every=30)
    train(run, target)
    assert load_settings(TrainRun, run.output / "config.toml", []) == run
    found = [(row["kind"], row["step"]) for row in metrics(run)]
    # Rows of training end at every 20th step, at every checkpoint and at the end.
    steps = [10, 20, 30, 40, 45]
    assert [step for kind, step in found if kind == "train"] == steps
    assert [step for kind, step in found if kind == "evaluate"] == [30, 45]
    trained = [row for row in metrics(run) if row["kind"] == "train"]
    assert [row["num_steps"] for row in trained] == [10, 10, 10, 10, 5]
    assert all(row["num_bad_steps"] == 0 and len(row["accuracy_by_row"]) == 3 for row in trained)
    evaluated = [row for row in metrics(run) if row["kind"] == "evaluate"][-1]["data.npz"]
    assert evaluated["num_conversations"] == 4 and 1.0 <= evaluated["acceptance_length"] <= 4.0


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"drafter_target_layer_ids": [0, 3]}, ConfigError, "ends at 3; the target has 4 layers, of which 2"),
        ({"drafter_mask_token_id": 512}, ConfigError, "mask_token_id 512 is outside the vocabulary of 512"),
        ({"data_hold_out": 40, "evaluate_num_conversations": 0}, DataError, "nothing is left to train on"),
        ({"schedule_batch_size": 37}, DataError, "36 conversations to train on, schedule.batch_size is 37"),
    ],
)
def test_impossible_runs(
    target: LoadedTarget, tmp_path: Path, data: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        train(tiny_settings(tmp_path / "run", data, **changes), target)
    assert not (tmp_path / "run").exists()


def test_drafters_are_exported_on_the_way_and_are_those_of_their_step(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=12, checkpoint_export_every=4)
    train(run, target)
    exports = run.output / "exports"
    assert sorted(path.name for path in exports.iterdir()) == ["step-0000004", "step-0000008"], "12 is the end itself"
    # A run that crashes behind its export and before its next checkpoint writes the same folder again.
    broken = tiny_settings(tmp_path / "broken", data, schedule_num_steps=12, checkpoint_export_every=4)
    at_step(crash_at(9))
    with pytest.raises(Crash):
        train(broken, target)
    at_step(nothing)
    train(broken, target)
    names = ("model.safetensors", "fingerprint.safetensors", "config.json", "provenance.json")
    for step in exports.iterdir():
        again = broken.output / "exports" / step.name
        assert [(step / name).read_bytes() for name in names] == [(again / name).read_bytes() for name in names]
    first, second = ((exports / step / names[0]).read_bytes() for step in ("step-0000004", "step-0000008"))
    assert first != second != exported(run)[names[0]]


def test_exports_carry_the_calibration_of_their_own_weights(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def found(row: Mapping[str, object]) -> Calibration:
        asked.append(row["step"])
        return Calibration(method="walk", num_blocks=200 + int(str(row["step"])), per_position=(0.5,))

    monkeypatch.setattr(loop, "calibration_of", found)
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=12, checkpoint_export_every=4, evaluate_every=8)
    train(run, target)
    folders = {step: run.output / "exports" / f"step-000000{step}" for step in (4, 8)} | {12: run.output / "drafter"}
    read = {step: read_calibration(folder) for step, folder in folders.items()}
    assert read[4] is None, "nothing was measured there"
    assert [read[step].num_blocks for step in (8, 12)] == [208, 212] and asked == [8, 12]


def test_progress_is_told_after_every_step(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=12, evaluate_every=5)
    told: list[TrainingProgress] = []
    at_step(signal_at(7))
    train(run, target, on_progress=told.append)
    at_step(nothing)
    train(run, target, resume=True, on_progress=told.append)
    assert [(p.step, p.row and p.row["kind"]) for p in told] == [
        *((step, None) for step in range(1, 5)),
        (5, "evaluate"),
        (6, None),
        (7, "train"),
        *((step, None) for step in (8, 9)),
        (10, "train"),
        (10, "evaluate"),
        (11, None),
        (12, "train"),
        (12, "evaluate"),
    ]
    assert {p.num_steps for p in told} == {12}
    assert json.loads(json.dumps([p.row for p in told if p.row is not None])) == metrics(run)


def test_neither_evaluating_nor_saving_counts_as_a_step(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes an hour by the clock of the rows, and shows in no row of the steps."""
    hours = [0.0]
    monkeypatch.setattr(tracking, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600 * hours[0]))
    for name in ("_evaluate", "_save", "_export"):
        real = getattr(loop._Run, name)

        def slow(*arguments: Any, act: Callable[..., Any] = real, **options: Any) -> Any:
            hours[0] += 1
            return act(*arguments, **options)

        monkeypatch.setattr(loop._Run, name, slow)
    changes = {"evaluate_every": 2, "checkpoint_every": 4, "checkpoint_export_every": 4, "schedule_num_steps": 8}
    run = tiny_settings(tmp_path / "run", data, **changes)
    train(run, target)
    assert hours[0] == 4 + 2 + 2
    assert all(row["seconds"] < 3600 for row in metrics(run) if row["kind"] == "train")


def test_evaluation_draws_nothing_that_training_draws(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    often = tiny_settings(tmp_path / "often", data, schedule_num_steps=6, evaluate_every=1)
    never = tiny_settings(tmp_path / "never", data, schedule_num_steps=6, evaluate_num_conversations=0)
    train(often, target)
    train(never, target)
    assert differs(state(often, 6), state(never, 6)) == []
