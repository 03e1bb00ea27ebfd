"""How many conversations of training data share a run of words with evaluation prompts.

    python -m benchmarks.prompt_overlap --data data/selfchat-0 --set gsm8k=gsm8k.jsonl --out docs/results

Data are token files (`.npz`) or folders of `paceline capture prompts`, whose rendered prompts are decoded, or prompts
as `.jsonl`. Text is compared in lower case without punctuation, as `--exclude` of `paceline capture prompts` does. The
last `--hold-out` conversations of a file of tokens were never trained on and are not counted. The column of a set, and
`any`, count conversations; `prompts` counts the texts of evaluation prompts that they touch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command_line import make_parser, positive, report, run, say
from benchmarks.prompt_sets import add_set_argument
from benchmarks.results import Row, text_table

from paceline.capture.exclusion import prompt_texts, runs_of_words
from paceline.errors import EXIT_DONE

if TYPE_CHECKING:
    from paceline.checkpoint.tokenizer import TextTokenizer

NAME = "prompt-overlap"
RUN_LENGTHS = (6, 8, 13)

Runs = set[tuple[str, ...]]


def main(arguments: Sequence[str]) -> int:
    """Count, print the table, write the result if asked for."""
    options = parse(arguments)
    tokenizer = open_target_tokenizer(options.model)
    sets = {file.name: list(prompt_texts(file.path)) for file in options.sets}
    rows: list[Row] = []
    for path in options.data:
        say(f"reading {path.name}")
        texts = data_texts(path, tokenizer, options.hold_out)
        rows += [overlap_row(path.name, texts, sets, length) for length in options.words]
    print(text_table(rows))
    report(NAME, rows, options, arguments)
    return EXIT_DONE


def overlap_row(name: str, texts: Sequence[str], sets: Mapping[str, Sequence[str]], length: int) -> Row:
    """Conversations that share a run of so many words: with each set, and with any of them."""
    runs_of_texts = [runs_of_words(text, length) for text in texts]
    found = {set_name: shared(runs_of_texts, prompts, length) for set_name, prompts in sets.items()}
    touching_any: set[int] = set().union(*(touching for touching, _ in found.values()))
    return {
        "data": name,
        "words": length,
        "conversations": len(texts),
        **{set_name: len(touching) for set_name, (touching, _) in found.items()},
        "any": len(touching_any),
        "share": len(touching_any) / len(texts) if texts else 0.0,
        "prompts": sum(len(touched) for _, touched in found.values()),
    }


def shared(runs_of_texts: Sequence[Runs], prompts: Sequence[str], length: int) -> tuple[set[int], set[int]]:
    """Indices of the texts and of the prompts that have a run in common with one of the others."""
    owners: dict[tuple[str, ...], set[int]] = {}
    for index, prompt in enumerate(prompts):
        for words in runs_of_words(prompt, length):
            owners.setdefault(words, set()).add(index)
    touching: set[int] = set()
    touched: set[int] = set()
    for index, found in enumerate(runs_of_texts):
        for words in found & owners.keys():
            touching.add(index)
            touched |= owners[words]
    return touching, touched


def open_target_tokenizer(model: str) -> TextTokenizer:
    """Of the target that the data were made with."""
    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.tokenizer import open_tokenizer

    return open_tokenizer(locate_target(model))


def data_texts(path: Path, tokenizer: TextTokenizer, hold_out: int) -> list[str]:
    """Prompts of the conversations that are trained on."""
    if path.suffix == ".jsonl":
        return list(prompt_texts(path))
    from paceline.capture.prompts import read_captured
    from paceline.capture.token_file import read_token_file

    file = read_captured(path) if path.is_dir() else read_token_file(path)
    return [tokenizer.decode(file.prompt_ids(index)) for index in range(max(0, len(file) - hold_out))]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__, has_drafter=False)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="DATA", help="what was trained on")
    add_set_argument(parser, required=True)
    parser.add_argument("--words", type=positive, nargs="+", default=RUN_LENGTHS, help=f"runs; default {RUN_LENGTHS}")
    parser.add_argument("--hold-out", type=int, default=1024, help="last conversations left out; default 1024")
    options = parser.parse_args(arguments)
    names = [file.name for file in options.sets]
    columns = ("data", "words", "conversations", "any", "share", "prompts")
    if len({*names, *columns}) < len(names) + len(columns):
        parser.error(f"names of sets must differ from each other and from {', '.join(columns)}: {', '.join(names)}")
    return options


if __name__ == "__main__":
    sys.exit(run(main))
