"""`paceline capture stats FILES...`: lengths, cuts, padding and repetitions of conversations, before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from paceline.training.chats import ChatEncoder
    from paceline.training.data import Conversations

_ANY_VOCABULARY = 2**31  # figures need no target, so no id is out of range


def stats(
    context: typer.Context,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Token files (.npz), chats (.jsonl), captured folders.")
    ],
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Whose template and tokenizer render .jsonl chats.")
    ] = None,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a conversation that training would use.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations, or packed rows, of a batch.")] = 64,
    offline: options.Offline = False,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Show what conversations look like to a training run: each file, and all of them together."""
    options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.training.data import join

    encoder = chat_encoder(files, target, offline=offline)
    parts = [_read(file, encoder) for file in files]
    rows = {str(file): _figures(part, max_length, batch_size) for file, part in zip(files, parts, strict=True)}
    if len(parts) > 1:
        rows["together"] = _figures(join(parts), max_length, batch_size)
    if as_json:
        options.print_json({"max_length": max_length, "batch_size": batch_size, "files": rows})
        return
    for line in _lines(rows):
        typer.echo(line)


def chat_encoder(files: list[Path], target: str | None, *, offline: bool) -> ChatEncoder | None:
    """What renders the chats among the files; None where there are none.

    Raises:
        ConfigError: there are some, and no target to render them as.
    """
    from paceline.errors import ConfigError

    chats = [file for file in files if file.suffix == ".jsonl"]
    if not chats:
        return None
    if target is None:
        raise ConfigError(
            f"{chats[0]} holds chats, and nothing says how a target would render them", hint="--target MODEL"
        )
    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.tokenizer import open_tokenizer

    return open_tokenizer(locate_target(target, offline=offline))


def _read(file: Path, encoder: ChatEncoder | None) -> Conversations:
    from paceline.training.data import read_conversations

    return read_conversations(file, vocab_size=_ANY_VOCABULARY, encoder=encoder)


def _figures(conversations: Conversations, max_length: int, batch_size: int) -> dict[str, object]:
    from dataclasses import asdict

    from paceline.capture.statistics import conversation_statistics

    figures = conversation_statistics(
        conversations.tokens, conversations.supervised, conversations.starts, max_length=max_length
    )
    return {**asdict(figures), "padding_share": _padding(conversations, max_length, batch_size)}


def _padding(conversations: Conversations, max_length: int, batch_size: int) -> dict[str, float | None]:
    """Share of padding in an epoch, with a conversation per row and packed; None where no batch would be full."""
    import numpy as np

    from paceline.capture.statistics import padding_share
    from paceline.errors import DataError
    from paceline.training.data import BatchOrder
    from paceline.training.packing import PackedOrder

    lengths = np.minimum(np.diff(conversations.starts), max_length)
    shares: dict[str, float | None] = {"unpacked": None, "packed": None}
    try:
        order = BatchOrder(lengths, batch_size, seed=0)
        batches = [order(index) for index in range(order.batches_per_epoch)]
        widths = [int(conversations.batch(batch, max_length).token_ids_BS.shape[1]) for batch in batches]
        shares["unpacked"] = padding_share([lengths[batch].tolist() for batch in batches], widths)
        packed = PackedOrder(lengths, max_length, batch_size, seed=0)
        rows = [packed(index) for index in range(packed.batches_per_epoch)]
        used = [[int(lengths[list(row)].sum()) for row in batch] for batch in rows]
        shares["packed"] = padding_share(used, [max_length] * len(rows))
    except DataError:  # fewer conversations, or rows, than a batch has
        pass
    return shares


def _lines(rows: dict[str, dict[str, object]]) -> list[str]:
    """A table as text, one figure a line, one column per file."""
    cells: list[list[str]] = [["", *rows]]
    for key, first in next(iter(rows.values())).items():
        columns = [row[key] for row in rows.values()]
        if isinstance(first, dict):
            inner = [column if isinstance(column, dict) else {} for column in columns]
            cells += [[f"{key} {name}", *(_shown(column.get(name)) for column in inner)] for name in first]
        else:
            cells.append([key, *map(_shown, columns)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3f}" if value < 1 else f"{value:.1f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
