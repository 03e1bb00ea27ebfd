"""Runs that go on from a stored drafter: from its very weights, in every family, only where the shape is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_run import random_rows, tiny_settings, write_drafter, write_token_file
from tests.unit.training.runs import exported, metrics, state
from tests.unit.training.test_families import FAMILIES

from paceline.configuration.run import TrainRun
from paceline.errors import CheckpointError, ConfigError
from paceline.models.loading import LoadedTarget, load_drafter
from paceline.training.loop import train
from paceline.training.preparing import prepare_run
from paceline.training.ranks import Ranks

ALONE = Ranks.alone(torch.device("cpu"))


def settings(folder: Path, data: Path, family: str = "dflash", **changes: Any) -> TrainRun:
    drafter = {f"drafter_{key}": value for key, value in FAMILIES.get(family, {}).items()}
    return tiny_settings(folder, data, **(drafter | changes))


@pytest.mark.parametrize("family", ["dflash", *FAMILIES])
def test_a_run_begins_with_the_weights_of_the_folder(
    target: LoadedTarget, tmp_path: Path, data: Path, family: str
) -> None:
    first = train(settings(tmp_path / "first", data, family), target)
    assert first.drafter is not None
    run = settings(tmp_path / "second", data, family, drafter_start_from=str(first.drafter))
    parts = prepare_run(run, target, ALONE)
    served = load_drafter(str(first.drafter), target).model.checkpoint_parameters()
    begun = parts.drafter.checkpoint_parameters()
    assert set(begun) == set(served)
    assert all(torch.equal(begun[name], served[name].float()) for name in served)
    assert all(value.dtype == torch.float32 and value.requires_grad for value in begun.values())
    if parts.contract.has_vocabulary_map:
        ids = load_drafter(str(first.drafter), target).model.vocabulary.target_ids_V
        assert ids is not None and torch.equal(parts.drafter.vocabulary.target_ids_V, ids)


def test_it_goes_on_learning_and_its_record_says_from_what(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    first = train(settings(tmp_path / "first", data, schedule_num_steps=60), target)
    run = settings(tmp_path / "second", data, drafter_start_from=str(first.drafter))
    anew = settings(tmp_path / "anew", data)
    for each in (run, anew):
        train(each, target)
    losses = {each.output.name: next(row["loss"] for row in metrics(each) if "loss" in row) for each in (run, anew)}
    assert losses["second"] < losses["anew"], "the first steps were learnt already"
    record = json.loads(exported(run)["provenance.json"])
    assert first.drafter is not None and str(first.drafter) not in json.dumps(record)
    assert (
        record["start"] == json.loads((first.drafter / "provenance.json").read_text()) and record["start"]["step"] == 60
    )
    assert len(record["start_weights_sha256"]) == 64
    assert not {"start", "start_weights_sha256"} & json.loads(exported(anew)["provenance.json"]).keys()


def test_a_resume_needs_the_same_weights_wherever_they_lie(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    first = train(settings(tmp_path / "first", data), target)
    assert first.drafter is not None
    run = settings(tmp_path / "second", data, drafter_start_from=str(first.drafter))
    train(run, target)
    moved = first.drafter.rename(tmp_path / "moved")
    again = settings(tmp_path / "second", data, drafter_start_from=str(moved))
    before = state(run, 20)
    assert train(again, target, resume=True).is_finished
    assert all(torch.equal(value, before[name]) for name, value in state(again, 20).items())
    other = train(settings(tmp_path / "other", data, seed=1), target)
    for start in (str(other.drafter), None):
        wrong = settings(tmp_path / "second", data, drafter_start_from=start)
        with pytest.raises(ConfigError, match="start_weights_sha256"):
            train(wrong, target, resume=True)


def test_another_shape_is_refused_with_every_difference(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    first = train(settings(tmp_path / "first", data), target)
    run = settings(
        tmp_path / "second", data, drafter_start_from=str(first.drafter), drafter_block_size=5, drafter_num_layers=2
    )
    with pytest.raises(ConfigError, match="block_size is 4 there, 5 in this run") as caught:
        train(run, target)
    assert "num_layers is 1 there, 2 in this run" in str(caught.value) and not run.output.exists()


def test_what_was_held_out_stays_held_out(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    """Through a chain of runs, and only in files that they share."""
    first = train(settings(tmp_path / "first", data, data_hold_out=6), target)
    fewer = {"data_hold_out": 4, "drafter_start_from": str(first.drafter)}
    with pytest.raises(ConfigError, match=r"hold_out 6; with 4 this run would learn conversations of data\.npz that"):
        train(settings(tmp_path / "second", data, **fewer), target)
    with pytest.raises(ConfigError, match=r"with 8 this run would measure on those of data\.npz not held out then"):
        train(settings(tmp_path / "second", data, **(fewer | {"data_hold_out": 8})), target)
    other = write_token_file(tmp_path / "other.npz", random_rows(24, 20, vocab_size=400, seed=1), num_prompt_tokens=4)
    second = train(settings(tmp_path / "second", other, **fewer), target)
    assert second.is_finished
    fewer["drafter_start_from"] = str(second.drafter)
    with pytest.raises(ConfigError, match="hold_out 6"):
        train(settings(tmp_path / "third", data.rename(tmp_path / "renamed.npz"), **fewer), target)
    assert not (tmp_path / "third").exists()


def test_files_of_one_name_are_told_apart(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    (tmp_path / "there").mkdir()
    rows = random_rows(24, 20, vocab_size=400, seed=1)
    namesake = write_token_file(tmp_path / "there" / "data.npz", rows, num_prompt_tokens=4)
    both = {"data_files": [str(data), str(namesake)], "data_hold_out": 6}
    first = train(settings(tmp_path / "first", data, **both), target)
    for index, file in enumerate((data, namesake)):
        with pytest.raises(ConfigError, match="hold_out 6; with 4"):
            run = settings(tmp_path / f"next-{index}", file, drafter_start_from=str(first.drafter), data_hold_out=4)
            train(run, target)


def test_a_drafter_without_a_record_is_taken_with_a_warning(
    target: LoadedTarget, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = train(settings(tmp_path / "first", data), target)
    assert first.drafter is not None
    record = first.drafter / "provenance.json"
    known = json.loads(record.read_text())
    record.write_text(json.dumps(known | {"step": float("nan")}))
    run = settings(tmp_path / "second", data, drafter_start_from=str(first.drafter))
    with pytest.raises(CheckpointError, match="a number that JSON does not have"):
        train(run, target)
    record.unlink()
    assert "does not say what it was trained on" not in caplog.text
    assert train(run, target).is_finished
    assert "does not say what it was trained on" in caplog.text


def test_folders_that_are_mixed_up_are_told(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    first = train(settings(tmp_path / "first", data), target)
    assert first.drafter is not None
    for output in (first.drafter, first.drafter / "next"):
        with pytest.raises(ConfigError, match=r"lies in drafter\.start_from"):
            train(settings(output, data, drafter_start_from=str(first.drafter)), target)
    with pytest.raises(CheckpointError, match="the folder of a run") as caught:
        train(settings(tmp_path / "second", data, drafter_start_from=str(tmp_path / "first")), target)
    assert str(first.drafter) in str(caught.value.hint)
    own = write_drafter(
        tmp_path / "own", target, num_layers=1, intermediate_size=32, target_layer_ids=(0, 2), has_own_embedding=True
    )
    with pytest.raises(ConfigError, match="has_own_embedding is True there") as caught:
        train(settings(tmp_path / "second", data, drafter_start_from=str(own)), target)
    assert "input rows of its own" in str(caught.value.hint)


def test_a_vocabulary_that_covers_too_little_is_refused(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    first = train(settings(tmp_path / "first", data, "eagle3-few-ids"), target)
    run = settings(
        tmp_path / "second",
        data,
        "eagle3-few-ids",
        drafter_start_from=str(first.drafter),
        drafter_min_vocab_coverage=0.99,
    )
    with pytest.raises(ConfigError, match=r"less than drafter\.min_vocab_coverage"):
        train(run, target)


def test_a_damaged_folder_is_one_clear_error(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    first = train(settings(tmp_path / "first", data), target)
    assert first.drafter is not None
    weights = first.drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        train(settings(tmp_path / "second", data, drafter_start_from=str(first.drafter)), target)
