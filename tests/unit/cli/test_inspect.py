from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.cli.folders import drafter_folder, target_folder
from tests.unit.cli.test_main import run


def test_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = target_folder(tmp_path / "target")
    assert run(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["num_layers"], found["stop_token_ids"]) == ("target", 6, [2])
    assert found["rope"]["theta"] == 10000.0
    assert run(["inspect", str(folder)]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["kind"].strip() == "target"
    assert rows["rope.theta"].strip() == "10000.0"


def test_a_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = drafter_folder(tmp_path / "drafter")
    assert run(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["target_layer_ids"], found["num_draft_tokens"]) == ("drafter", [1, 3], 3)


def test_whether_they_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = drafter_folder(tmp_path / "drafter")
    fitting, other = target_folder(tmp_path / "a"), target_folder(tmp_path / "b", vocab_size=99)
    assert run(["inspect", str(drafter), "--target", str(fitting), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert run(["inspect", str(drafter), "--target", str(other), "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["fits"] is False
    assert "CheckFailedError" in captured.err
    assert "99" in captured.err
    assert run(["inspect", str(fitting), "--target", str(other)]) == 2


@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "config.json"), ("{", "JSON"), ('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}', "gpt2")],
)
def test_folders_that_are_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, part: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert run(["inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("CheckpointError: ")
    assert part in captured.err


def test_a_name_that_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "no-such-model"]) == 1
    assert "no-such-model" in capsys.readouterr().err
