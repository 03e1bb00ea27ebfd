"""`paceline capture prompts`: from flags to a folder, an estimate, an interruption, and what is refused."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.capture.chatting import chat_target_folder
from tests.unit.cli.test_main import run

from paceline.capture.fan_out import FanOutSettings
from paceline.capture.prompts import read_captured
from paceline.capture.shards import ShardFolder

SMALL = ["--max-user-tokens", "20", "--max-answer-tokens", "10", "--batch-size", "8", "--shard-size", "16"]
PLAIN = ["--device", "cpu", "--dtype", "float32", "--linear-mode", "plain", "--backend", "lockstep", "--seed", "1"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chat_target_folder(tmp_path_factory.mktemp("models") / "target", num_layers=1))


def test_self_chat_from_flags(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    command = ["capture", "prompts", target, str(out), "--self-chat", "40", *SMALL, *PLAIN]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert "shard 3 of 3 written: 40 of 40 conversations" in printed.err
    assert run([*command, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["folder"] == str(out) and figures["conversations"] == len(read_captured(out)) > 5


def test_given_prompts_with_a_file_of_settings(target: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"w9 w{index}"}) + "\n" for index in range(8, 14)))
    (tmp_path / "e.jsonl").write_text(json.dumps({"prompt": "please say w9 w10 now"}) + "\n")
    (tmp_path / "s.toml").write_text("greedy_share = 1.0\nmax_answer_tokens = 6\nexclude_ngram = 2\n")
    command = ["capture", "prompts", target, str(tmp_path / "out"), "--from", str(tmp_path / "p.jsonl"), *PLAIN]
    assert run([*command, "--config", str(tmp_path / "s.toml"), "--exclude", str(tmp_path / "e.jsonl"), "-q"]) == 0
    plan = ShardFolder.read(tmp_path / "out").plan
    assert plan["sampling"]["greedy_share"] == 1.0 and plan["source"]["chats"] == 5
    assert [entry["name"] for entry in plan["excluded"]["files"]] == ["e.jsonl"]


def test_a_dry_run_writes_nothing(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["capture", "prompts", target, str(tmp_path / "out"), "--self-chat", "40", "--dry-run", *SMALL, *PLAIN]
    assert run([*command, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["self_chat"] == 40 and shown["settings"]["temperature"] == 0.8
    assert shown["estimate"]["num_shards"] == 3 and shown["estimate"]["time_s"] > 0
    assert run(command) == 0
    printed = capsys.readouterr()
    assert "self_chat = 40" in printed.out and "estimate: " in printed.err
    assert not (tmp_path / "out").exists()


def test_several_workers_write_what_one_writes(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own are tested with `fan_out`; here, what they are given, and that nothing is left to do."""
    command = ["--self-chat", "40", *SMALL, *PLAIN, "-q"]
    assert run(["capture", "prompts", target, str(tmp_path / "one"), *command]) == 0
    jobs: list[tuple[bytes, list[int], FanOutSettings]] = []

    def spread(job: Any, indices: Sequence[int], settings: FanOutSettings, on_done: Callable[[int], None]) -> None:
        jobs.append((pickle.dumps(job), list(indices), settings))
        write = pickle.loads(jobs[-1][0]).open()
        for index in reversed(indices):
            write(index)
            on_done(index)

    monkeypatch.setattr("paceline.capture.fan_out.fan_out", spread)
    monkeypatch.setattr("paceline.capture.fan_out.require_ray", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert run(["capture", "prompts", target, "two", *command, "--workers", "2"]) == 0
    assert [(indices, settings.num_workers) for _, indices, settings in jobs] == [([0, 1, 2], 2)]
    shards = [f"shard-0000{index}.npz" for index in range(3)]
    assert [(tmp_path / "two" / name).read_bytes() for name in shards] == [
        (tmp_path / "one" / name).read_bytes() for name in shards
    ]


def test_workers_need_their_extra(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["capture", "prompts", target, str(tmp_path / "out"), "--self-chat", "4", "--workers", "2"]) == 1
    assert not (tmp_path / "out").exists()


def test_an_interruption_leaves_what_can_go_on(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["capture", "prompts", target, str(tmp_path / "out"), "--self-chat", "40", *SMALL, *PLAIN]
    real = ShardFolder.write

    def stop_at_the_second(self: ShardFolder, index: int, fill: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return real(self, index, fill)

    with monkeypatch.context() as patched:
        patched.setattr(ShardFolder, "write", stop_at_the_second)
        assert run(command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(list((tmp_path / "out").glob("*.npz"))) == 1
    assert run(command) == 0
    assert "1 of 3 shards are there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "ConfigError: prompts come either from self_chat or from a file of prompts; neither is set"),
        (["--self-chat", "4", "--from", "p.jsonl"], 2, "self_chat is 4 and prompts is set"),
        (["--self-chat", "0"], 2, "ConfigError: self_chat"),
        (["--self-chat", "4", "--top-p", "0"], 2, "ConfigError: top_p"),
        (["--self-chat", "4", "--backend", "fast"], 2, "ConfigError: backend"),
        (["--self-chat", "4", "--max-prompt-tokens", "4"], 2, "max_prompt_tokens is for files of prompts"),
        (["--self-chat", "4", "--backend", "lockstep", "--draft-model", "d"], 2, "backend is 'lockstep'"),
        (["--self-chat", "4", "--spec-tokens", "3"], 2, "there is no draft_model to use it"),
        (["--from", "nowhere.jsonl"], 1, "DataError: nowhere.jsonl does not exist"),
        (["--self-chat", "4", "--exclude", "nowhere.jsonl"], 1, "DataError: nowhere.jsonl does not exist"),
    ],
)
def test_bad_input_is_refused_before_loading(
    tmp_path: Path, flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["capture", "prompts", "no-such-target", str(tmp_path / "out"), *flags]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ("", 1, "DataError: this file holds no prompt"),
        ('{"prompt": ""}\n', 1, "DataError: a prompt is empty"),
        (json.dumps({"prompt": "w9 " * 600}), 1, "DataError: a prompt has 603 tokens; beside 10 of an answer"),
    ],
)
def test_bad_prompts(
    target: str, tmp_path: Path, content: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    command = ["capture", "prompts", target, str(tmp_path / "out"), "--from", str(tmp_path / "p.jsonl")]
    assert run([*command, "--max-answer-tokens", "10", *PLAIN]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_another_capture(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["capture", "prompts", target, str(tmp_path / "out"), *SMALL, *PLAIN]
    assert run([*command, "--self-chat", "4"]) == 0
    assert run([*command, "--self-chat", "5"]) == 2
    assert "source.rows: 4 there, 5 now" in capsys.readouterr().err
