"""A whole run on stored features: bitwise the run beside the target, its evaluation and its resume included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file
from tests.unit.training.runs import Act, Crash, crash_at, differs, exported, nothing, state, timeless

from paceline.capture.feature_plan import CaptureSettings
from paceline.capture.feature_record import feature_record
from paceline.capture.features import FeatureCapture, finish_capture
from paceline.configuration.run import TrainRun
from paceline.errors import CompatibilityError, ConfigError
from paceline.models.layers import set_linear_mode
from paceline.models.loading import LoadedTarget
from paceline.training.contract import drafter_contract
from paceline.training.data import read_conversations
from paceline.training.feature_source import needs_last_hidden, texts_of
from paceline.training.loop import train


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    """In the arithmetic in which a token's states depend on its conversation alone."""
    from dataclasses import replace

    plain = chat_target(vocab_size=512, hidden_size=32, intermediate_size=48, head_size=8)
    set_linear_mode(plain.model, "row_invariant")
    return replace(plain, linear_mode="row_invariant")


def capture(run: TrainRun, target: LoadedTarget, folder: Path) -> None:
    texts = texts_of(read_conversations(run.data.files[0], vocab_size=512), run.data.max_length)
    layers = drafter_contract(run, target.contract).target_layer_ids
    keeps_hidden = needs_last_hidden(run)
    settings = CaptureSettings(layer_ids=layers, keeps_hidden=keeps_hidden, batch_tokens=600, shard_bytes=40_000)
    record = feature_record(
        target,
        [texts],
        layer_ids=layers,
        stream=settings.stream,
        keeps_hidden=keeps_hidden,
        max_length=run.data.max_length,
    )
    made = FeatureCapture(target, texts, settings, record)
    shards = made.open(folder)
    made.run(shards)
    finish_capture(shards)


@pytest.mark.parametrize("packed", [False, True])
def test_a_run_on_stored_features_is_the_run_beside_the_target(
    target: LoadedTarget, tmp_path: Path, at_step: Callable[[Act], None], packed: bool
) -> None:
    rows = [row[: 10 + index % 12] for index, row in enumerate(random_rows(40, 24, vocab_size=400))]
    data = write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=4)
    changes: dict[str, Any] = {"schedule_num_steps": 12, "checkpoint_every": 5, "evaluate_every": 6}
    changes |= {"data_packed": packed, "data_max_length": 48}
    online = tiny_settings(tmp_path / "online", data, **changes)
    stored = tiny_settings(tmp_path / "stored", data, data_features=str(tmp_path / "features"), **changes)
    capture(online, target, tmp_path / "features")
    train(online, target)
    at_step(crash_at(8))
    with pytest.raises(Crash):
        train(stored, target)
    at_step(nothing)
    train(stored, target, resume=True)
    assert differs(state(stored, 12), state(online, 12)) == []
    assert timeless(stored) == timeless(online)
    assert exported(stored)["model.safetensors"] == exported(online)["model.safetensors"]


def test_taps_alone_are_enough_for_cross_entropy(target: LoadedTarget, tmp_path: Path) -> None:
    """Rows of evaluation then lack what needs the target's last states, instead of holding NaN."""
    data = write_token_file(tmp_path / "data.npz", random_rows(40, 24, vocab_size=400), num_prompt_tokens=4)
    changes: dict[str, Any] = {"schedule_num_steps": 4, "evaluate_every": 2, "objective_loss": "ce"}
    changes |= {"data_min_supervised": 12}
    online = tiny_settings(tmp_path / "online", data, **changes)
    stored = tiny_settings(tmp_path / "stored", data, data_features=str(tmp_path / "features"), **changes)
    assert not needs_last_hidden(online)
    capture(online, target, tmp_path / "features")
    train(online, target)
    train(stored, target)
    assert differs(state(stored, 4), state(online, 4)) == []
    rows = [[row for row in timeless(run) if row["kind"] == "evaluate"] for run in (online, stored)]
    lacking = [set(one["data.npz"]) - set(other["data.npz"]) for one, other in zip(*rows, strict=True)]
    assert lacking == [{"kl_by_draft", "acceptance_by_draft"}] * 2


def test_conversations_with_too_little_to_learn_are_still_in_the_folder(target: LoadedTarget, tmp_path: Path) -> None:
    rows = [row[: 8 + index % 16] for index, row in enumerate(random_rows(40, 24, vocab_size=400))]
    data = write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=4)
    changes: dict[str, Any] = {"schedule_num_steps": 2, "data_min_supervised": 10}
    run = tiny_settings(tmp_path / "run", data, data_features=str(tmp_path / "features"), **changes)
    capture(run, target, tmp_path / "features")
    assert train(run, target).is_finished


def test_features_of_another_target_are_refused_before_anything_is_written(
    target: LoadedTarget, tmp_path: Path, data: Path
) -> None:
    run = tiny_settings(tmp_path / "run", data, data_features=str(tmp_path / "features"))
    capture(run, target, tmp_path / "features")
    with pytest.raises(CompatibilityError):
        train(run, chat_target(5, vocab_size=512, hidden_size=32, intermediate_size=48, head_size=8))
    assert not run.output.exists()


def test_a_run_is_not_resumed_from_another_source(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None]
) -> None:
    """They agree to rounding only, unless the arithmetic is row-invariant."""
    online = tiny_settings(tmp_path / "run", data, schedule_num_steps=4, checkpoint_every=1)
    at_step(crash_at(3))
    with pytest.raises(Crash):
        train(online, target)
    stored = tiny_settings(
        tmp_path / "run", data, schedule_num_steps=4, checkpoint_every=1, data_features=str(tmp_path / "features")
    )
    capture(stored, target, tmp_path / "features")
    at_step(nothing)
    with pytest.raises(ConfigError, match=r"data\.features was False, is True"):
        train(stored, target, resume=True)
