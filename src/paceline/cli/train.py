"""`paceline train RUN.toml key=value ...`: train a drafter, resume a stopped run, or estimate one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from paceline.configuration.run import TrainRun


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="RUN", help="TOML or YAML file of settings.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Changes to it, such as schedule.num_steps=200.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output folder.")
    ] = False,
    set_values: options.SetValues = None,
    offline: options.Offline = False,
    threads: options.Threads = None,
    as_json: options.Json = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show settings, data and an estimate of memory and time; write nothing.",
            rich_help_panel=options.SETTINGS,
        ),
    ] = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Train a drafter for a target from conversations, with exact resume."""
    _, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.configuration.load import load_settings
    from paceline.configuration.run import TrainRun

    run = load_settings(TrainRun, config, [*(overrides or ()), *(set_values or ())])
    _check_files(run, config)
    options.set_threads(threads, environment)
    from paceline.training import loop

    if dry_run:
        options.show_settings(run, as_json=as_json, extra=loop.estimate(run, offline=offline))
        return
    outcome = loop.train(run, resume=resume, offline=offline)
    if as_json:
        options.print_json(outcome)
    else:
        for key, value in outcome.items():
            typer.echo(f"{key}: {value}")


def _check_files(run: TrainRun, config: Path) -> None:
    """Missing data is a matter of a second, not of a minute of loading."""
    from paceline.errors import DataError

    missing = [str(file) for file in run.data.files if not file.is_file()]
    if missing:
        raise DataError(
            f"data.files names {len(missing)} file(s) that do not exist: {', '.join(missing)}",
            origin={"data.files": config, "working folder": Path.cwd()},
            hint="data.files='[\"path/to/file.npz\"]' on the command line; paths are relative to the working folder",
        )
