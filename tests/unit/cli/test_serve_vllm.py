"""`paceline serve --engine vllm`: what vLLM is started with, and the drafters that it is not given."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.cli.test_main import SOURCE, run

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import read_drafter
from paceline.checkpoint.vllm_support import STREAM_VARIABLE, obstacles_for_vllm


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("served")
    target = tiny_target("qwen3", vocab_size=64)
    write_target_folder(folder / "target", target)
    return folder / "target", write_drafter(folder / "drafter", wrap_target(target), has_tap_norm=False)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    """The command that would be run."""
    assert run(["serve", "--engine", "vllm", "--offline", "--dry-run", *map(str, arguments)]) == 0
    return shlex.split(capsys.readouterr().out)


def test_the_command_names_method_and_number_of_drafts(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = pair
    contract = read_drafter(drafter).contract
    command = shown(capsys, target, "--draft-model", drafter)
    assert command[:3] == ["vllm", "serve", str(target)]
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative == {
        "method": "dflash",
        "model": str(drafter),
        "num_speculative_tokens": contract.num_draft_tokens,
    }
    fewer = shown(capsys, target, "--draft-model", drafter, "--spec-tokens", "2")
    assert json.loads(fewer[fewer.index("--speculative-config") + 1])["num_speculative_tokens"] == 2


def test_settings_in_vllms_words(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--host", "0.0.0.0", "--port", "81", "--served-model-name", "m", "--max-model-len", "64"]
    given += ["--dtype", "float32", "--max-num-seqs", "4", "--no-prefix-cache", "--generation-config", "none"]
    given += ["--allowed-origin", "http://a", "--api-key", "k1", "--api-key", "k2"]
    given += ["--per-request-spec-decode-metrics", "summary", "--engine-command", "my-vllm"]
    command = shown(capsys, pair[0], *given, "--", "--tensor-parallel-size", "2")
    assert command == [
        *("my-vllm", "serve", str(pair[0]), "--host", "0.0.0.0", "--port", "81", "--served-model-name", "m"),
        *("--api-key", "(set)", "(set)", "--allowed-origins", '["http://a"]', "--max-model-len", "64"),
        *("--dtype", "float32", "--max-num-seqs", "4", "--no-enable-prefix-caching"),
        *("--per-request-spec-decode-metrics", "summary", "--generation-config", "vllm"),
        *("--tensor-parallel-size", "2"),
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-itl-ms", "5"], "vLLM is not told max_itl_ms"),
        (["--canary", "off", "--num-blocks", "9"], "vLLM is not told num_blocks, canary"),
        (["--engine-command", "no-such-program"], "there is no program 'no-such-program' here"),
        (["--draft-model", "no/such-drafter"], "no/such-drafter"),
    ],
)
def test_mistakes(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert run(["serve", str(pair[0]), "--engine", "vllm", "--offline", *arguments]) in (1, 2)
    assert named in capsys.readouterr().err


def test_names_as_vllm_takes_them(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(pair[0].parent))
    assert shown(capsys, "~/target")[2] == str(pair[0])
    assert shown(capsys, pair[0] / "config.json")[2] == str(pair[0])
    places = {"owner/target@v1": pair[0], "owner/drafter@abc": pair[1]}
    monkeypatch.setattr("paceline.checkpoint.locate.locate_target", lambda name, offline: places[name])
    monkeypatch.setattr("paceline.checkpoint.locate.locate_drafter", lambda name, offline: places[name])
    command = shown(capsys, "owner/target@v1", "--draft-model", "owner/drafter@abc")
    assert command[2] == "owner/target" and command[command.index("--revision") + 1] == "v1"
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert (speculative["model"], speculative["revision"]) == ("owner/drafter", "abc")


def test_words_that_belong_to_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "m", "more", "--dry-run"]) == 2
    assert "what is 'more'?" in capsys.readouterr().err
    assert run(["serve", "m", "--engine-command", "x", "--dry-run"]) == 2
    assert "starts no other program" in capsys.readouterr().err


def test_a_target_in_a_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "target.gguf").touch()
    assert run(["serve", str(tmp_path / "target.gguf"), "--engine", "vllm", "--offline", "--dry-run"]) == 2
    assert "vLLM is given folders and hub names" in capsys.readouterr().err


def test_the_process_becomes_vllm(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A lone key of clients is in its environment, where no other user reads it; its exit code is the command's."""
    fake = tmp_path / "fake-vllm"
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('VLLM_API_KEY'), "
    code += "os.environ.get('HF_HUB_OFFLINE')])); sys.exit(7)"
    fake.write_text(f"#!{sys.executable}\n{code}\n")
    fake.chmod(0o755)
    command = [sys.executable, "-m", "paceline", "serve", *map(str, pair[:1]), "--draft-model", str(pair[1])]
    command += ["--engine", "vllm", "--engine-command", str(fake), "--offline", "--api-key", "secret"]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 7, done.stderr
    arguments, key, offline = json.loads(done.stdout)
    assert arguments[:2] == ["serve", str(pair[0])] and "secret" not in arguments
    assert (key, offline) == ("secret", "1") and "paceline check" in done.stderr


# What vLLM would misread


@pytest.fixture
def drafter(pair: tuple[Path, Path]) -> DrafterContract:
    return read_drafter(pair[1]).contract


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"has_tap_norm": True}, "norms of the taps"),
        ({"family": "dflash2", "has_tap_norm": True}, "norms of the taps"),
        ({"layout": "anchor_sampling"}, "whose anchor row drafts"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale 2.0"),
        ({"output_multiplier": 0.5}, "output_multiplier 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"aux_hidden_stream": "attn_res"}, "taps of the stream attn_res"),
    ],
)
def test_what_vllm_would_misread(drafter: DrafterContract, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert obstacles_for_vllm(drafter, "zlab", tmp_path, {}) == []
    (found,) = obstacles_for_vllm(replace(drafter, **changes), "zlab", tmp_path, {})
    assert named in found


def test_what_other_families_and_builds_have(drafter: DrafterContract, tmp_path: Path) -> None:
    mixture = replace(drafter, aux_hidden_stream="attn_res")
    assert obstacles_for_vllm(mixture, "zlab", tmp_path, {STREAM_VARIABLE: "1"}) == []
    scaled = replace(drafter, family="dflash2", output_multiplier=0.5)
    assert obstacles_for_vllm(scaled, "zlab", tmp_path, {}) == []
    normed = replace(drafter, family="dspark", layout="anchor_sampling", has_tap_norm=True)
    assert obstacles_for_vllm(normed, "kimi", tmp_path, {}) == []


def test_folders_that_it_cannot_read(drafter: DrafterContract, tmp_path: Path) -> None:
    (found,) = obstacles_for_vllm(drafter, "assistant", tmp_path, {})
    assert "the layout of the folder, assistant" in found
    for name in ("model.safetensors", "fingerprint.safetensors"):
        (tmp_path / name).touch()
    (found,) = obstacles_for_vllm(drafter, "zlab", tmp_path, {})
    assert "fingerprint.safetensors, model.safetensors" in found
    (tmp_path / "model.safetensors.index.json").touch()
    assert obstacles_for_vllm(drafter, "zlab", tmp_path, {}) == []


def test_the_command_line_says_all_of_it(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    for file in pair[1].iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["output_multiplier"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    command = ["serve", str(pair[0]), "--draft-model", str(folder), "--engine", "vllm", "--offline", "--dry-run"]
    assert run(command) == 1
    assert (
        "CompatibilityError: vLLM does not serve this drafter as it was trained: output_multiplier 0.5"
        in capsys.readouterr().err
    )
