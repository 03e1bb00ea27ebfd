"""A whole run on a tiny target: steps that are not finite, full disks, and what is exported in the end."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file
from tests.unit.training.runs import (
    Act,
    differs,
    files_below,
    metrics,
    nothing,
    state,
    timeless,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paceline.checkpoint.export import split_fused, write_drafter_folder
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.checkpoint.weights import open_safetensors, open_safetensors_file
from paceline.configuration.run import TrainRun
from paceline.errors import CapacityError, NumericError
from paceline.models.building import initialise_drafter
from paceline.models.fingerprint import PROBE_TOKENS
from paceline.models.loading import LoadedTarget, load_drafter
from paceline.training import exporting, loop
from paceline.training.contract import drafter_contract
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures
from paceline.training.loop import train
from paceline.training.objective import Features
from paceline.training.optimizer import RateSchedule, make_optimizer
from paceline.training.step import StepResult, train_step


def poison(monkeypatch: pytest.MonkeyPatch, bad_calls: set[int]) -> None:
    """Features of chosen batches, counted from 0, hold a NaN."""
    original, calls = TargetFeatures.__call__, iter(range(10**6))

    def features(self: TargetFeatures, batch: Batch) -> Features:
        found = original(self, batch)
        if next(calls) in bad_calls:
            found.taps[0][0, 0, 0] = float("nan")
        return found

    monkeypatch.setattr(TargetFeatures, "__call__", features)


def test_a_non_finite_step_is_skipped_and_counted(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_settings(tmp_path / "run", data, evaluate_num_conversations=0)
    used: list[float] = []
    original = train_step

    def step(*arguments: Any) -> StepResult:
        used.append(arguments[5])
        return original(*arguments)

    monkeypatch.setattr(loop, "train_step", step)
    poison(monkeypatch, {3, 4, 9})
    assert train(run, target).is_finished
    rows = [row for row in metrics(run) if row["kind"] == "train"]
    assert sum(row["num_bad_steps"] for row in rows) == 3
    assert [row["step"] for row in rows if row["num_bad_steps"]] == [4, 5, 10]
    # A row of bad steps alone has no mean; the others have theirs.
    assert [row["loss"] is None for row in rows] == [row["num_bad_steps"] == row["num_steps"] for row in rows]
    saved = json.loads((run.output / "checkpoints" / "step-0000020" / "state.json").read_text())
    assert (saved["step"], saved["num_updates"]) == (20, 17)
    rates = RateSchedule(1e-3, 20, 0.04, 0.2, 0.05)
    assert used == [rates.rate(update) for update in (0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 7, *range(8, 17))]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state(run, 20).values())


def test_three_non_finite_steps_in_a_row_end_the_run_with_a_dump(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_settings(tmp_path / "run", data, checkpoint_every=5)
    poison(monkeypatch, {6, 7, 8})
    with pytest.raises(NumericError, match="3 steps in a row, last at step 8") as caught:
        train(run, target)
    dump = run.output / "non-finite-step-8.json"
    assert str(dump) in str(caught.value)
    ids = json.loads(dump.read_text())
    assert len(ids) == 1 and len(ids[0]) == 2 and len(ids[0][0]) == 24
    assert [row["num_bad_steps"] for row in metrics(run)][-3:] == [1, 1, 1]
    assert [path.name for path in (run.output / "checkpoints").iterdir()] == ["step-0000005"]
    assert not (run.output / "drafter").exists()


def test_two_in_a_row_and_two_more_do_not(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1, 2, 4, 5})
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=8, evaluate_num_conversations=0)
    assert train(run, target).is_finished


def fill_disk_at(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool]) -> None:
    flush = os.fsync

    def sync(descriptor: int) -> None:
        if is_full():
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", sync)


def test_a_full_disk_while_saving_keeps_the_earlier_checkpoint(
    target: LoadedTarget, tmp_path: Path, data: Path, at_step: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = tiny_settings(tmp_path / "run", data), tiny_settings(tmp_path / "whole", data)
    train(whole, target)
    done: list[int] = []
    at_step(done.append)
    fill_disk_at(monkeypatch, lambda: len(done) > 15)
    with pytest.raises(CapacityError, match="disk is full"):
        train(run, target)
    assert files_below(run.output / "checkpoints") == [
        "step-0000010",
        "step-0000010/state.json",
        "step-0000010/state.safetensors",
    ]
    assert files_below(run.output) == [
        "checkpoints",
        *(f"checkpoints/{name}" for name in files_below(run.output / "checkpoints")),
        "command.txt",
        "config.toml",
        "metrics.jsonl",
        "versions.json",
    ]
    done.clear()
    at_step(nothing)
    train(run, target, resume=True)
    assert differs(state(run, 20), state(whole, 20)) == [] and timeless(run) == timeless(whole)


def test_a_full_disk_while_exporting_leaves_no_folder(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=4)
    is_full = [False]
    fill_disk_at(monkeypatch, lambda: is_full[0])
    export = write_drafter_folder

    def write(*arguments: Any, **options: Any) -> None:
        is_full[0] = True
        export(*arguments, **options)

    monkeypatch.setattr(exporting, "write_drafter_folder", write)
    with pytest.raises(CapacityError):
        train(run, target)
    names = ["checkpoints", "command.txt", "config.toml", "metrics.jsonl", "versions.json"]
    assert sorted(path.name for path in run.output.iterdir()) == names
    is_full[0] = False
    monkeypatch.setattr(exporting, "write_drafter_folder", export)
    assert train(run, target, resume=True).drafter == run.output / "drafter"


def test_a_full_disk_at_the_start(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk_at(monkeypatch, lambda: True)
    with pytest.raises(CapacityError):
        train(tiny_settings(tmp_path / "run", data), target)
    assert files_below(tmp_path / "run") == []


def test_the_export_is_the_rounded_masters(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    run = tiny_settings(tmp_path / "run", data, optimizer_learning_rate=1e-2)
    train(run, target)
    contract = drafter_contract(run, target.contract)
    masters = {
        name.removeprefix("master.backbone."): value for name, value in state(run, 20).items() if "master" in name
    }
    assert all(value.dtype == torch.float32 for value in masters.values())
    wanted = split_fused(masters, drafter_destinations(contract))
    source = open_safetensors(run.output / "drafter")
    assert sorted(source.names()) == sorted(wanted)
    for name, master in wanted.items():
        assert torch.equal(source.load(name), master.to(torch.bfloat16)), name
    norms = [source.load(name) for name in source.names() if "norm" in name]
    assert all(bool((norm != 1.0).any()) for norm in norms), "norms that stayed at exactly 1 were never trained"


def unchanged(run: TrainRun, target: LoadedTarget) -> list[str]:
    contract = drafter_contract(run, target.contract)
    before = initialise_drafter(contract, torch.device("cpu"), seed=run.seed).named_parameters()
    after = state(run, run.schedule.num_steps)
    return [name for name, parameter in before if torch.equal(parameter.detach(), after[f"master.{name}"])]


def test_no_parameter_is_unchanged(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate whose steps at 1.0 are far below what bf16 resolves there (speculators issue 765)."""
    run = tiny_settings(tmp_path / "run", data, optimizer_learning_rate=1e-4)
    train(run, target)
    assert unchanged(run, target) == []
    # The planted fault: masters rounded to bf16 after every step freeze the norms at exactly 1.
    faulty = tiny_settings(tmp_path / "faulty", data, optimizer_learning_rate=1e-4)
    original = train_step

    def rounding(drafter: Any, *arguments: Any) -> StepResult:
        result = original(drafter, *arguments)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.copy_(parameter.to(torch.bfloat16).float())
        return result

    monkeypatch.setattr(loop, "train_step", rounding)
    train(faulty, target)
    assert "backbone.norm.weight" in unchanged(faulty, target)


def test_the_optimizer_holds_the_drafter_alone_and_the_target_stays(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, torch.optim.Optimizer]] = []
    make = make_optimizer

    def noted(drafter: Any, **options: Any) -> torch.optim.AdamW:
        optimizer = make(drafter, **options)
        made.append((drafter, optimizer))
        return optimizer

    monkeypatch.setattr(loop, "make_optimizer", noted)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    train(tiny_settings(tmp_path / "run", data, schedule_num_steps=4), target)
    (drafter, optimizer), *others = made
    assert not others
    parameters = {id(parameter) for parameter in drafter.parameters()}
    assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} == parameters
    assert {id(parameter) for parameter in optimizer.state} == parameters
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())


def test_the_exported_drafter_loads_and_knows_its_target(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    from paceline.errors import CompatibilityError

    run = tiny_settings(tmp_path / "run", data, schedule_num_steps=4)
    outcome = train(run, target)
    assert outcome.drafter is not None
    drafter = load_drafter(str(outcome.drafter), target)
    assert drafter.num_draft_tokens == 3 and tuple(drafter.contract.target_layer_ids) == (0, 2)
    with pytest.raises(CompatibilityError, match="no layer of this target matches"):
        load_drafter(str(outcome.drafter), chat_target(7, hidden_size=32, intermediate_size=48, head_size=8))
    record = json.loads((outcome.drafter / "provenance.json").read_text())
    assert record["step"] == 4 and record["seed"] == 0 and record["optimizer.learning_rate"] == 1e-3
    assert record["chat_template_sha256"] is None, "its tokenizer is a stand-in"


def test_the_exported_drafter_names_the_template_of_its_target(
    target: LoadedTarget, tmp_path: Path, data: Path
) -> None:
    backend = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer = TextTokenizer(backend, chat_template="{{ messages }}", special_tokens={}, origin="test")
    outcome = train(tiny_settings(tmp_path / "run", data, schedule_num_steps=2), replace(target, tokenizer=tokenizer))
    assert outcome.drafter is not None
    record = json.loads((outcome.drafter / "provenance.json").read_text())
    assert record["chat_template_sha256"] == hashlib.sha256(b"{{ messages }}").hexdigest()


def test_short_texts_still_make_a_probe(target: LoadedTarget, tmp_path: Path) -> None:
    """Held-out conversations of a few tokens each: the fingerprint runs on across their borders."""
    rows = random_rows(40, 9, vocab_size=400)
    data = write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=2)
    outcome = train(tiny_settings(tmp_path / "run", data, schedule_num_steps=2), target)
    assert outcome.drafter is not None
    fingerprint = open_safetensors_file(outcome.drafter / "fingerprint.safetensors")
    assert fingerprint.load("probe_ids").tolist() == [token for row in rows[-4:] for token in row][:PROBE_TOKENS]


def test_a_held_out_text_too_short_for_a_probe_leaves_it_to_the_others(target: LoadedTarget, tmp_path: Path) -> None:
    """Three tokens are no fingerprint: a run must not find that out when it exports what it has trained."""
    rows = [*random_rows(9, 20, vocab_size=400), [7, 8, 9]]
    data = write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=1)
    settings = tiny_settings(
        tmp_path / "run", data, data_hold_out=1, evaluate_num_conversations=1, schedule_num_steps=1
    )
    outcome = train(settings, target)
    assert outcome.drafter is not None
    fingerprint = open_safetensors_file(outcome.drafter / "fingerprint.safetensors")
    assert fingerprint.load("probe_ids").tolist() == [*rows[0], *rows[1]][:PROBE_TOKENS]
