"""`paceline train RUN.toml key=value ...`: train a drafter, resume a stopped run, or estimate one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.errors import EXIT_INTERRUPTED

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
    if dry_run:
        from paceline.cli.estimate import estimate_run

        options.show_settings(run, as_json=as_json, extra=estimate_run(run, offline=offline))
        return
    outcome = _train(run, resume=resume, offline=offline)
    if as_json:
        options.print_json({key: str(value) if isinstance(value, Path) else value for key, value in outcome.items()})
    elif outcome["drafter"] is not None:
        typer.echo(outcome["drafter"])
    if not outcome["is_finished"]:
        typer.echo(f"stopped at step {outcome['step']}; the same command with --resume goes on from there", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def _train(run: TrainRun, *, resume: bool, offline: bool) -> dict[str, object]:
    from dataclasses import asdict

    from paceline.log import get_logger
    from paceline.models.loading import load_target
    from paceline.training import loop

    get_logger(__name__).info("loading target %s", run.target.name)
    target = load_target(
        run.target.name, dtype=run.target.dtype, device=run.device, linear_mode="plain", offline=offline
    )
    return asdict(loop.train(run, target, resume=resume))


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
