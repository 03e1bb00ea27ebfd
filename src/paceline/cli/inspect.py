"""`paceline inspect FOLDER`: what a target or drafter promises, from its files alone; no weights are loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.checkpoint.contract import DrafterContract, TargetContract


def inspect(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Target or drafter: a folder, a .gguf file, a hub name or an alias.")
    ],
    target: Annotated[
        str | None, typer.Option("--target", help="Check whether a drafter fits this target; exit code 3 if not.")
    ] = None,
    as_json: options.Json = False,
    offline: options.Offline = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Show what a model folder promises, and whether a drafter fits a target."""
    from paceline.checkpoint.contract import DrafterContract
    from paceline.errors import CheckFailedError, CompatibilityError, ConfigError

    options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    path, contract = _read_contract(model, offline=offline)
    found: dict[str, object] = {"kind": "drafter" if isinstance(contract, DrafterContract) else "target"}
    found |= _described(contract)
    if isinstance(contract, DrafterContract):
        found["token_counts"] = _described_counts(path, contract)
    mismatch: CompatibilityError | None = None
    if target is not None:
        if not isinstance(contract, DrafterContract):
            raise ConfigError(
                f"{model} is a target; --target checks a drafter against one", origin={"model": contract.origin}
            )
        from paceline.checkpoint.compatibility import check_fit

        try:
            check_fit(contract, _read_target(target, offline=offline))
        except CompatibilityError as error:
            mismatch = error
        found["fits"] = mismatch is None
        found["fits_target"] = target
        if mismatch is not None:
            found["mismatch"] = str(mismatch)
    if as_json:
        options.print_json(found)
    else:
        _print_table(found)
    if mismatch is not None:
        raise CheckFailedError(f"the drafter does not fit the target:\n{mismatch}")


def _read_contract(name: str, *, offline: bool) -> tuple[Path, TargetContract | DrafterContract]:
    """Tell a drafter from a target by its config, then read it strictly."""
    from paceline.checkpoint.dialects import is_drafter_folder, read_drafter_contract
    from paceline.checkpoint.locate import locate_drafter, locate_target

    path = locate_target(name, offline=offline)
    if is_drafter_folder(path):
        path = locate_drafter(name, offline=offline)  # of the hub, it has files that no target has
        return path, read_drafter_contract(path)
    from paceline.checkpoint.target_config import read_target_contract

    return path, read_target_contract(path, name)


def _read_target(name: str, *, offline: bool) -> TargetContract:
    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.target_config import read_target_contract

    return read_target_contract(locate_target(name, offline=offline), name)


def _described(contract: TargetContract | DrafterContract) -> dict[str, object]:
    from paceline.checkpoint.contract import DrafterContract

    described: dict[str, object] = asdict(contract)
    if isinstance(contract, DrafterContract):
        described["num_draft_tokens"] = contract.num_draft_tokens
        described["num_taps"] = contract.num_taps
    return described


def _described_counts(folder: Path, contract: DrafterContract) -> dict[str, object] | None:
    """What a short list of the drafter's ids would be, from the counts in its folder; None without any."""
    from paceline.checkpoint.token_counts import read_token_counts

    counts_W = read_token_counts(folder, contract.target_vocab_size or None)
    if counts_W is None:
        return None
    from paceline.engine.short_list import auto_size

    ordered_W = counts_W.sort(descending=True).values
    size, num_tokens = auto_size(ordered_W), int(ordered_W.sum())
    return {
        "num_tokens": num_tokens,
        "num_distinct_ids": int((ordered_W > 0).sum()),
        "auto_draft_vocab_size": size if 2 * size < len(ordered_W) else "full",
        "auto_coverage": int(ordered_W[:size].sum()) / num_tokens,
    }


def _print_table(found: Mapping[str, object]) -> None:
    """Two columns of plain text: they line up in a terminal, and `grep` and `cut` can read them."""
    rows: list[tuple[str, str]] = []
    for key, value in found.items():
        if isinstance(value, dict):
            rows += [(f"{key}.{inner}", _shown(item)) for inner, item in value.items() if item is not None]
        else:
            rows.append((key, _shown(value)))
    width = max(len(key) for key, _ in rows)
    for key, text in rows:
        typer.echo(f"{key:<{width}}  {text}")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        items = [_shown(item) for item in value]
        return f"{items[0]} (all {len(items)})" if len(items) > 1 and len(set(items)) == 1 else ", ".join(items) or "-"
    return str(value)
