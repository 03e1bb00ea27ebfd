"""The command line: one verb per file, registered here.

Exit codes: 0 done, 1 failed, 2 usage, 3 a check says no, 130 interrupted. Data goes to stdout, everything else to
stderr. A mistake that its reader can mend is printed as `Name: message`, without a traceback unless `--debug` or
PACELINE_DEBUG=1 asks for one; our own bugs keep theirs.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.cli.bench import bench
from paceline.cli.capture import app as capture
from paceline.cli.chat import chat
from paceline.cli.check import check
from paceline.cli.convert import convert
from paceline.cli.doctor import doctor
from paceline.cli.download import download
from paceline.cli.evaluate import evaluate
from paceline.cli.generate import generate
from paceline.cli.inspect import inspect
from paceline.cli.options import Session
from paceline.cli.parity import parity
from paceline.cli.report import report
from paceline.cli.serve import serve
from paceline.cli.train import train
from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, PacelineError

if TYPE_CHECKING:
    from typing import NoReturn


class PacelineGroup(TyperGroup):
    """The top command, which turns our errors, Ctrl-C and a closed pipe into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        session = ctx.obj = Session()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe must show itself here, not in the interpreter's own clean-up
            return result
        except PacelineError as error:
            if session.debug:
                traceback.print_exc()
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except BrokenPipeError as error:
            _silence_stdout()
            raise typer.Exit(EXIT_FAILED) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except (MemoryError, RuntimeError) as error:
            if type(error).__name__ not in ("MemoryError", "OutOfMemoryError"):  # torch has its own, unloaded here
                raise
            if session.debug:
                traceback.print_exc()
            first_line = str(error).splitlines()[0] if str(error) else "no memory left"
            typer.echo(f"CapacityError: {first_line}\n  try: less at a time, or a smaller model", err=True)
            raise typer.Exit(EXIT_FAILED) from error
        except OSError as error:
            if session.debug:
                traceback.print_exc()
            place = f": {error.filename}" if error.filename else ""
            typer.echo(f"{type(error).__name__}: {error.strerror or error}{place}", err=True)
            raise typer.Exit(EXIT_FAILED) from error


app = typer.Typer(
    name="paceline",
    cls=PacelineGroup,
    help="Block-drafting speculative decoding: train, check and serve drafters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Block-drafting speculative decoding: train, check and serve drafters that ride on a target's hidden states."""


for verb in (generate, chat, serve, train, evaluate, bench, report, inspect, check, parity, convert, download, doctor):
    # what stands behind -- is another program's, which `serve` may start
    app.command(context_settings={"allow_extra_args": verb is serve})(verb)
app.add_typer(capture)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code.

    Args:
        arguments: what follows the program's name; None takes the process's own.
    """
    _ready_streams()
    try:
        typer.main.get_command(app)(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="paceline")
    except KeyboardInterrupt:  # between the verb's end and the interpreter's
        _leave_at_once_if_launched(EXIT_INTERRUPTED)
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as leaving:
        _leave_at_once_if_launched(leaving.code)
        raise
    sys.exit(0)


def _leave_at_once_if_launched(code: str | int | None) -> None:
    """End a process that torchrun started here, without the interpreter's own clean-up.

    Threads of a process group may be left: a failed one waits for a process that is gone, and torch's caches of sharded
    tensors keep a finished one. A thread that wakes up while the interpreter ends, and has to let go of a tensor, ends
    the process by SIGABRT in place of its exit code.
    """
    distributed = sys.modules.get("torch.distributed")  # without it nothing was joined
    if distributed is None or not (distributed.is_available() and distributed.is_torchelastic_launched()):
        return
    if isinstance(code, str):  # which the interpreter would print
        with contextlib.suppress(OSError, ValueError):
            print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a pipe that is closed, a stream that is
            stream.flush()
    os._exit((code if isinstance(code, int) else EXIT_FAILED) if code is not None else 0)


def _ready_streams() -> None:
    """Make stdout and stderr take whatever is written to them.

    A stream that its caller has closed is None in Python; what is written there goes nowhere. A character that stdout's
    encoding does not know is written as an escape, so that it does not cost the rest of an answer.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, it stays open to the end
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about the closed pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
