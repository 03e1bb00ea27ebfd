"""`paceline capture`: data for training. Conversations that a target writes, its states for them, their figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.capture_counts import counts
from paceline.cli.capture_features import features
from paceline.cli.capture_stats import stats
from paceline.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from paceline.capture.prompts import PromptCapture
    from paceline.cli.options import Session
    from paceline.configuration.capture import CapturePromptsRun
    from paceline.configuration.environment import Environment

_SOURCE, _ANSWERS, _PORTIONS = "Prompts", "Answers", "Portions"

app = typer.Typer(name="capture", help="Make data for training from a target.", no_args_is_help=True)


def prompts(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="TARGET", help="A folder, a .gguf file, a hub name or an alias.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the shards; goes on where it was stopped.")],
    self_chat: Annotated[
        int | None,
        typer.Option(metavar="N", help="Let the target ask, too: start N conversations.", rich_help_panel=_SOURCE),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Answer these: JSONL with prompt or messages.", rich_help_panel=_SOURCE
        ),
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Evaluation prompts that none may resemble; repeatable.", rich_help_panel=_SOURCE
        ),
    ] = None,
    exclude_ngram: Annotated[
        int | None, typer.Option(help="Words in a row that count as resembling; 8.", rich_help_panel=_SOURCE)
    ] = None,
    max_user_tokens: Annotated[
        int | None, typer.Option(help="Drop longer user turns of self-chat; 98.", rich_help_panel=_SOURCE)
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Leave out longer prompts instead of refusing them.", rich_help_panel=_SOURCE)
    ] = None,
    max_answer_tokens: Annotated[
        int | None, typer.Option(help="Cut answers there; 320.", rich_help_panel=_ANSWERS)
    ] = None,
    greedy_share: Annotated[
        float | None, typer.Option(help="Share of conversations answered greedily; 0.75.", rich_help_panel=_ANSWERS)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of the other answers; 0.8.", rich_help_panel=_ANSWERS)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Share of probability of the other answers; 1.", rich_help_panel=_ANSWERS)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of all choices and draws; 0.", rich_help_panel=_ANSWERS)] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="engine|lockstep", help="lockstep is for thousands of rows on a GPU.", rich_help_panel=_PORTIONS
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Conversations at the same time; 64.", rich_help_panel=_PORTIONS)
    ] = None,
    shard_size: Annotated[
        int | None,
        typer.Option(help="Conversations per shard, which a kill can cost; 1024.", rich_help_panel=_PORTIONS),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Processes; more than one need the ray extra.", rich_help_panel=_PORTIONS),
    ] = 1,
    draft_model: options.DraftModel = None,
    spec_tokens: options.SpecTokens = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    config: options.ConfigFile = None,
    set_values: options.SetValues = None,
    as_json: options.Json = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show settings and an estimate of disk and time; write nothing.",
            rich_help_panel=options.SETTINGS,
        ),
    ] = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Let a target write conversations, for `data.files` of a training run.

    Stopped in whatever way, the same command goes on at the first shard that is missing.
    """
    session, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.configuration.capture import CapturePromptsRun
    from paceline.configuration.load import load_settings

    run = load_settings(CapturePromptsRun, config, set_values or (), options.asked(context, CapturePromptsRun))
    _capture_prompts(run, session, environment, workers=workers, dry_run=dry_run, as_json=as_json)


@dataclass(frozen=True)
class PromptJob:
    """A capture as a process of its own is given it.

    Attributes:
        run: settings.
        working_folder: what their paths are relative to.
    """

    run: CapturePromptsRun
    working_folder: str

    def open(self) -> Callable[[int], object]:
        """Load target and drafter; returns what writes a shard."""
        os.chdir(self.working_folder)
        return _loaded(self.run).open()


def _capture_prompts(
    run: CapturePromptsRun,
    session: Session,
    environment: Environment,
    *,
    workers: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    _check_files(run)
    if workers > 1:
        from paceline.capture.fan_out import require_ray

        require_ray()  # before a minute of loading
    options.set_threads(run.threads, environment)
    capture = _loaded(run)
    if dry_run:
        from dataclasses import asdict

        options.show_settings(run, as_json=as_json, extra={"estimate": asdict(capture.estimate())})
        return
    try:
        figures = capture.run_all(None if workers == 1 else _spread(run, workers))
    except KeyboardInterrupt:
        typer.echo(f"stopped; the same command goes on in {run.output} with the shards that are missing", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        options.print_json({"folder": str(run.output), **figures})
        return
    if session.verbosity >= 0:
        for key, value in figures.items():
            typer.echo(f"{key}: {value}", err=True)
    typer.echo(run.output)


def _spread(run: CapturePromptsRun, workers: int) -> Callable[[Sequence[int], Callable[[int], None]], None]:
    import torch

    from paceline.capture.fan_out import FanOutSettings, fan_out
    from paceline.models.loading import resolve_device

    is_gpu = resolve_device(run.device).type == "cuda"
    settings = FanOutSettings(workers, num_gpus_per_worker=1.0 if is_gpu else 0.0, num_threads=torch.get_num_threads())
    job = PromptJob(run, str(Path.cwd()))
    return lambda missing, on_done: fan_out(job, missing, settings, on_done)


def _loaded(run: CapturePromptsRun) -> PromptCapture:
    from paceline.log import get_logger

    log = get_logger(__name__)
    log.info("loading target %s", run.model)
    from paceline.capture.prompts import PromptCapture
    from paceline.models.loading import load_drafter, load_target

    target = load_target(
        run.model, dtype=run.dtype, device=run.device, linear_mode=run.linear_mode, offline=run.offline
    )
    drafter = None
    if run.draft_model is not None:
        log.info("loading drafter %s", run.draft_model)
        drafter = load_drafter(run.draft_model, target, num_draft_tokens=run.spec_tokens, offline=run.offline)
    return PromptCapture(run, target, drafter)


def _check_files(run: CapturePromptsRun) -> None:
    """A missing file is a matter of a moment, not of a minute of loading."""
    from paceline.errors import DataError

    named = {"--from": [run.prompts] if run.prompts is not None else [], "--exclude": list(run.exclude)}
    for flag, files in named.items():
        for file in files:
            if not file.is_file():
                raise DataError(f"{file} does not exist or is no file", origin={flag: "settings"})


for verb in (prompts, features, stats, counts):
    app.command()(verb)
