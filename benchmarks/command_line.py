"""What all benchmark scripts ask for and how they report: models and threads, progress, errors, the result file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.results import Row, describe_machine, make_result, write_result

from paceline.errors import EXIT_INTERRUPTED, PacelineError

TARGET = "smollm2-135m-instruct"
DRAFTER = "drafters/smollm2-135m-instruct-dflash2"
PROMPTS = Path("prompts/first.jsonl")
DTYPES = ("bfloat16", "float32")


def make_parser(description: str | None, *, has_drafter: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that every script has; the module's docstring is its description."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TARGET, help=f"target; default {TARGET}")
    if has_drafter:
        parser.add_argument("--draft-model", default=DRAFTER, help=f"drafter; default {DRAFTER}")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    return parser


def positive(text: str) -> int:
    """Argument type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def name_of(model: str) -> str:
    """What a table calls a model: the last part of its folder."""
    return Path(model).name


def say(text: str) -> None:
    """One line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def report(
    name: str,
    rows: Sequence[Row],
    options: argparse.Namespace,
    arguments: Sequence[str],
    *,
    device: str = "cpu",
    facts: Sequence[str] = (),
) -> None:
    """Write the result file if one was asked for."""
    if options.out is not None:
        machine = describe_machine(f"{options.threads} threads", *facts, device=device)
        say(f"wrote {write_result(options.out, make_result(name, rows, machine=machine, arguments=arguments))}")


def run(main: Callable[[Sequence[str]], int]) -> int:
    """Run a script's `main`; errors of paceline and Ctrl-C end in one message and their exit code."""
    try:
        return main(sys.argv[1:])
    except PacelineError as error:
        say(f"{type(error).__name__}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; nothing was written")
        return EXIT_INTERRUPTED
