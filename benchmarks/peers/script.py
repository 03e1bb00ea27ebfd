"""What the comparisons with peers share: options, our side of a comparison, the verdict."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import PROMPTS, make_parser, positive, say
from benchmarks.prompt_sets import NamedFile, add_set_argument
from benchmarks.results import Row, command_text, describe_machine, make_result, text_table, write_result
from benchmarks.serving import serve

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

if TYPE_CHECKING:
    from paceline.engine.request import RequestResult
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME = "parity-peers"


def make_peer_parser(description: str | None, *, num_prompts: int = 8) -> argparse.ArgumentParser:
    """The options that all comparisons have, and how many prompts of each set they take by default."""
    parser = make_parser(description)
    add_set_argument(parser, required=False)
    parser.add_argument(
        "--num-prompts", type=positive, default=num_prompts, help=f"of each set; default {num_prompts} (of {PROMPTS})"
    )
    parser.add_argument("--max-tokens", type=positive, default=64, help="of each answer; default 64")
    return parser


def add_tiny_argument(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--tiny-only` where a tiny target is compared as well."""
    parser.add_argument("--tiny-only", action="store_true", help="leave the real target out")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Options, with the shipped prompts where no set was named."""
    options = parser.parse_args(arguments)
    options.sets = options.sets or [NamedFile("first", PROMPTS)]
    return options


def our_results(
    target: LoadedTarget,
    folder: Path | None,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    plant: Callable[[LoadedDrafter], object] = lambda drafter: drafter,
) -> list[RequestResult]:
    """Greedy answers of our engine, one prompt at a time, with the drafter of a folder or plainly.

    Args:
        target: loaded.
        folder: of the drafter, or None.
        prompts: token ids.
        max_tokens: of each answer.
        plant: puts a peer's fault into the loaded drafter, to see whether it is the whole difference.
    """
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters
    from paceline.models.loading import load_drafter

    drafter = load_drafter(str(folder), target) if folder is not None else None
    if drafter is not None:
        plant(drafter)
    settings = EngineSettings(max_num_seqs=1, draft_sample_method="greedy" if drafter is not None else None)
    samplings = [SamplingParameters(max_tokens=max_tokens)] * len(prompts)
    label = "ours, plain" if folder is None else f"ours, {folder.name}"
    return serve(Engine(target, drafter, settings), prompts, samplings, label)


def finish(peer: str, rows: Iterable[Row], options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the table, write it if asked to; 3 if a peer does not agree in everything that is expected of it."""
    found = list(rows)
    print(text_table(found))
    if options.out is not None:
        machine = describe_machine(f"{options.threads} threads", f"{options.max_tokens} tokens", "float32")
        result = make_result(NAME, found, machine=machine, arguments=arguments)
        result["command"] = command_text(f"peers.{Path(sys.argv[0]).stem}", arguments)
        say(f"wrote {write_result(options.out, with_other_peers(peer, result, options.out))}")
    return exit_code(found)


def with_other_peers(peer: str, result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A peer's new result together with what the file says of the others, as far as it is of the same commit."""
    path = folder / f"{NAME}.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if old.get("commit") != result["commit"] or old.get("machine") != result["machine"]:
        if old:
            say(f"{path.name}: rows of another commit or machine are dropped")
        return dict(result)
    module = result["command"].split()[2]
    commands = [command for command in old["command"].split(" && ") if command.split()[2] != module]
    rows = [row for row in old["rows"] if row["peer"] != peer]
    return {**result, "command": " && ".join([*commands, result["command"]]), "rows": [*rows, *result["rows"]]}


def exit_code(rows: Sequence[Row]) -> int:
    """3 if a row says that it is not what it should be; None says nothing."""
    return EXIT_CHECK_SAYS_NO if any(row["as_expected"] is False for row in rows) else EXIT_DONE
