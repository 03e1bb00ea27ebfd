"""`paceline parity`: the stages, the drafts of a block, and an exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.cli.test_main import run
from torch import Tensor

from paceline.checkpoint.contract import TargetLayerId
from paceline.training import objective

TAPS = (TargetLayerId(0), TargetLayerId(1), TargetLayerId(2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target_folder(tmp_path_factory.mktemp("models") / "target", tiny_target())


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded = wrap_target(tiny_target(), "plain")
    return write_drafter(tmp_path_factory.mktemp("models") / "drafter", loaded, target_layer_ids=TAPS)


def arguments(drafter: Path, target: Path, *more: str) -> list[str]:
    common = ["--target", str(target), "--dtype", "float32", "--device", "cpu", "--max-tokens", "16"]
    return ["parity", str(drafter), *common, "--num-prompts", "2", "--num-anchors", "4", *more]


def leaky(original: Any) -> Any:
    def visibility(anchors_BA: Tensor, *rest: Any, **options: Any) -> Tensor:
        visible: Tensor = original(anchors_BA + 1, *rest, **options)
        return visible

    return visibility


def test_a_drafter_that_is_served_as_it_was_trained(
    drafter: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(drafter, target)) == 0
    out = capsys.readouterr().out
    for stage in ("labels", "teacher", "tap 2 (layer 2)", "context of drafter layer 1", "scores", "drafts"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{stage}  ")]
        assert "  ok  " in line
    assert out.splitlines()[-1] == "training and serving agree on 2 texts, in float32"


def test_a_difference_is_named_and_has_its_own_exit_code(
    drafter: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(objective, "block_visibility", leaky(objective.block_visibility))
    assert run(arguments(drafter, target, "--json")) == 3
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["agrees"] is False
    assert {stage["name"] for stage in found["stages"] if not stage["ok"]} >= {"scores"}
    assert "part at scores" in captured.err
    assert "what its row may see" in captured.err


def test_prompts_of_a_file_and_one_prompt(
    drafter: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("w7 w9\nw30 w31 w32\nw5\n")
    assert run(arguments(drafter, target, "--prompts", str(file), "--json")) == 0
    assert json.loads(capsys.readouterr().out)["num_texts"] == 2
    assert run(arguments(drafter, target, "--prompt", "w8 w8", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["num_texts"] == 1
    assert run(arguments(drafter, target, "--prompt", "w8", "--prompts", str(file))) == 2
    assert "both given" in capsys.readouterr().err
