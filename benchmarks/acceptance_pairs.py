"""One drafter's acceptance over another's, on the same prompts: per set, and for all sets together.

    python -m benchmarks.acceptance_pairs --over drafters/smollm2-135m-instruct-dflash \\
        --set selfchat-0=smollm2-selfchat-0-T0.0.npz --set selfchat-2=smollm2-selfchat-2-T0.0.npz --out docs/results
    python -m benchmarks.acceptance_pairs --over drafters/smollm2-135m-instruct-dflash --join a.json b.json

Both drafters serve every prompt, greedily or at `--temperature` with a seed per prompt. `ratio` is acceptance length
over acceptance length, each a sum of tokens over a sum of steps; `low` and `high` are its 95 % bootstrap interval over
prompts, each drawn with what both drafters made of it; in the row `all` every set keeps its number of prompts. `longer`
and `shorter` count prompts. The file holds tokens and steps of every prompt, so that `--join` makes one table of
several files, measured on different days or machines, without measuring again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.acceptance import make_engine, requests_of
from benchmarks.command_line import DTYPES, make_parser, name_of, positive, run, say
from benchmarks.prompt_sets import PromptSet, add_set_argument, read_sets
from benchmarks.results import Row, describe_machine, make_result, text_table, write_result
from benchmarks.serving import serve

from paceline.errors import EXIT_DONE, ConfigError, DataError
from paceline.evaluation.statistics import bootstrap_quotient

if TYPE_CHECKING:
    from paceline.engine.request import RequestResult
    from paceline.models.loading import LoadedTarget

NAME = "acceptance-pairs"

Counts = dict[str, dict[str, list[list[int]]]]  # set, drafter: tokens and steps of each prompt


def main(arguments: Sequence[str]) -> int:
    """Measure, or read what was measured; print the table, write the result if asked for."""
    options = parse(arguments)
    drafter, over = name_of(options.draft_model), name_of(options.over)
    if options.join:
        found = [read_result(path) for path in options.join]
        require_one_temperature(found)
        counts = joined([one["counts"] for one in found])
        head = {
            **found[0],
            **{
                key: "; ".join(dict.fromkeys(one[key] for one in found))
                for key in ("command", "commit", "date", "machine")
            },
        }
        finish(head, counts, drafter, over, options.out)
        return EXIT_DONE
    facts = [f"{options.threads} threads", options.dtype, f"concurrency {options.concurrency}"]
    machine = describe_machine(*facts, device=options.device)
    head = make_result(NAME, [], machine=machine, arguments=arguments)
    settings = {"temperature": options.temperature, "seed": options.seed}
    finish({**head, "settings": settings}, measure(options), drafter, over, options.out)
    return EXIT_DONE


def finish(head: Mapping[str, Any], counts: Counts, drafter: str, over: str, out: Path | None) -> None:
    """Print and write what follows from the counts."""
    rows = make_rows(counts, drafter, over)
    print(text_table(rows))
    if out is not None:
        say(f"wrote {write_result(out, {**head, 'rows': rounded_rows(rows), 'counts': counts})}")


def rounded_rows(rows: Sequence[Row]) -> list[Row]:
    """As other results are rounded."""
    from benchmarks.results import rounded

    return [rounded(row) for row in rows]


def measure(options: argparse.Namespace) -> Counts:
    """Serve every set with both drafters, one after the other."""
    import torch

    from paceline.models.loading import load_drafter, load_target

    torch.set_num_threads(options.threads)
    target: LoadedTarget = load_target(options.model, dtype=options.dtype, device=options.device)
    sets = read_sets(options.sets, target.tokenizer, vocab_size=target.contract.vocab_size, limit=options.num_prompts)
    counts: Counts = {one.name: {} for one in sets}
    for name in (options.draft_model, options.over):
        drafter = load_drafter(name, target)
        engine = make_engine(target, drafter, sets, options)
        for one in sets:
            requests = requests_of(one, options.temperature, options)
            results = serve(engine, requests.prompts, requests.samplings, f"{name_of(name)} on {one.name}")
            counts[one.name][name_of(name)] = counts_of(one, results)
    return counts


def counts_of(prompt_set: PromptSet, results: Sequence[RequestResult]) -> list[list[int]]:
    """Tokens that the steps of each prompt committed, the target's own included, and their number."""
    from paceline.trace.acceptance import AcceptanceSummary

    assert len(results) == len(prompt_set.prompts), "every prompt is answered"
    found = [AcceptanceSummary.from_steps(result.trace.records) for result in results]
    return [[summary.num_steps + summary.num_accepted, summary.num_steps] for summary in found]


def make_rows(counts: Counts, drafter: str, over: str) -> list[Row]:
    """A row per set that both drafters served, and one for all of them.

    Raises:
        DataError: there is no such set, or both have not the same prompts.
    """
    shared = {name: found for name, found in counts.items() if drafter in found and over in found}
    if not shared:
        held = sorted({one for found in counts.values() for one in found})
        raise DataError(f"no set has counts of both {drafter} and {over}; there are {', '.join(held) or 'none'}")
    rows, everything = [], []
    for name, found in shared.items():
        after, before = found[drafter], found[over]
        if len(after) != len(before):
            raise DataError(f"{name} has {len(after)} prompts of {drafter} and {len(before)} of {over}")
        pairs = [(name, tuple(one), tuple(other)) for one, other in zip(after, before, strict=True)]
        rows.append(_row(name, pairs, drafter, over))
        everything += pairs
    return [*rows, _row("all", everything, drafter, over)] if len(rows) > 1 else rows


def _row(name: str, pairs: Sequence[tuple[str, Any, Any]], drafter: str, over: str) -> dict[str, object]:
    after, before = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    found = bootstrap_quotient(after, before, [pair[0] for pair in pairs])
    # Of answers with a step on both sides; products, as one divided by the other would round.
    gains = [a[0] * b[1] - b[0] * a[1] for a, b in zip(after, before, strict=True)]
    return {
        "set": name,
        "drafter": drafter,
        "over": over,
        "acceptance_length": _length(after),
        "over_length": _length(before),
        "ratio": found.estimate,
        "low": found.low,
        "high": found.high,
        "num_prompts": found.num_units,
        "longer": sum(gain > 0 for gain in gains),
        "shorter": sum(gain < 0 for gain in gains),
    }


def _length(counts: Sequence[Sequence[float]]) -> float:
    return sum(one[0] for one in counts) / sum(one[1] for one in counts)


def read_result(path: Path) -> dict[str, Any]:
    """Read a file that this program wrote.

    Raises:
        DataError: it cannot be read, or has no counts.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if "counts" not in found:
        raise DataError(f"{path} has no counts of prompts", hint="a file of benchmarks.acceptance_pairs")
    return found


def require_one_temperature(found: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to pool answers of different temperatures; files of before there was a choice are greedy.

    Raises:
        ConfigError: they differ.
    """
    kinds = sorted({float(one.get("settings", {}).get("temperature", 0.0)) for one in found})
    if len(kinds) > 1:
        raise ConfigError(
            f"the files are of temperatures {', '.join(f'{kind:g}' for kind in kinds)}", hint="one of them"
        )


def joined(parts: Sequence[Counts]) -> Counts:
    """Counts of several files as one.

    Raises:
        ConfigError: two files have the same set and drafter.
    """
    whole: Counts = {}
    for part in parts:
        for name, found in part.items():
            for drafter, counts in found.items():
                if drafter in whole.setdefault(name, {}):
                    raise ConfigError(f"two of the files have counts of {drafter} on {name}", hint="one of them")
                whole[name][drafter] = counts
    return whole


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    parser.add_argument("--over", required=True, metavar="DRAFTER", help="what it is held against")
    add_set_argument(parser, required=False)
    parser.add_argument("--num-prompts", type=positive, default=64, help="of each set; default 64")
    parser.add_argument("--max-tokens", type=positive, default=256, help="for sets of mere prompts; default 256")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every answer; default 0, greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt where answers are sampled; default 0")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests at once; default 8")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--join", type=Path, nargs="+", default=[], metavar="FILE", help="measure nothing; read these")
    options = parser.parse_args(arguments)
    if options.temperature < 0:
        parser.error(f"--temperature {options.temperature} is below 0")
    if bool(options.join) == bool(options.sets):
        parser.error("either --set or --join")
    if name_of(options.draft_model) == name_of(options.over):
        parser.error(f"--draft-model and --over are both {name_of(options.over)}")
    return options


if __name__ == "__main__":
    sys.exit(run(main))
