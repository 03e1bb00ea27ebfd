from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.unit.cli.folders import drafter_contract, target_folder
from tests.unit.cli.test_main import run

from paceline.cli.estimate import num_drafter_parameters
from paceline.configuration.run import TrainRun


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    count = 40
    numpy.savez(
        tmp_path / "data.npz",
        tokens=numpy.tile(numpy.arange(3, 33, dtype=numpy.uint16), count),
        prompt_len=numpy.full(count, 10),
        response_len=numpy.full(count, 20),
    )
    path = tmp_path / "run.toml"
    path.write_text(f"""
output = "{tmp_path / "out"}"
device = "cpu"
[target]
name = "{target_folder(tmp_path / "target")}"
[drafter]
num_layers = 1
intermediate_size = 16
num_taps = 2
block_size = 4
mask_token_id = 0
[data]
files = ["{tmp_path / "data.npz"}"]
hold_out = 8
max_length = 24
[schedule]
num_steps = 10
batch_size = 4
num_anchors = 4
[evaluate]
num_conversations = 8
""")
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainRun, dict[str, Any]]]:
    """Runs that would have started; the training itself has its own tests."""
    calls: list[tuple[TrainRun, dict[str, Any]]] = []

    def train(settings: TrainRun, **options: Any) -> dict[str, Any]:
        calls.append((settings, options))
        finished = settings.schedule.num_steps < 100
        return {
            "step": 10,
            "is_finished": finished,
            "checkpoint": settings.output / "c",
            "drafter": settings.output / "drafter" if finished else None,
        }

    monkeypatch.setattr("paceline.cli.train._train", train)
    return calls


def test_overrides_reach_the_run(
    run_file: Path, started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", str(run_file), "schedule.num_steps=20", "seed=3", "--set", "seed=4", "--resume"]) == 0
    settings, options = started[0]
    assert (settings.schedule.num_steps, settings.seed) == (20, 4)
    assert (options["resume"], options["offline"]) == (True, False)
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'drafter'}\n"


def test_a_stopped_run_says_how_to_go_on(
    run_file: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", str(run_file), "schedule.num_steps=100", "--json"]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out)["is_finished"] is False
    assert "--resume" in captured.err


def test_a_dry_run_counts_and_estimates(
    run_file: Path, started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", str(run_file), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_conversations"], found["num_held_out"]) == (32, 8)
    assert found["num_supervised_tokens"] == 32 * 14  # of 20 each, which begin behind 10 and are cut at 24
    assert found["mean_length_tokens"] == 24
    assert found["num_epochs"] == 1.25
    assert found["memory_mib"] > 0
    assert found["time_minutes"] >= 0
    assert found["settings"]["schedule"]["num_steps"] == 10
    assert not started
    assert not (tmp_path / "out").exists()


def test_a_dry_run_reads_the_data_as_the_run_would(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of 4 rows in 10 steps: 40 rows, of 32 with a conversation each or of 16 with two."""

    def estimate(*changes: str) -> dict[str, Any]:
        assert run(["train", str(run_file), *changes, "--dry-run", "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assert estimate("data.max_length=48", "data.packed=true")["num_epochs"] == 1.25  # of 30 tokens one fits into a row
    packed = estimate("data.max_length=60", "data.packed=true")
    assert (packed["num_epochs"], packed["mean_length_tokens"]) == (2.5, 30)
    assert run(["train", str(run_file), "schedule.batch_size=33", "--dry-run"]) == 1
    assert "32 conversations to train on, schedule.batch_size is 33" in capsys.readouterr().err
    assert run(["train", str(run_file), "data.min_supervised=15", "--dry-run"]) == 1
    assert "15 supervised tokens among its first 24" in capsys.readouterr().err
    assert run(["train", str(run_file), "data.max_length=11", "--dry-run"]) == 1
    assert "among its first 11: there is nothing to draft" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        ["drafter.family=dspark", "drafter.layout=anchor_sampling", "drafter.markov_rank=4"],
        ["drafter.family=eagle3", "drafter.mask_token_id=none"],
        ["drafter.family=eagle3", "drafter.mask_token_id=none", "drafter.draft_vocab_size=16"],
    ],
)
def test_a_dry_run_knows_every_family(
    run_file: Path, started: list[Any], overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain, found = [], []
    for part, into in (([], plain), (overrides, found)):
        assert run(["train", str(run_file), *part, "--dry-run", "--json"]) == 0
        into.append(json.loads(capsys.readouterr().out))
    (before,), (after,) = plain, found
    assert after["settings"]["drafter"]["family"] == overrides[0].partition("=")[2]
    assert after["num_trained_parameters"] > 0 and after["num_trained_parameters"] != before["num_trained_parameters"]
    assert after["teraflop_per_step"] >= 0 and after["memory_mib"] > 0


def test_the_parameter_count_is_the_models_own() -> None:
    import torch

    from paceline.models.building import initialise_drafter

    contract = drafter_contract(dtype="float32")
    model = initialise_drafter(contract, torch.device("cpu"), seed=0)
    assert num_drafter_parameters(contract) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["none.toml"], 2, "does not exist"),
        (["{run}", "schedule.steps=1"], 2, "schedule.steps: no setting has this name"),
        (["{run}", "seed"], 2, "not of the form"),
        (["{run}", 'data.files=["gone.npz"]'], 1, "gone.npz"),
        (["{run}", "drafter.start_from=gone"], 1, "drafter.start_from names a folder that does not exist: gone"),
        (["{run}", "drafter.start_from={folder}", "output={folder}/new", "--dry-run"], 2, "lies in drafter.start_from"),
        (["{run}", "drafter.start_from={folder}", "--dry-run"], 1, "{folder}"),
    ],
)
def test_mistakes(
    run_file: Path,
    started: list[Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    part: str,
) -> None:
    places = {"run": run_file, "folder": run_file.parent / "target"}
    assert run(["train", *(argument.format(**places) for argument in arguments)]) == code
    captured = capsys.readouterr()
    assert (captured.out, started) == ("", [])
    assert part.format(**places) in captured.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["drafter.mask_token_id=100000"], "drafter.mask_token_id 100000 is outside the vocabulary"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_mistakes_are_told_before_the_target_is_loaded(
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    part: str,
) -> None:
    def load(name: str, **options: Any) -> None:
        pytest.fail(f"{name} was loaded")

    monkeypatch.setattr("paceline.models.loading.load_target", load)
    assert run(["train", str(run_file), *arguments]) == 2
    assert part in capsys.readouterr().err
    assert not (run_file.parent / "out").exists()
