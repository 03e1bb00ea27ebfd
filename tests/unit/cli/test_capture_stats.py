"""`paceline capture stats`: figures that agree with what training would do, from every kind of file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.tiny_run import write_token_file
from tests.unit.capture.chatting import chat_target_folder
from tests.unit.cli.test_main import run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [list(range(4, 4 + length)) for length in [10, 20, 30, 40] * 8]
    return write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=4)


def test_figures_as_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "stats", str(data), "--max-length", "32", "--batch-size", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    figures = shown["files"][str(data)]
    assert figures["conversations"] == 32 and figures["tokens"] == 800 and figures["answer_tokens"] == 672
    assert figures["repeated"] == 28 and figures["repeated_prompts"] == 31
    assert figures["cut_share"] == 0.25 and figures["length"]["p50"] == 20
    assert figures["padding_share"]["unpacked"] == pytest.approx(1 - 736 / (32 * 32))
    assert figures["padding_share"]["packed"] < figures["padding_share"]["unpacked"]


def test_a_table_of_several_files(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = chat_target_folder(tmp_path / "target", num_layers=1)
    chat = [{"role": "user", "content": "w7 w8"}, {"role": "assistant", "content": "w9"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    assert run(["capture", "stats", str(data), str(tmp_path / "chats.jsonl"), "--target", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [str(data), str(tmp_path / "chats.jsonl"), "together"]
    assert lines[1].split() == ["conversations", "32", "1", "33"]
    assert next(line for line in lines if line.startswith("padding_share packed")).split()[2:] == ["-", "-", "-"]


def test_a_captured_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = chat_target_folder(tmp_path / "target", num_layers=1)
    out = tmp_path / "out"
    flags = ["--self-chat", "40", "--max-user-tokens", "20", "--max-answer-tokens", "10", "--device", "cpu", "-q"]
    assert run(["capture", "prompts", str(target), str(out), *flags]) == 0
    capsys.readouterr()
    assert run(["capture", "stats", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["files"][str(out)]
    summary = json.loads((out / "manifest.json").read_text())["summary"]
    assert [figures[key] for key in ("conversations", "tokens", "answer_tokens")] == [
        summary[key] for key in ("conversations", "tokens", "answer_tokens")
    ]
    assert figures["repeated_prompts"] == 0


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "stats", str(tmp_path / "nowhere.npz")]) == 1
    assert "no such data file" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert run(["capture", "stats", str(tmp_path / "a.jsonl")]) == 2
    assert "--target MODEL" in capsys.readouterr().err
    np.savez(tmp_path / "b.npz", tokens=np.arange(3))
    assert run(["capture", "stats", str(tmp_path / "b.npz")]) == 1
