"""Mistakes on the command line, from the flag to the exit code: one clear message, and nothing half-written.

Exit codes: 1 failed, 2 usage or settings, 3 a check says no, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import random_rows, tiny_settings, write_drafter, write_target_folder, write_token_file

import paceline
from paceline.checkpoint.contract import TargetLayerId
from paceline.cli.main import main
from paceline.configuration.load import to_toml

SOURCE = str(Path(paceline.__file__).parents[1])


@dataclass(frozen=True)
class World:
    """Sound and unsound folders and files, made once; tests write elsewhere."""

    root: Path

    def __getattr__(self, name: str) -> str:
        """The path of an entry: `world.target` is its folder."""
        return str(self.root / name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    model = tiny_target(max_position_embeddings=2048)
    target = wrap_target(model, "plain")
    write_target_folder(root / "target", model)
    write_drafter(root / "drafter", target)
    narrow = tiny_target(hidden_size=32)
    write_target_folder(root / "narrow", narrow)
    write_drafter(root / "narrow_drafter", wrap_target(narrow, "plain"))
    write_drafter(root / "vocabulary_drafter", wrap_target(tiny_target(vocab_size=256), "plain"))
    deep = wrap_target(tiny_target(num_layers=7), "plain")
    write_drafter(root / "deep_drafter", deep, target_layer_ids=(TargetLayerId(0), TargetLayerId(5)))
    write_target_folder(root / "stranger", tiny_target(seed=9, max_position_embeddings=2048))
    for name, cut in (("cut_target", -100), ("cut_drafter", 5)):
        shutil.copytree(root / name.removeprefix("cut_"), root / name)
        weights = root / name / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:cut])
    data = write_token_file(root / "data.npz", random_rows(40, 24, vocab_size=400), num_prompt_tokens=6)
    (root / "cut.npz").write_bytes(data.read_bytes()[:200])
    write_token_file(root / "foreign.npz", random_rows(40, 24, vocab_size=900), num_prompt_tokens=6)
    (root / "numbers.jsonl").write_text('{"prompt": "w5 w6"}\n{"prompt": 5}\n')
    (root / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    return World(root)


@pytest.fixture
def run_file(world: World, tmp_path: Path) -> Path:
    """Settings of a sound training run."""
    settings = tiny_settings(tmp_path / "out", world.root / "data.npz")
    path = tmp_path / "run.toml"
    path.write_text(to_toml(settings).replace('name = "tiny"', f'name = "{world.target}"'))
    return path


def files_below(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], world: World, tmp_path: Path) -> Callable[..., str]:
    """Runs a command that must fail: nothing on stdout, one message without traceback, no file made or touched."""

    def act(code: int, *arguments: str | Path) -> str:
        before = files_below(world.root) | files_below(tmp_path)
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert left.value.code == code, captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert captured.err.count("Error:") == 1
        assert files_below(world.root) | files_below(tmp_path) == before
        return captured.err

    return act


def test_the_sound_parts_work(world: World, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without this, everything below could be refused for another reason."""
    flags = ["-p", "w5 w6", "--max-tokens", "8", "--compare", "--dtype", "float32", "--linear-mode", "row_invariant"]
    for arguments in (["generate", world.target, "--draft-model", world.drafter, *flags], ["train", str(run_file)]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 0, capsys.readouterr().err
    assert capsys.readouterr().out.rstrip().endswith("out/drafter")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["generate", "{w}/gone", "-p", "w5"], ["there is no target named", "/gone"]),
        (["generate", "{w}/target", "-p", "w5", "--draft-model", "{w}/gone"], ["there is no drafter named", "/gone"]),
        (["generate", "{w}/drafter", "-p", "w5"], ["is a drafter, not a target"]),
        (["generate", "{w}/target", "-p", "w5", "--draft-model", "{w}/target"], ["LlamaForCausalLM", "not a drafter"]),
        (["generate", "{w}/cut_target", "-p", "w5"], ["truncated", "cut_target/model.safetensors"]),
        (
            ["generate", "{w}/target", "-p", "w5", "--draft-model", "{w}/cut_drafter"],
            ["truncated", "cut_drafter/model.safetensors"],
        ),
        (["generate", "{w}/data.npz", "-p", "w5"], ["data.npz is a file of an unknown kind"]),
        (["inspect", "{w}/gone"], ["there is no target named"]),
        (["chat", "{w}/gone"], ["there is no target named", "/gone"]),
        (["generate", "{w}/target", "--prompt-file", "{w}/gone.jsonl"], ["does not exist", "gone.jsonl"]),
        (["generate", "{w}/target", "--prompt-file", "{w}/numbers.jsonl"], ["numbers.jsonl:2", "found 5"]),
        (["generate", "{w}/target", "--prompt-file", "{w}/binary.jsonl"], ["not UTF-8", "binary.jsonl"]),
        (
            ["evaluate", "{w}/target", "--draft-model", "{w}/drafter", "--prompts", "{w}/gone.jsonl"],
            ["does not exist", "gone.jsonl"],
        ),
    ],
)
def test_wrong_files(refused: Callable[..., str], world: World, arguments: list[str], texts: list[str]) -> None:
    said = refused(1, *(argument.format(w=world.root) for argument in arguments))
    assert all(text in said for text in texts), said


@pytest.mark.parametrize(
    ("target", "drafter", "texts"),
    [
        ("target", "narrow_drafter", ["taps of width 32", "hidden_size is 64"]),
        ("narrow", "drafter", ["taps of width 64", "hidden_size is 32"]),
        ("target", "vocabulary_drafter", ["256 token ids, this one has 512"]),
        ("target", "deep_drafter", ["taps [5]", "to 2 (the last layer but one)"]),
        ("stranger", "drafter", ["no layer of this target matches"]),
    ],
)
def test_a_drafter_for_another_target(
    refused: Callable[..., str], world: World, target: str, drafter: str, texts: list[str]
) -> None:
    said = refused(1, "generate", world.root / target, "-p", "w5", "--draft-model", world.root / drafter)
    assert said.count("CompatibilityError") == 1
    assert all(text in said for text in texts), said


def test_a_check_that_says_no(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["inspect", world.narrow_drafter, "--target", world.target])
    captured = capsys.readouterr()
    assert left.value.code == 3
    assert "hidden_size is 64" in captured.err and "Traceback" not in captured.err
    assert captured.out, "what it found goes to stdout all the same"


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "0"], ["top_p", "0.0"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--min-p", "2"], ["min_p", "2.0"]),
        (["--top-k", "-1"], ["top_k", "-1"]),
        (["--max-tokens", "0"], ["max_tokens", "0"]),
        (["--spec-tokens", "3"], ["spec_tokens is 3", "no draft_model"]),
        (["--compare"], ["compare", "no draft_model"]),
        (["--stop-token-id", "9999"], ["9999", "512"]),
        (["--max-model-len", "9999"], ["max_model_len is 9999", "2048"]),
        (["--dtype", "int8"], ["dtype", "int8"]),
        (["--set", "tempratur=1"], ["tempratur: no setting has this name", "try: temperature"]),
        (["--set", "temperature"], ["not of the form"]),
    ],
)
def test_impossible_values(refused: Callable[..., str], world: World, flags: list[str], texts: list[str]) -> None:
    said = refused(2, "generate", world.target, "-p", "w5", *flags)
    assert all(text in said for text in texts), said


def test_a_prompt_longer_than_the_context(refused: Callable[..., str], world: World) -> None:
    said = refused(2, "generate", world.target, "--raw", "-p", "w5 " * 2100)
    assert "the prompt has 2100 tokens; a context of 2048" in said
    said = refused(2, "generate", world.target, "--raw", "-p", "w5 " * 40, "--max-model-len", "32")
    assert "a context of 32" in said


def test_too_many_draft_tokens(refused: Callable[..., str], world: World) -> None:
    said = refused(2, "generate", world.target, "-p", "w5", "--draft-model", world.drafter, "--spec-tokens", "9")
    assert "9 draft tokens per step were asked for" in said and "try: at most 7" in said


@pytest.mark.parametrize(
    ("code", "overrides", "texts"),
    [
        (2, ["schedule.num_step=3"], ["schedule.num_step: no setting has this name", "try: schedule.num_steps"]),
        (2, ["schedule.num_steps=many"], ["schedule.num_steps", "many"]),
        (2, ["drafter.target_layer_ids=[0,3]"], ["ends at 3; the target has 4 layers"]),
        (2, ["drafter.mask_token_id=512"], ["512 is outside the vocabulary of 512"]),
        (2, ["--resume"], ["nothing to resume"]),
        (1, ["target.name={w}/drafter"], ["is a drafter, not a target"]),
        (1, ["target.name={w}/cut_target"], ["truncated"]),
        (1, ['data.files=["{w}/gone.npz"]'], ["gone.npz", "do not exist"]),
        (1, ['data.files=["{w}/cut.npz"]'], ["cannot read", "cut.npz"]),
        (1, ['data.files=["{w}/foreign.npz"]'], ["foreign.npz holds token id", "vocabulary has 512"]),
        (1, ['data.files=["{w}/numbers.jsonl"]'], ["numbers.jsonl:1 is not a chat"]),
        (1, ["schedule.batch_size=99"], ["36 conversations to train on", "99"]),
    ],
)
def test_impossible_training(
    refused: Callable[..., str], world: World, run_file: Path, code: int, overrides: list[str], texts: list[str]
) -> None:
    said = refused(code, "train", run_file, *(override.replace("{w}", str(world.root)) for override in overrides))
    assert all(text in said for text in texts), said


def test_settings_with_an_unknown_key(refused: Callable[..., str], run_file: Path) -> None:
    run_file.write_text(run_file.read_text() + "\n[extra]\nkey = 1\n")
    assert "extra: no setting has this name" in refused(2, "train", run_file)
    run_file.write_text("seed = ")
    assert str(run_file) in refused(2, "train", run_file)


def test_a_second_run_and_a_changed_resume(
    refused: Callable[..., str], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(run_file), "schedule.num_steps=2"])
    capsys.readouterr()
    assert "already holds a run" in refused(2, "train", run_file, "schedule.num_steps=2")
    said = refused(2, "train", run_file, "--resume", "schedule.num_steps=3")
    assert "schedule.num_steps was 2, is 3" in said


def test_an_output_that_is_a_file(refused: Callable[..., str], run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    assert "file" in refused(1, "train", run_file, f"output={tmp_path / 'file'}")
    assert (tmp_path / "file").read_text() == "precious"


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """The program as a user starts it; Ctrl-C reaches it even where the tests themselves run detached."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_in_generation(world: World) -> None:
    """What was generated stays on stdout; one word says why it ends there."""
    process = start("generate", world.target, "--raw", "-p", "w5 w6", "--max-tokens", "2000", "--ignore-eos")
    assert process.stdout is not None
    first = process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert first.startswith("w") and (first + out).endswith("\n") and len(first + out) > 8
    assert err.count("interrupted") == 1 and "Traceback" not in err and "Error" not in err


def test_ctrl_c_in_a_chat(world: World, tmp_path: Path) -> None:
    """It ends the answer and not the program; what came stays in the conversation, which goes on."""
    process = start("chat", world.target, "--max-tokens", "1800", "--ignore-eos", "--max-model-len", "2048")
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("w5 w6\n")
    process.stdin.flush()
    first = process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.readline()
    saved = tmp_path / "chat.jsonl"
    out, err = process.communicate(f"/save {saved}\n/exit\n", timeout=60)
    assert process.returncode == 0, err
    assert err.count(", interrupted") == 1 and "Traceback" not in err and "Error" not in err
    question, answer = map(json.loads, saved.read_text().splitlines())
    assert question == {"role": "user", "content": "w5 w6"} and out == ""
    assert answer == {"role": "assistant", "content": (first + rest).removesuffix("\n")}
    assert 8 < len(answer["content"]) < 1800 * 3


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_ctrl_c_in_training(run_file: Path, tmp_path: Path, number: signal.Signals, times: int) -> None:
    """The step is finished and saved; `timeout`, which signals twice, is no more than one request."""
    changes = ["schedule.num_steps=100000", "checkpoint.every=100000", "evaluate.every=100000"]
    process = start("train", run_file, *changes)
    assert process.stderr is not None
    lines: list[str] = []
    while not any("step 20/" in line for line in lines):
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.003)
    out, err = process.communicate(timeout=60)
    err = "".join(lines) + err
    assert process.returncode == 130, err
    assert out == "" and "Traceback" not in err and "Error" not in err
    assert err.count("stopped at step") == 1 and "--resume" in err
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert f"stopped at step {int(checkpoint.name.removeprefix('step-'))};" in err
    assert sorted(path.name for path in checkpoint.iterdir()) == ["state.json", "state.safetensors"]
    written = ["checkpoints", "command.txt", "config.toml", "metrics.jsonl", "versions.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == written
