"""`paceline report PATH [PATH ...]`: what a run did, step by step and in figures, in the terminal or as one page."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.reporting.inputs import ReportInput, TraceInput
    from paceline.reporting.sections import Section

_PIPE_WIDTH = 160
_PROMPTS_IN_TERMINAL, _PROMPTS_ON_PAGE = 1, 24


def report(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="Trace files, folders of training runs, results of `evaluate --json` or `bench`; two traces of the "
            "same prompts are compared.",
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write one self-contained page in place of the text.", rich_help_panel=options.OUTPUT
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a file that is no report.", rich_help_panel=options.OUTPUT),
    ] = False,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Draw the answers to this prompt; repeatable. Figures are of all."),
    ] = None,
    max_prompts: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Answers that are drawn; {_PROMPTS_IN_TERMINAL} in a terminal, {_PROMPTS_ON_PAGE} on a page."
        ),
    ] = None,
    first_refusal: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Maps show the steps whose first refused draft stood at position N."),
    ] = None,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Show what drafts became of: tokens, blocks, figures with intervals, and two set-ups side by side."""
    session, _ = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.reporting.inputs import read_input
    from paceline.reporting.sections import Drawing

    if html is not None:
        from paceline.reporting.html import check_output

        check_output(html, force=force)
        if any(html.exists() and path.exists() and html.samefile(path) for path in paths):
            raise ConfigError("the page would replace what it is made of", origin={"--html": html})
    inputs = [read_input(path) for path in paths]
    default = _PROMPTS_IN_TERMINAL if html is None else _PROMPTS_ON_PAGE
    drawing = Drawing(
        prompts=tuple(prompt or ()),
        most_prompts=max_prompts if max_prompts is not None else max(default, len(prompt or ())),
        first_refusal=first_refusal,
    )
    _check_prompts(inputs, drawing.prompts)
    sections = sections_of(inputs)
    if html is not None:
        from paceline.reporting.html import render_page, write_page

        command = shlex.join(["paceline", *sys.argv[1:]])
        write_page(html, render_page(sections, drawing, title=_title(sections), command=command))
        if session.verbosity >= 0:
            typer.echo(f"{html}: {html.stat().st_size / 1000:.0f} kB", err=True)
    if as_json:
        options.print_json(_figures(sections))
    elif html is None:
        from rich.console import Console

        from paceline.reporting.section_terminal import print_section

        width = None if sys.stdout.isatty() else _PIPE_WIDTH  # a map of blocks wants room
        console = Console(color_system="auto" if session.color else None, highlight=False, width=width)
        for index, section in enumerate(sections):
            if index:
                console.print()
            print_section(console, section, drawing)


def sections_of(inputs: Sequence[ReportInput]) -> list[Section]:
    """What is said of inputs: two traces with drafts are compared first, then each is shown by itself.

    Raises:
        ConfigError: more than two traces with drafts are given.
        DataError: two traces have no prompt in common.
    """
    from paceline.evaluation.trace_figures import trace_figures
    from paceline.evaluation.trace_pairs import compare_traces
    from paceline.reporting.inputs import ResultInput, TraceInput, TrainingInput
    from paceline.reporting.pair_section import pair_section
    from paceline.reporting.result_sections import result_section
    from paceline.reporting.sections import file_name
    from paceline.reporting.trace_section import trace_section
    from paceline.reporting.training_section import training_section

    traces = [each for each in inputs if isinstance(each, TraceInput)]
    drafted = [each for each in traces if each.drafted]
    if len(drafted) > 2:
        raise ConfigError(
            f"{len(drafted)} traces with drafts were given; two are compared at a time",
            hint="a report of each pair, or `paceline bench`, which measures several set-ups",
        )
    sections: list[Section] = []
    if len(drafted) == 2:
        names = _names([file_name(each.path) for each in drafted])
        sections.append(pair_section(names, compare_traces(drafted[0].drafted, drafted[1].drafted)))
    plain = [answer for each in traces for answer in each.plain]
    for given in inputs:
        if isinstance(given, TraceInput):
            sections.append(trace_section(given, trace_figures(given.drafted, plain) if given.drafted else None))
        elif isinstance(given, TrainingInput):
            sections.append(training_section(given))
        elif isinstance(given, ResultInput):
            sections.append(result_section(given))
    return sections


def _names(names: Sequence[str]) -> tuple[str, str]:
    first, second = names
    return (first, second) if first != second else (f"{first} (first)", f"{second} (second)")


def _check_prompts(inputs: Sequence[ReportInput], wanted: Sequence[str]) -> None:
    """A prompt that no trace has is a mistake, and would draw nothing without a word."""
    from paceline.reporting.inputs import TraceInput

    traces: list[TraceInput] = [each for each in inputs if isinstance(each, TraceInput)]
    known = {
        answer.trace.request_id if answer.prompt is None else answer.prompt.id
        for each in traces
        for answer in (*each.drafted, *each.plain)
    }
    missing = [name for name in wanted if name not in known]
    if missing:
        few = ", ".join(sorted(known)[:8])
        raise ConfigError(
            f"no trace has an answer to the prompt {missing[0]!r}", origin={"--prompt": few or "no trace was given"}
        )


def _title(sections: Sequence[Section]) -> str:
    return f"paceline report: {sections[0].title}"


def _figures(sections: Sequence[Section]) -> dict[str, object]:
    return {
        "sections": [
            {"title": section.title, "notes": section.notes, "figures": _plain(section.figures)} for section in sections
        ]
    }


def _plain(value: object) -> object:
    """NaN and infinity, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
