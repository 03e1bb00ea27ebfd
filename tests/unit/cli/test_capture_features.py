"""`paceline capture features`: estimate, capture, resume, and what is refused before anything is written."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from tests.tiny import tiny_prompts, tiny_target
from tests.tiny_kimi import kimi_target, kimi_tensors, small_kimi_config, write_kimi
from tests.tiny_run import write_target_folder, write_token_file
from tests.unit.capture.feature_runs import files_of
from tests.unit.cli.test_main import run as run_paceline

from paceline.capture import fan_out as fan_out_module
from paceline.capture import feature_plan
from paceline.capture.fan_out import FanOutSettings, ShardJob
from paceline.cli.capture_features import FeatureJob, features
from paceline.cli.main import PacelineGroup
from paceline.configuration.load import load_settings
from paceline.configuration.run import TrainRun
from paceline.models.loading import load_target
from paceline.training.contract import drafter_contract
from paceline.training.data import read_conversations, split_held_out
from paceline.training.feature_source import open_stored_features

NUM_TOKENS = 40 * 24
BYTES_PER_TOKEN = 32 * (2 + 1) * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a token file, and settings that name both."""
    folder = tmp_path_factory.mktemp("capture")
    write_target_folder(folder / "target", tiny_target(hidden_size=32, intermediate_size=48, head_size=8))
    write_token_file(folder / "data.npz", tiny_prompts([30] * 40, vocab_size=400), num_prompt_tokens=6)
    (folder / "run.toml").write_text(f"""
output = "out"
device = "cpu"
[target]
name = "{folder / "target"}"
dtype = "float32"
[drafter]
num_layers = 1
intermediate_size = 16
target_layer_ids = [0, 2]
block_size = 4
mask_token_id = 3
[data]
files = ["{folder / "data.npz"}"]
hold_out = 8
max_length = 24
[schedule]
num_steps = 10
batch_size = 4
num_anchors = 4
[evaluate]
num_conversations = 8
""")
    return folder


@pytest.mark.parametrize("mode", ["row_invariant", "plain"])
def test_a_run_on_stored_features_ends_in_the_bits_of_one_beside_the_target(
    folder: Path, tmp_path: Path, mode: str
) -> None:
    """By the commands alone. In plain arithmetic it does not: rows of other lengths are summed in another order."""
    rows = [row[: 9 + 2 * (index % 8)] for index, row in enumerate(tiny_prompts([70] * 40, vocab_size=400))]
    rows += tiny_prompts([70] * 20, vocab_size=400)
    write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=4)
    sizes = ["data.max_length=70", "schedule.num_steps=4", f'data.files=["{tmp_path / "data.npz"}"]']
    changes = [*sizes, f"target.linear_mode={mode}", "optimizer.learning_rate=0.01"]
    settings = folder / "run.toml"
    assert run(settings, tmp_path / "features", *changes) == 0
    weights = []
    for name, source in (("online", []), ("stored", [f'data.features="{tmp_path / "features"}"'])):
        assert run_paceline(["train", str(settings), *changes, *source, f'output="{tmp_path / name}"']) == 0
        weights.append((tmp_path / name / "checkpoints" / "step-0000004" / "state.safetensors").read_bytes())
    assert (weights[0] == weights[1]) == (mode == "row_invariant")


def run(*arguments: object) -> int:
    """The verb as the command line runs it."""
    app = typer.Typer(cls=PacelineGroup)
    app.callback()(lambda: None)
    app.command("features")(features)
    with pytest.raises(SystemExit) as left:
        typer.main.get_command(app)(args=["features", *map(str, arguments)], prog_name="capture")
    return int(left.value.code or 0)


def test_a_dry_run_estimates_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder / "run.toml", tmp_path / "out", "--dry-run", "--json", "--shard-mib", 0.1) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_conversations"], told["num_tokens"]) == (40, NUM_TOKENS)
    assert told["bytes_per_token"] == BYTES_PER_TOKEN
    assert NUM_TOKENS * BYTES_PER_TOKEN < told["disk_bytes"] < 1.2 * NUM_TOKENS * BYTES_PER_TOKEN
    assert told["num_shards"] == 4 and told["time_minutes"] >= 0
    assert not (tmp_path / "out").exists()


def test_what_is_captured_is_what_training_opens(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(folder / "run.toml", out, "--shard-mib", 0.1) == 0
    assert capsys.readouterr().out == f"{out}\n"
    settings = load_settings(TrainRun, folder / "run.toml", [f"data.features={out}"])
    target = load_target(str(folder / "target"), dtype="float32", device="cpu", linear_mode="plain", offline=True)
    conversations = read_conversations(folder / "data.npz", vocab_size=512)
    contract = drafter_contract(settings, target.contract)
    stored = open_stored_features(settings, target, contract, split_held_out(conversations, 8))
    found = stored(conversations.batch([0, 39], 24))
    assert [tuple(tap.shape) for tap in found.taps] == [(2, 24, 32)] * 2
    assert bool(found.hidden_BSD.isfinite().all()) and float(found.hidden_BSD.abs().sum()) > 0


def test_the_record_says_where_the_features_come_from(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder / "run.toml", tmp_path / "out", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["teacher_checked"] == 40 * 18 and len(told["tap_rms"]) == 2
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    record = manifest["plan"]["capture"]
    assert manifest["complete"] and manifest["totals"]["tokens"] == NUM_TOKENS
    for key in ("tokenizer_sha256", "chat_template_sha256"):
        assert len(record[key]) == 64
    assert record["default_system_prompt"] is False and record["mask_token_id"] == 3
    assert [(file["name"], file["rows"]) for file in record["data"]["files"]] == [("data.npz", 40)]
    assert record["engine"]["prefix_cache"] is False and record["aux_hidden_stream"] == "prefix"


def test_the_same_command_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (folder / "run.toml", tmp_path / "out", "--shard-mib", 0.1)
    assert run(*arguments) == 0
    whole = files_of(tmp_path / "out")
    kept = (tmp_path / "out" / "shard-00000.safetensors").stat().st_ino
    (tmp_path / "out" / "shard-00002.json").unlink()
    capsys.readouterr()
    assert run(*arguments) == 0
    assert "3 of 4 shards are there already" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == whole
    assert (tmp_path / "out" / "shard-00000.safetensors").stat().st_ino == kept, "written once"


def test_another_run_is_kept_out_of_the_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder / "run.toml", tmp_path / "out") == 0
    before = files_of(tmp_path / "out")
    assert run(folder / "run.toml", tmp_path / "out", "drafter.target_layer_ids=[0, 1]") == 2
    assert "capture.tap_ids: [0, 2] there, [0, 1] now" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == before


def test_the_last_layer_is_not_tapped(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its output is the raw stream here and the normed state elsewhere."""
    assert run(folder / "run.toml", tmp_path / "out", "drafter.target_layer_ids=[0, 3]") == 2
    assert "2 is the last that can be tapped" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_refused_before_the_target_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_plan.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert run(folder / "run.toml", tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert "CapacityError: the features take " in told and "the disk has 1,000 free" in told
    assert not (tmp_path / "out").exists()


def test_several_workers_without_the_extra_are_one_clear_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(folder / "run.toml", tmp_path / "out", "--workers", 2) == 1
    told = capsys.readouterr().err
    assert told.count("MissingExtraError") == 1 and "pip install 'paceline[ray]'" in told
    assert not (tmp_path / "out").exists()


def test_several_workers_write_the_same_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker is given opens the same capture by itself; the processes have their own tests."""
    assert run(folder / "run.toml", tmp_path / "one", "--shard-mib", 0.1) == 0
    given: list[Any] = []

    def fanned(job: ShardJob, indices: list[int], settings: FanOutSettings, on_done: Any) -> None:
        given.append((job, indices, settings))
        write = job.open()
        for index in reversed(indices):
            write(index)
            on_done(index)

    monkeypatch.setattr(fan_out_module, "fan_out", fanned)
    monkeypatch.setattr(fan_out_module, "require_ray", lambda: None)
    assert run(folder / "run.toml", tmp_path / "two", "--shard-mib", 0.1, "--workers", 2) == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    ((job, indices, settings),) = given
    assert isinstance(job, FeatureJob) and indices == [0, 1, 2, 3]
    assert (settings.num_workers, settings.num_gpus_per_worker) == (2, 0.0)


def test_the_environment_chooses_another_stream_and_the_record_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_kimi_config(4, 2, vocab_size=512)
    target = shutil.copytree(folder / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors*"))
    write_kimi(target, config, kimi_tensors(kimi_target(config)))
    arguments = (folder / "run.toml", tmp_path / "out", f"target.name={target}")
    monkeypatch.setenv("PACELINE_AUX_HIDDEN_STREAM", "attn_res")
    assert run(*arguments) == 0
    assert "features of the stream 'attn_res' are stored; the run's drafter reads 'prefix'" in capsys.readouterr().err
    record = json.loads((tmp_path / "out" / "manifest.json").read_text())["plan"]["capture"]
    assert record["aux_hidden_stream"] == "attn_res"
    monkeypatch.delenv("PACELINE_AUX_HIDDEN_STREAM")
    assert run(*arguments) == 2
    assert "aux_hidden_stream" in capsys.readouterr().err, "the folder holds another stream's features"


def test_a_stream_that_the_target_lacks_is_refused_by_the_name_of_the_variable(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_AUX_HIDDEN_STREAM", "attn_res")
    assert run(folder / "run.toml", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert "PACELINE_AUX_HIDDEN_STREAM: environment" in told and "the target has prefix" in told
    assert not (tmp_path / "out").exists()
