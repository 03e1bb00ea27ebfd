"""`paceline capture counts`: what it counts, where it goes, and that loading, inspecting and drafting use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import END, write_drafter, write_target_folder, write_token_file
from tests.unit.cli.test_main import run

from paceline.checkpoint.token_counts import read_token_counts
from paceline.engine.engine import Engine, EngineSettings
from paceline.errors import ConfigError
from paceline.models.loading import load_drafter, load_target


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    model = tiny_target()
    target = tmp_path / "target"
    write_target_folder(target, model)
    return target, write_drafter(tmp_path / "drafter", wrap_target(model, "plain"))


def test_counts_of_answers_reach_the_engine(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target_folder, drafter_folder = folders
    first = write_token_file(tmp_path / "a.npz", [[9, 9, 9, 50, 60, 60], [9, 9, 9, 70]], num_prompt_tokens=3)
    second = write_token_file(tmp_path / "b.npz", [[8, 60, 50]], num_prompt_tokens=1)
    assert run(["capture", "counts", str(first), str(second), "--into", str(drafter_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "drafter": str(drafter_folder),
        "num_tokens": 6,
        "num_distinct_ids": 3,
    }
    counts_W = read_token_counts(drafter_folder, 512)
    assert counts_W is not None and counts_W.nonzero().flatten().tolist() == [50, 60, 70]
    assert counts_W[[50, 60, 70]].tolist() == [2, 3, 1], "answers alone are counted"
    target = load_target(str(target_folder), device="cpu", offline=True)
    drafter = load_drafter(str(drafter_folder), target, offline=True)
    engine = Engine(target, drafter, EngineSettings(draft_vocab_size=40))
    assert engine.stats().num_listed_ids == 40 and engine.stats().listed_share == 1.0
    provenance = json.loads((drafter_folder / "provenance.json").read_text())["token_counts"]
    assert provenance["files"] == ["a.npz", "b.npz"] and len(provenance["data_sha256"]) == 64
    # again, with less: the old counts do not stay
    assert run(["capture", "counts", str(second), "--into", str(drafter_folder)]) == 0
    assert "2 answer tokens, 2 of 512 ids" in capsys.readouterr().out
    assert run(["inspect", str(drafter_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_counts"] == {
        "num_tokens": 2,
        "num_distinct_ids": 2,
        "auto_draft_vocab_size": "full",
        "auto_coverage": 1.0,
    }


def test_without_counts_a_number_is_refused(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target = load_target(str(folders[0]), device="cpu", offline=True)
    drafter = load_drafter(str(folders[1]), target, offline=True)
    assert drafter.token_counts_W is None
    with pytest.raises(ConfigError, match="does not say which ids are frequent"):
        Engine(target, drafter, EngineSettings(draft_vocab_size=40))
    assert run(["inspect", str(folders[1])]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("token_counts"))
    assert row.split() == ["token_counts", "-"]


def test_chats_are_counted_as_a_target_renders_them(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a tokenizer of few words, which knows neither "yes" nor "0": the answer and its end are counted, no more."""
    chat = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w70 w71"}]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat}) + "\n")
    command = ["capture", "counts", str(file), "--into", str(folders[1])]
    assert run(command) == 2
    assert "--target MODEL" in capsys.readouterr().err
    assert run([*command, "--target", str(folders[0])]) == 0
    counts_W = read_token_counts(folders[1], 512)
    assert counts_W is not None and counts_W.nonzero().flatten().tolist() == [END, 70, 71]


def test_ids_of_another_vocabulary_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_token_file(tmp_path / "a.npz", [[9, 9, 512]], num_prompt_tokens=1)
    assert run(["capture", "counts", str(data), "--into", str(folders[1])]) != 0
    assert "holds token id 512; the target's vocabulary has 512" in capsys.readouterr().err
    assert read_token_counts(folders[1], 512) is None


def test_a_file_of_another_target_is_refused_at_load(folders: tuple[Path, Path]) -> None:
    from paceline.checkpoint.export import TOKEN_COUNTS_FILE
    from paceline.checkpoint.weights import save_safetensors
    from paceline.errors import CheckpointError

    save_safetensors(folders[1] / TOKEN_COUNTS_FILE, {"token_counts": torch.ones(511, dtype=torch.int64)}, {})
    target = load_target(str(folders[0]), device="cpu", offline=True)
    with pytest.raises(CheckpointError, match=r"token counts are torch.int64 \[511\]"):
        load_drafter(str(folders[1]), target, offline=True)
