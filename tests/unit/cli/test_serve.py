"""`paceline serve`: settings, the port, and a process from its start to the signal that ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder
from tests.unit.cli.test_main import SOURCE, run

from paceline.cli.serve import listen
from paceline.errors import ConfigError


def test_a_dry_run_shows_everything_but_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["serve", "m", "--api-key", "secret-1", "--api-key", "secret-2", "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    settings = json.loads(captured.out)["settings"]
    assert settings["api_keys"] == ["(set)", "(set)"] and "secret" not in captured.out + captured.err
    assert (settings["host"], settings["port"], settings["draft_length"]) == ("127.0.0.1", 8000, "adaptive")
    monkeypatch.setenv("PACELINE_API_KEY", "secret-3")
    assert run(["serve", "m", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["api_keys"] == ["(set)"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "port"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--canary", "later"], "canary"),
        (["--api-key", "no good"], "api_keys"),
        (["--spec-tokens", "4"], "draft_model"),
        (["--draft-length", "fixed"], "draft_model"),
        (["--request-timeout-s", "0"], "request_timeout_s"),
    ],
)
def test_wrong_settings(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    assert run(["serve", "m", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_port_that_is_taken_costs_no_loading(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "no/such-model", "--port", str(port), "--offline"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ConfigError: cannot listen on 127.0.0.1 port {port}") and "--port" in said


def test_addresses() -> None:
    with listen("localhost", 0) as one, listen("127.0.0.1", 0) as other:
        assert one.getsockname()[1] != other.getsockname()[1]
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        listen("203.0.113.1", 0)  # an address for documentation, which is nobody's
    for host in ("no such host", "two..dots", "l" * 70):
        with pytest.raises(ConfigError, match="cannot listen on"):
            listen(host, 0)


def test_a_model_that_is_not_there_ends_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["serve", str(tmp_path / "nothing"), "--port", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1:] != [] and "CheckpointError" in captured.err
    assert "Traceback" not in captured.err


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("served")
    target = tiny_target("qwen3", vocab_size=64)
    write_target_folder(folder / "target", target)
    return folder / "target", write_drafter(folder / "drafter", wrap_target(target))


class Program:
    """A server as a user starts it.

    Args:
        arguments: of `paceline serve`.
    """

    def __init__(self, *arguments: str | Path) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "serve", *map(str, arguments), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def await_line(self, beginning: str) -> str:
        assert self.process.stderr is not None
        while not self.lines or not self.lines[-1].startswith(beginning):
            self.lines.append(self.process.stderr.readline())
            assert self.lines[-1], "".join(self.lines)
        return self.lines[-1].strip()

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, "".join(self.lines) + err


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.process.kill()
        program.process.communicate()


def test_from_the_start_to_ctrl_c(pair: tuple[Path, Path], programs: list[Program]) -> None:
    target, drafter = pair
    (target / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 3, "eos_token_id": [2]}))
    programs.append(
        Program(
            target,
            *("--draft-model", drafter, "--served-model-name", "ours", "--linear-mode", "row_invariant"),
            *("--draft-length", "fixed", "--per-request-spec-decode-metrics", "summary", "--max-num-seqs", "2"),
        )
    )
    line = programs[0].await_line("serving ours at ")
    url = line.removeprefix("serving ours at ").removesuffix("/v1")
    with httpx2.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        body = {"prompt": "w5 w6 w7", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["model"] == "ours" and answer["usage"]["completion_tokens"] == 20
        assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] == 7
        info = client.get("/server_info").json()
    assert info["settings"]["draft_length"] == "fixed" and "api_keys" not in info["settings"]
    assert info["drafter"]["block_size"] == 8 and info["target"]["linear_mode"] == "row_invariant"
    code, out, err = programs[0].end(signal.SIGINT)
    assert (code, out) == (130, ""), err
    assert err.count("interrupted") == 1 and "Traceback" not in err


def test_ctrl_c_while_it_loads(pair: tuple[Path, Path], programs: list[Program]) -> None:
    target, drafter = pair
    programs.append(Program(target, "--draft-model", drafter))
    programs[0].await_line("loading target")
    started_s = time.monotonic()
    code, out, err = programs[0].end(signal.SIGINT)
    assert (code, out) == (130, ""), err
    assert "http://" not in err and "Traceback" not in err and time.monotonic() - started_s < 30
