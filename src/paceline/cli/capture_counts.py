"""`paceline capture counts FILES... --into DRAFTER`: counts of each answered id, for drafting from frequent ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.capture_stats import chat_encoder


def counts(
    context: typer.Context,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Token files (.npz), chats (.jsonl), captured folders.")
    ],
    into: Annotated[
        Path, typer.Option(metavar="DRAFTER", help="Drafter folder; the counts go there, in place of older ones.")
    ],
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Whose template and tokenizer render .jsonl chats.")
    ] = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Count the answer tokens of conversations into a drafter's folder, for `--draft-vocab-size`."""
    options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline import __version__
    from paceline.checkpoint.dialects import read_drafter_contract
    from paceline.checkpoint.token_counts import add_token_counts
    from paceline.errors import ConfigError
    from paceline.training.data import join, read_conversations
    from paceline.training.vocabulary import count_response_tokens

    contract = read_drafter_contract(into)
    vocab_size = contract.target_vocab_size
    if not vocab_size:
        raise ConfigError(
            "the drafter's config does not say how many ids its target has, and the counts have one number for each",
            origin={"drafter": contract.origin},
            hint="`paceline convert DRAFTER OUT --to zlab --target MODEL` writes a folder that says it",
        )
    encoder = chat_encoder(files, target, offline=offline)
    data = join([read_conversations(file, vocab_size=vocab_size, encoder=encoder) for file in files])
    counts_W = count_response_tokens(data, vocab_size)
    names = [file.name for file in files]
    record = {"files": names, "data_sha256": data.fingerprint(), "paceline": __version__}
    add_token_counts(into, counts_W, vocab_size, record)
    found = {"drafter": str(into), "num_tokens": int(counts_W.sum()), "num_distinct_ids": int((counts_W > 0).sum())}
    if as_json:
        options.print_json(found)
        return
    typer.echo(f"{into}: {found['num_tokens']:,} answer tokens, {found['num_distinct_ids']:,} of {vocab_size:,} ids")
