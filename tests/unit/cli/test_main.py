from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from tests.unit.cli.surface import FROZEN, current_surface

import paceline
from paceline.cli import main as main_module
from paceline.cli.main import main
from paceline.errors import CheckFailedError, CheckpointError, ConfigError

SOURCE = str(Path(paceline.__file__).parents[1])


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_the_surface_is_frozen() -> None:
    """A change here is deliberate: run `python -m tests.unit.cli.surface` and say it in the changelog."""
    assert current_surface() == FROZEN.read_text(encoding="utf-8")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"paceline {paceline.__version__}\n"


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generat"]) == 2
    assert "generate" in capsys.readouterr().err
    assert run(["generate", "m", "--max-tokens", "many"]) == 2
    assert run(["generate", "m", "--no-such-flag"]) == 2
    assert capsys.readouterr().out == ""


def _raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def act(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("paceline.cli.doctor._versions", act)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CheckpointError("a is 1, b is 2", origin={"file": "x"}, hint="y"), 1, "CheckpointError: a is 1, b is 2"),
        (ConfigError("wrong"), 2, "ConfigError: wrong"),
        (CheckFailedError("no"), 3, "CheckFailedError: no"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (OSError(errno.ENOSPC, "No space left on device", "out"), 1, "OSError: No space left on device: out"),
        (typer.Exit(7), 7, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    monkeypatch.setattr(main_module, "_silence_stdout", lambda: None)
    _raising(monkeypatch, error)
    assert run(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(line)
    assert bool(captured.err) == bool(line)
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("ask", ["flag", "variable"])
def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ask: str
) -> None:
    _raising(monkeypatch, CheckpointError("bad"))
    if ask == "variable":
        monkeypatch.setenv("PACELINE_DEBUG", "1")
    assert run(["doctor", *(["--debug"] if ask == "flag" else [])]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_a_wrong_environment_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "loud")
    assert run(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: PACELINE_LOG_LEVEL is 'loud'")


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": SOURCE, "PATH": "/usr/bin:/bin"},
    )


_WITHOUT_TORCH = """
import sys
from paceline.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "transformers", "tokenizers", "numpy", "gguf", "safetensors", "yaml"} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["train", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    done = _python(_WITHOUT_TORCH, *arguments)
    assert done.returncode == 0
    assert done.stderr == "[]\n"


def test_a_dry_run_never_loads_torch(tmp_path: Path) -> None:
    done = _python(_WITHOUT_TORCH, "generate", "m", "--prompt", "x", "--max-tokens", "3", "--dry-run")
    assert done.returncode == 0
    assert "max_tokens = 3" in done.stdout
    assert not {"torch", "transformers"} & set(done.stderr.splitlines()[-1].strip("[]").replace("'", "").split(", "))


def test_help_answers_at_once() -> None:
    """Half a second of a core, at best of five: what else the machine is busy with does not count."""

    def once() -> float:
        before = os.times()
        _python("from paceline.cli.main import main; main(['--help'])")
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert any(once() < 0.5 for _ in range(5))


_WITHOUT_LOADING = ["generate", "m", "--prompt", "x", "--dry-run", "--json"]  # writes JSON, and never imports torch


def test_a_closed_pipe_is_quiet() -> None:
    code = f"from paceline.cli.main import main; main({_WITHOUT_LOADING})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": SOURCE, "PATH": "/usr/bin:/bin"},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    try:
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == ""
    finally:
        process.stderr.close()


@pytest.mark.parametrize("descriptors", [(1,), (2,), (1, 2)])
def test_streams_that_are_closed_take_what_is_written(descriptors: tuple[int, ...]) -> None:
    """As with `>&-` in a shell, or where there is no console."""
    code = "import os, sys\nfor number in map(int, sys.argv[1:]): os.close(number)\n"
    code += f"os.execv(sys.executable, [sys.executable, '-m', 'paceline', *{_WITHOUT_LOADING}])"
    done = _python(code, *map(str, descriptors))
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (1 not in descriptors)


_WITH_A_GROUP = """
import atexit, sys, types
from paceline.cli.main import main
is_launched = sys.argv.pop(1) == "launched"
sys.modules["torch.distributed"] = types.SimpleNamespace(
    is_available=lambda: True, is_torchelastic_launched=lambda: is_launched
)
atexit.register(print, "the interpreter's clean-up")
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("arguments", "code"), [(("--version",), 0), (("no-such-verb",), 2)])
def test_a_process_of_torchrun_leaves_without_the_interpreters_clean_up(arguments: tuple[str, ...], code: int) -> None:
    """A thread of the group that wakes up in there would end the process by SIGABRT."""
    launched, alone = (_python(_WITH_A_GROUP, how, *arguments) for how in ("launched", "alone"))
    assert launched.returncode == alone.returncode == code
    assert "clean-up" in alone.stdout
    assert launched.stdout == alone.stdout.replace("the interpreter's clean-up\n", "")
    assert launched.stderr == alone.stderr


def test_module_entry_point() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, env={"PYTHONPATH": SOURCE}
    )
    assert (done.returncode, done.stdout) == (0, f"paceline {paceline.__version__}\n")


def _verbs() -> list[Callable[..., object]]:
    return [info.callback for info in main_module.app.registered_commands if info.callback is not None]


@pytest.mark.parametrize("verb", _verbs(), ids=lambda verb: verb.__name__)
def test_every_verb_has_a_sentence(verb: Callable[..., object]) -> None:
    assert verb.__doc__ and verb.__doc__.strip().endswith(".")


@pytest.mark.parametrize(("code", "left"), [(None, 0), (3, 3), ("why", 1)])
def test_a_launched_process_leaves_with_its_own_code(code: str | int | None, left: int) -> None:
    """Also where a stream is closed, which `flush` answers by a ValueError; a text as code is still printed."""
    script = "import sys, torch.distributed; from paceline.cli.main import _leave_at_once_if_launched as leave; "
    script += f"sys.stdout.close(); leave({code!r}); sys.exit(9)"
    environment = {**os.environ, "PYTHONPATH": SOURCE, "TORCHELASTIC_RUN_ID": "of-this-test"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (left, "why\n" if code == "why" else "")
