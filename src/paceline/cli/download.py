"""`paceline download NAME ...`: targets and drafters from the hub, whole, checked, and at a commit that is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from paceline.checkpoint.contract import DrafterContract, TargetContract
    from paceline.checkpoint.download import DownloadPlan
    from paceline.checkpoint.hub import HubName


def download(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Targets and drafters: hub names owner/name, or owner/name@REVISION."),
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit; of one name.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="A new folder instead of the hub's cache; of one name."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="More files, such as '*Q8_0.gguf' or '*'; repeatable."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file, also those that are here; exit code 3 if one differs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show files, sizes and free space; fetch and write nothing.")
    ] = False,
    as_json: options.Json = False,
    offline: options.Offline = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Fetch targets and drafters from the hub, and check that they are whole."""
    session, _ = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.checkpoint.download import plan_download, require_space
    from paceline.checkpoint.hub import is_offline

    is_quiet = session.verbosity < 0
    wanted = {text: _hub_name(text, revision) for text in names}
    remote = [name for name in wanted.values() if name is not None]
    is_cached_only = is_offline(offline)
    _refuse_contradictions(remote, revision=revision, to=to, include=include, verify=verify, offline=is_cached_only)
    plans = [] if is_cached_only else [plan_download(name, include=include or (), folder=to) for name in remote]
    if dry_run and not is_cached_only:
        if as_json:
            options.print_json({"models": [_planned(plan) for plan in plans]})
        else:
            _show_plans(wanted, plans, verbosity=session.verbosity)
        require_space(plans)  # behind the figures that say why
        return
    require_space(plans)
    if is_quiet:
        _hide_progress()
    planned = {plan.name: plan for plan in plans}
    found = []
    for text, name in wanted.items():
        plan = planned.get(name) if name is not None else None
        if plan is not None and not (as_json or is_quiet):
            _show(plan, to_stderr=True, is_full=session.verbosity > 0)
        path, contract = _here(text, name) if plan is None else _fetched(plan, verify=verify)
        found.append({"name": text, "path": str(path), **_described(contract), **(_planned(plan) if plan else {})})
        if not as_json:
            typer.echo(path)
        if not is_quiet:
            typer.echo(_summary(text, name, contract, is_fetched=plan is not None), err=True)
    if as_json:
        options.print_json({"models": found})


def _hub_name(text: str, revision: str | None) -> HubName | None:
    """A name as the hub's; None where the files are on this machine anyway."""
    from paceline.checkpoint.hub import at_revision, parse_hub_name
    from paceline.checkpoint.locate import TARGET_ALIASES, locate_target
    from paceline.errors import ConfigError

    name = parse_hub_name(text)
    if Path(text).expanduser().exists() or text.lower() in TARGET_ALIASES or name is None:
        locate_target(text)  # says so where there is nothing of that name
        if revision is not None:
            raise ConfigError(f"{text} is on this machine, and has no revisions; --revision asks for {revision!r}")
        return None
    return at_revision(name, revision)


def _refuse_contradictions(
    remote: list[HubName],
    *,
    revision: str | None,
    to: Path | None,
    include: list[str] | None,
    verify: bool,
    offline: bool,
) -> None:
    from paceline.errors import ConfigError

    for flag, is_given in (("--revision", revision is not None), ("--to", to is not None)):
        if is_given and len(remote) != 1:
            hint = "owner/name@REVISION for each" if flag == "--revision" else "one command for each"
            raise ConfigError(f"{flag} is of one hub name; there are {len(remote)}", hint=hint)
    for flag, is_given in (("--to", to is not None), ("--include", bool(include)), ("--verify", verify)):
        if is_given and offline:
            raise ConfigError(
                f"{flag} asks the hub, and this run is offline", hint="without --offline, HF_HUB_OFFLINE=0"
            )


def _here(text: str, name: HubName | None) -> tuple[Path, TargetContract | DrafterContract]:
    """A model that is on this machine, or in the cache, whole.

    Raises:
        OfflineError: the cache lacks files of it; they are named.
        CheckpointError: the files are damaged, or no model.
    """
    from paceline.checkpoint.dialects import is_drafter_folder
    from paceline.checkpoint.download import usable_path
    from paceline.checkpoint.hub import MODEL_FILES, fetch, missing_files
    from paceline.checkpoint.locate import locate_drafter, locate_target
    from paceline.errors import OfflineError
    from paceline.models.completeness import read_complete

    if name is None:
        path = locate_target(text)
        return path, read_complete(path, text)
    folder = fetch(name, MODEL_FILES, offline=True)
    missing = missing_files(folder)
    if missing:
        raise OfflineError(
            f"{name} is not whole in the local hub cache, and this run is offline; missing: {', '.join(missing)}",
            origin={"cache": folder},
            hint=f"with a network, `paceline download {name}`",
        )
    path = locate_drafter(str(name), offline=True) if is_drafter_folder(folder) else usable_path(folder)
    return path, read_complete(path, text)


def _fetched(plan: DownloadPlan, *, verify: bool) -> tuple[Path, TargetContract | DrafterContract]:
    from paceline.checkpoint.download import download as fetch_files
    from paceline.checkpoint.download import require_digests
    from paceline.models.completeness import read_complete

    try:
        path = fetch_files(plan)
        if verify:
            require_digests(plan, path if path.is_dir() else path.parent)
    except KeyboardInterrupt:
        typer.echo("files that are complete stay; the same command goes on with the others", err=True)
        raise
    return path, read_complete(path, str(plan.name))


def _hide_progress() -> None:
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()


def _show_plans(wanted: dict[str, HubName | None], plans: list[DownloadPlan], *, verbosity: int) -> None:
    for text, name in wanted.items():
        if name is None:
            typer.echo(f"{text}: on this machine; nothing needs to be downloaded")
    for plan in plans:
        _show(plan, to_stderr=False, is_full=verbosity > 0)


def _show(plan: DownloadPlan, *, to_stderr: bool, is_full: bool) -> None:
    """A line for the repository, and one for each file: size, digest, name."""
    from paceline.checkpoint.download import free_bytes, shown_size

    sizes = f"{shown_size(plan.num_bytes)}, of which {shown_size(plan.num_missing_bytes)} are to be fetched"
    free = f"{shown_size(free_bytes(plan))} are free in {plan.place}"
    typer.echo(f"{plan.name} at commit {plan.commit}: {len(plan.files)} files, {sizes}; {free}", err=to_stderr)
    for file in plan.files:
        digest = file.digest if is_full else file.digest[:19]
        here = "  (here)" if file.is_present else ""
        typer.echo(
            f"  {shown_size(file.size):>10}  {digest:<{71 if is_full else 19}}  {file.name}{here}", err=to_stderr
        )


def _planned(plan: DownloadPlan) -> dict[str, object]:
    from dataclasses import asdict

    from paceline.checkpoint.download import free_bytes

    return {
        "repository": plan.name.repository,
        "revision": plan.name.revision,
        "commit": plan.commit,
        "folder": str(plan.place),
        "num_bytes": plan.num_bytes,
        "num_missing_bytes": plan.num_missing_bytes,
        "num_free_bytes": free_bytes(plan),
        "files": [asdict(file) for file in plan.files],
    }


def _described(contract: TargetContract | DrafterContract) -> dict[str, object]:
    from paceline.checkpoint.contract import DrafterContract

    if isinstance(contract, DrafterContract):
        return {"kind": "drafter", "family": contract.family, "num_layers": contract.num_layers}
    return {"kind": "target", "architecture": contract.architecture, "num_layers": contract.num_layers}


def _summary(text: str, name: HubName | None, contract: TargetContract | DrafterContract, *, is_fetched: bool) -> str:
    described = _described(contract)
    model = f"{described['kind']}, {described.get('family') or described.get('architecture')}, whole"
    if is_fetched:
        return f"{text}: {model}"
    place = "on this machine" if name is None else "in the local hub cache"
    return f"{text}: {model}; {place}, nothing needs to be downloaded"
