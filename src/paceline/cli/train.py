"""`paceline train RUN.toml key=value ...`: train a drafter, resume a stopped run, or estimate one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.errors import EXIT_DONE, EXIT_INTERRUPTED

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
    """Train a drafter for a target from conversations, with exact resume.

    Several GPUs or machines share a run under torchrun: `torchrun --nproc-per-node 4 -m paceline train RUN`.
    """
    session, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.configuration.load import load_settings
    from paceline.configuration.run import TrainRun

    run = load_settings(TrainRun, config, [*(overrides or ()), *(set_values or ())])
    _check_files(run, config)
    options.set_threads(threads, environment)
    if dry_run:
        from paceline.cli.estimate import estimate_run

        options.show_settings(run, as_json=as_json, extra=estimate_run(run, offline=offline))
        return
    outcome = _train(run, resume=resume, offline=offline, session=session)
    if as_json:
        options.print_json({key: str(value) if isinstance(value, Path) else value for key, value in outcome.items()})
    elif outcome["drafter"] is not None:
        typer.echo(outcome["drafter"])
    if not outcome["is_finished"]:
        typer.echo(f"stopped at step {outcome['step']}; the same command with --resume goes on from there", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def _train(run: TrainRun, *, resume: bool, offline: bool, session: options.Session) -> dict[str, object]:
    """Load and train, in as many processes as there are; the first one alone talks and returns."""
    from dataclasses import asdict

    from paceline.log import configure_logging, get_logger
    from paceline.models.loading import load_target
    from paceline.reporting.training_progress import TrainingDisplay
    from paceline.training import loop
    from paceline.training.event_file import require_tensorboard
    from paceline.training.launching import join_ranks
    from paceline.training.ranks import OtherRankFailedError
    from paceline.training.run_folder import checkpoint_to_start_from

    if run.tracking.tensorboard:
        require_tensorboard()
    try:
        with join_ranks(run.device, run.distributed) as ranks:
            if not ranks.is_first:
                configure_logging(verbosity=-1, color=session.color, rank=ranks.rank)
            ranks.first_only(lambda: checkpoint_to_start_from(run.output, resume=resume))
            ranks.together(lambda: _check_sizes(run, offline=offline))
            get_logger(__name__).info("loading target %s", run.target.name)
            target = ranks.together(
                lambda: load_target(
                    run.target.name,
                    dtype=run.target.dtype,
                    device=str(ranks.device),
                    linear_mode=run.target.linear_mode,
                    takes_codes=False,
                    offline=offline,
                )
            )
            verbosity = session.verbosity if ranks.is_first else -1
            with TrainingDisplay(color=session.color, verbosity=verbosity) as display:
                outcome = loop.train(run, target, resume=resume, on_progress=display.update, ranks=ranks)
    except OtherRankFailedError as error:  # that rank has said what it was
        raise typer.Exit(error.exit_code) from error
    if not ranks.is_first:
        raise typer.Exit(EXIT_DONE if outcome.is_finished else EXIT_INTERRUPTED)
    return asdict(outcome)


def _check_sizes(run: TrainRun, *, offline: bool) -> None:
    """See from its config alone that the target has what the drafter asks for: loading it may take minutes."""
    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.target_config import read_target_contract
    from paceline.training.contract import drafter_contract

    drafter_contract(run, read_target_contract(locate_target(run.target.name, offline=offline), run.target.name))


def _check_files(run: TrainRun, config: Path) -> None:
    """Missing data is a matter of a second, not of a minute of loading."""
    from paceline.errors import CheckpointError, DataError

    missing = [str(file) for file in run.data.files if not file.exists()]
    if missing:
        raise DataError(
            f"data.files names {len(missing)} file(s) that do not exist: {', '.join(missing)}",
            origin={"data.files": config, "working folder": Path.cwd()},
            hint="data.files='[\"path/to/file.npz\"]' on the command line; paths are relative to the working folder",
        )
    start = run.drafter.start_from
    if start is not None and not start.is_dir():
        raise CheckpointError(
            f"drafter.start_from names a folder that does not exist: {start}",
            origin={"drafter.start_from": config, "working folder": Path.cwd()},
            hint="drafter.start_from=path/to/drafter; paths are relative to the working folder",
        )
