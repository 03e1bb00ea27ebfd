"""`paceline chat`: settings, commands, what goes where, and terminals with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import tiny_target
from tests.tiny_run import write_target_folder
from tests.unit.cli.fakes import ANSWER, FakeEngine, fake_models
from tests.unit.cli.test_main import SOURCE, run

from paceline.cli import running

CHAT = ["chat", "m", "--draft-model", "d"]
FIGURES = "17 tokens, 4000.0 tokens/s, acceptance length 4.00 over 4 steps, 0 of 2 prompt tokens cached\n"


class World:
    """One scripted engine in place of the real one, and what is typed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine()
        self.models = fake_models()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(running, "load_models", lambda settings, environment: self.models)
        monkeypatch.setattr(running, "make_engine", lambda settings, models, **sizes: self.engine.sized(**sizes))

    def type(self, text: str) -> None:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(text))

    def prompts(self) -> list[str]:
        return ["".join(map(chr, result.prompt_ids)) for result in self.engine.results.values()]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_answers_on_stdout_and_figures_on_stderr(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.type("hi\n")
    assert run(CHAT) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (ANSWER, FIGURES)
    world.type("hi\n")
    assert run([*CHAT, "-q"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (ANSWER, "")


def test_a_conversation(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = ["one", "", "two", "/undo", "three", f"/save {tmp_path / 'a.jsonl'}", "/reset", "four", "/exit", "five"]
    world.type("\n".join(lines))
    assert run([*CHAT, "--system", "S"]) == 0
    assert world.prompts() == ["Sone", f"Sone{ANSWER}two", f"Sone{ANSWER}three", "Sfour"]
    captured = capsys.readouterr()
    assert captured.out == ANSWER * 4
    assert "taken back: two\n" in captured.err and "5 messages written" in captured.err
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[3]) == {"role": "user", "content": "three"}


def test_retry_asks_with_another_seed(world: World) -> None:
    world.type("one\n/retry\n")
    assert run([*CHAT, "--temperature", "1", "--seed", "3"]) == 0
    assert world.prompts() == ["one", "one"] and world.engine.seeds == [3, 4]


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("a\\\nb\\\nc\n", "a\nb\nc"),
        ("\ufeffa\r\n", "a"),
        (" /help\n", " /help"),
        ("a\\\n/help\n", "a\n/help"),
        ("no end", "no end"),
        ("a\\", "a"),
    ],
)
def test_lines(world: World, typed: str, asked: str) -> None:
    world.type(typed)
    assert run(CHAT) == 0
    assert world.prompts() == [asked]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nothing", "RequestError: there is no command /nothing\n  try: /help"),
        ("/undo", "there is no message to take back"),
        ("/retry", "there is no message to answer again"),
        ("/save", "/save needs the name of a file"),
        ("/exit now", "/exit takes nothing behind it, found 'now'"),
        ("x" * 3000, "has 3000 tokens with this message; a context of 2048"),
    ],
)
def test_a_mistake_ends_nothing_and_shows_in_the_exit_code(
    world: World, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    world.type(f"{line}\nhi\n")
    assert run(CHAT) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("Error") == 1 and captured.out == ANSWER


def test_saving_refuses_a_file_that_exists(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    world.type(f"hi\n/save {tmp_path / 'mine'}\n")
    assert run(CHAT) == 1
    assert "exists, and nothing is written over it" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"


def test_help_goes_to_stderr(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.type("/help\n")
    assert run([*CHAT, "-q"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    for name in ("/help", "/reset", "/undo", "/retry", "/save FILE", "/exit"):
        assert f"\n{name} " in f"\n{captured.err}"


def test_ctrl_c_ends_an_answer(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.engine.interrupt_after = 3
    world.type("one\ntwo\n")
    assert run(CHAT) == 0
    captured = capsys.readouterr()
    assert captured.out == f"hello wid\n{ANSWER}" and ", interrupted\n" in captured.err
    assert world.prompts()[1] == "onehello widtwo"


def test_answers_that_were_cut_say_by_what(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.engine.last_reason = "length"
    world.type("hi\n")
    assert run([*CHAT, "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello\n" and ", cut at max_tokens 5\n" in captured.err
    world.type("hi\n")
    assert run(CHAT) == 0
    assert ", cut: the context is full; /reset\n" in capsys.readouterr().err


def test_half_an_answer_ends_its_line_before_the_error(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.engine.last_reason, world.engine.answer = "error", "hello"
    world.type("hi\n")
    assert run(CHAT) == 1
    captured = capsys.readouterr()
    assert captured.out == "hello\n" and captured.err.startswith("NumericError: the answer ended after 5 tokens")


def test_text_that_is_none(world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    assert run(CHAT) == 1
    assert "DataError: the text on stdin is not utf-8" in capsys.readouterr().err


def test_a_target_without_template(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.models.target.tokenizer.has_chat_template = False
    world.type("hi\n")
    assert run(CHAT) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "no chat template" in captured.err and "paceline generate --raw" in captured.err


def test_settings(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CHAT, "--dry-run", "--json", "--logit-bias", "4=-2", "--stop", "\n\n"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["max_tokens"], settings["draft_length"]) == (1024, "adaptive")
    assert (settings["logit_bias"], settings["stop"]) == ({"4": -2.0}, ["\n\n"])
    for arguments, named in ((["--json"], "--dry-run"), (["--set", "raw=true"], "raw"), (["--top-p", "2"], "top_p")):
        assert run([*CHAT, *arguments]) == 2
        assert named in capsys.readouterr().err
    world.type("hi\n")
    assert run([*CHAT, "--stop", "x", "--bad-word", "y", "--allowed-token-id", "5", "--stop-token-id", "6"]) == 0
    asked: Any = world.engine.asked[-1]
    assert (asked.stop, asked.bad_words, asked.allowed_token_ids, asked.stop_token_ids) == (("x",), ("y",), (5,), (6,))
    assert world.engine.sizes == {"num_prompt_tokens": 7168}


class Terminal:
    """The program on a terminal of its own, for stdin and stdout; stderr is apart.

    Args:
        target: folder.
    """

    def __init__(self, target: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "chat", str(target), "--max-tokens", "4", "--ignore-eos"],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE, "TERM": "dumb"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        self.seen = ""

    def await_sign(self, number: int) -> None:
        """Wait until the sign stands there for the n-th time."""
        while self.seen.count("> ") < number:
            assert select.select([self._ours], [], [], 60)[0], self.seen
            self.seen += os.read(self._ours, 4096).decode()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> str:
        err = self.process.communicate(timeout=60)[1]
        os.close(self._ours)
        return err


def test_a_terminal(tmp_path: Path) -> None:
    """Signs and answers on it; Ctrl-D ends the one with 0, Ctrl-C the other with 130."""
    target = write_target_folder(tmp_path / "target", tiny_target())
    terminals = [Terminal(target), Terminal(target)]
    try:
        for terminal in terminals:
            terminal.await_sign(1)
        terminals[0].type("/nonsense\n")
        terminals[0].await_sign(2)
        terminals[0].type("w5 w6\n")
        terminals[0].await_sign(3)
        terminals[0].type("\x04")
        terminals[1].process.send_signal(signal.SIGINT)
        left, interrupted = (terminal.end() for terminal in terminals)
    finally:
        for terminal in terminals:
            terminal.process.kill()
    assert terminals[0].process.returncode == 0 and "4 tokens, " in left, left  # a refusal is no failure here
    assert "/help shows the commands" in left and "there is no command /nonsense" in left
    assert " w" in terminals[0].seen.split("w5 w6")[1]
    assert terminals[1].process.returncode == 130 and interrupted.endswith("leaves\n\ninterrupted\n")
    assert "Traceback" not in left + interrupted
