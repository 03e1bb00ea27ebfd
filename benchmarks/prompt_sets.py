"""Prompt sets as benchmarks take them: `--set NAME=FILE`, encoded for a target.

A JSONL file gives the first turn of each prompt. A token file (`.npz`) gives its held-out conversations, which are the
last ones: their own prompt ids, and the stored response, whose length is the budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.evaluation.prompts import NUM_HELD_OUT, encode_prompt, read_prompts

if TYPE_CHECKING:
    from paceline.checkpoint.tokenizer import TextTokenizer
    from paceline.training.data import Conversations


@dataclass(frozen=True)
class NamedFile:
    """A set as the command line names it."""

    name: str
    path: Path


@dataclass(frozen=True)
class PromptSet:
    """Encoded prompts.

    Attributes:
        name: for tables.
        prompts: token ids of each.
        responses: what the target wrote when the data was made, as far as stored; None for a set of mere prompts.
        conversations: the same prompts and responses as training reads them; None likewise.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...] | None = None
    conversations: Conversations | None = None


def named_file(text: str) -> NamedFile:
    """Argument type of `--set`: NAME=FILE."""
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE")
    return NamedFile(name, Path(path))


def add_set_argument(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add `--set NAME=FILE`, which may be given several times."""
    parser.add_argument(
        "--set",
        dest="sets",
        type=named_file,
        action="append",
        required=required,
        metavar="NAME=FILE",
        help="prompts (.jsonl, first turns) or conversations (.npz, held-out ones); repeatable",
    )


def read_sets(files: Sequence[NamedFile], tokenizer: TextTokenizer, *, vocab_size: int, limit: int) -> list[PromptSet]:
    """Read and encode the first `limit` prompts of each set.

    Raises:
        DataError: a file is missing or malformed, or has fewer prompts than asked for at least one.
    """
    return [read_set(file, tokenizer, vocab_size=vocab_size, limit=limit) for file in files]


def read_set(file: NamedFile, tokenizer: TextTokenizer, *, vocab_size: int, limit: int) -> PromptSet:
    """Read and encode the first `limit` prompts of one set; see `read_sets`."""
    if file.path.suffix == ".npz":
        return _held_out(file, vocab_size=vocab_size, limit=limit)
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in read_prompts(file.path, limit=limit)]
    return PromptSet(file.name, tuple(tuple(encode_prompt(prompt, tokenizer)) for prompt in prompts))


def _held_out(file: NamedFile, *, vocab_size: int, limit: int) -> PromptSet:
    from paceline.training.data import read_conversations

    everything = read_conversations(file.path, vocab_size=vocab_size)
    first = max(0, len(everything) - NUM_HELD_OUT)
    chosen = everything.select(range(first, min(len(everything), first + limit)))
    prompts, responses = [], []
    for start, end in zip(chosen.starts[:-1].tolist(), chosen.starts[1:].tolist(), strict=True):
        tokens = chosen.tokens[start:end].tolist()
        num_prompt_tokens = len(tokens) - int(chosen.supervised[start:end].sum())
        prompts.append(tuple(tokens[:num_prompt_tokens]))
        responses.append(tuple(tokens[num_prompt_tokens:]))
    return PromptSet(file.name, tuple(prompts), tuple(responses), chosen)
