"""`paceline convert DRAFTER OUT --to LAYOUT`: a drafter folder in another program's layout, bit for bit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from paceline.checkpoint.conversion import Conversion
    from paceline.checkpoint.dialects import Dialect


def convert(
    context: typer.Context,
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Drafter folder or hub name, in any layout.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New folder; refused if it holds anything.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="zlab|assistant|speculators",
            help="z-lab and vLLM; transformers' assisted generation; speculators.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Its target: its embedding and head are left out or copied in, as the layout wants.",
        ),
    ] = None,
    as_json: options.Json = False,
    offline: options.Offline = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Write a drafter in another layout; tensors keep their bits."""
    session, _ = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.checkpoint.conversion import convert_drafter
    from paceline.checkpoint.locate import locate_drafter, locate_target

    dialect = _dialect(to)
    found = convert_drafter(
        locate_drafter(drafter, offline=offline),
        output,
        dialect,
        target=None if target is None else locate_target(target, offline=offline),
        target_name=target or "",
    )
    if as_json:
        options.print_json({"drafter": drafter, "output": str(output), **asdict(found)})
        return
    typer.echo(output)
    if session.verbosity >= 0:
        for line in _notes(found):
            typer.echo(line, err=True)


def _dialect(name: str) -> Dialect:
    from paceline.checkpoint.conversion import WRITABLE_DIALECTS
    from paceline.errors import ConfigError

    for dialect in WRITABLE_DIALECTS:
        if name == dialect:
            return dialect
    raise ConfigError(f"--to is {name!r}; legal are {', '.join(WRITABLE_DIALECTS)}")


def _notes(found: Conversion) -> list[str]:
    layouts = f"from the {found.from_dialect} to the {found.to_dialect} layout"
    lines = [f"{found.family}: {found.num_tensors} tensors {layouts}"]
    if found.dequantized_from is not None:
        lines.append(f"the weights were stored as {found.dequantized_from}; they are now {found.dtype}")
    if found.dropped:
        lines.append(f"left out, equal to the target's: {', '.join(found.dropped)}")
    if found.added:
        lines.append(f"copied from the target: {', '.join(found.added)}")
    if found.left_behind:
        lines.append(f"not carried along: {', '.join(found.left_behind)}")
    return lines
