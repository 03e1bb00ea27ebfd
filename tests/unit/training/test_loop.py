"""A whole run on a tiny target: exact resume, stopping, non-finite steps, full disks, and what is exported."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file
from torch import Tensor

from paceline.checkpoint.export import split_fused, write_drafter_folder
from paceline.checkpoint.names import drafter_destinations
from paceline.checkpoint.weights import open_safetensors, open_safetensors_file
from paceline.configuration.run import TrainRun
from paceline.errors import CapacityError, ConfigError, DataError, NumericError
from paceline.models.building import initialise_drafter
from paceline.models.fingerprint import PROBE_TOKENS
from paceline.models.loading import LoadedTarget, load_drafter
from paceline.training import loop
from paceline.training.features import TargetFeatures
from paceline.training.loop import Outcome, drafter_contract, train
from paceline.training.objective import Features
from paceline.training.optimizer import RateSchedule, make_optimizer
from paceline.training.resume import load_state, save_state
from paceline.training.step import StepResult, train_step

Act = Callable[[int], None]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target(vocab_size=512, hidden_size=32, intermediate_size=48, head_size=8)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = random_rows(40, 24, vocab_size=400)
    return write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=6)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Act], None]:
    """Lets a test act right after the optimizer step of every step, which is counted from 1 in each attempt."""
    original = train_step

    def install(act: Act) -> None:
        count = [0]

        def step(*arguments: Any, **options: Any) -> StepResult:
            result = original(*arguments, **options)
            count[0] += 1
            act(count[0])
            return result

        monkeypatch.setattr(loop, "train_step", step)

    return install


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


def poison(monkeypatch: pytest.MonkeyPatch, bad_calls: set[int]) -> None:
    """Features of chosen batches, counted from 0, hold a NaN."""
    original, calls = TargetFeatures.__call__, iter(range(10**6))

    def features(self: TargetFeatures, token_ids_BS: Tensor) -> Features:
        found = original(self, token_ids_BS)
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
        "config.toml",
        "metrics.jsonl",
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

    def write(*arguments: Any) -> None:
        is_full[0] = True
        export(*arguments)

    monkeypatch.setattr(loop, "write_drafter_folder", write)
    with pytest.raises(CapacityError):
        train(run, target)
    assert sorted(path.name for path in run.output.iterdir()) == ["checkpoints", "config.toml", "metrics.jsonl"]
    is_full[0] = False
    monkeypatch.setattr(loop, "write_drafter_folder", export)
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


def test_short_texts_still_make_a_probe(target: LoadedTarget, tmp_path: Path) -> None:
    """Held-out conversations of a few tokens each: the fingerprint runs on across their borders."""
    rows = random_rows(40, 9, vocab_size=400)
    data = write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=2)
    outcome = train(tiny_settings(tmp_path / "run", data, schedule_num_steps=2), target)
    assert outcome.drafter is not None
    fingerprint = open_safetensors_file(outcome.drafter / "fingerprint.safetensors")
    assert fingerprint.load("probe_ids").tolist() == [token for row in rows[-4:] for token in row][:PROBE_TOKENS]


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
