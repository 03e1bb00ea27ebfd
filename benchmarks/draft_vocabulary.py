"""Drafting from the whole vocabulary or from its most frequent ids, one request at a time.

    python -m benchmarks.draft_vocabulary --counts-from FILE.npz --out docs/results    16 prompts, 128 tokens, 2 threads
    python -m benchmarks.draft_vocabulary --counts-from FILE.npz --quick               2 prompts

Greedy, past stop ids. The counts are those in the drafter's folder, or with `--counts-from` those of the answers in
token files. All modes run in turn on each prompt (A-B-B-A). `ratio_to_plain` is the median of per-prompt ratios, `low`
and `high` its 95 % bootstrap interval over prompts. `ids` are drafted from, `coverage` is their share of the counted
tokens, `head_ms` the least time of the drafter's output head on one block's rows, alone.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command_line import DTYPES, PROMPTS, make_parser, positive, report, run, say
from benchmarks.cpu_main import run_engine
from benchmarks.paired_speeds import Mode, Runs, measure, round_noise, speed_row
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import text_table

from paceline.errors import EXIT_DONE

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.request import SamplingParameters
    from paceline.engine.short_list import DraftVocabSize
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME = "draft-vocabulary"
SIZES: tuple[int, ...] = (16384, 8192, 4096, 2048)
_BASE = "plain"
_WARM_UP_TOKENS = 16
_NUM_HEAD_TIMINGS = 50


@dataclass(frozen=True)
class Bench:
    """Everything that is timed."""

    engines: dict[str, Engine]
    modes: dict[str, Mode]
    prompts: tuple[tuple[int, ...], ...]
    head_ms: dict[str, float]


def main(arguments: Sequence[str]) -> int:
    """Measure all modes, print the table, write the result if asked for."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    bench = prepare(options)
    for mode in bench.modes.values():  # no timing pays for first-use work
        mode(bench.prompts[0][:_WARM_UP_TOKENS])
    gc.collect()
    gc.freeze()
    runs = measure(
        bench.modes,
        bench.prompts,
        num_rounds=options.rounds,
        on_prompt=lambda index: say(f"prompt {index + 1} of {len(bench.prompts)}"),
    )
    rows = make_rows(runs, bench)
    print(text_table(rows))
    noise = round_noise(runs[_BASE])
    if noise is not None:
        print(f"\ntwo rounds of plain decoding differ by {100 * noise:.1f} % (median of prompts)")
    report(NAME, rows, options, arguments, facts=[options.dtype])
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options; `--quick` is two prompts, one round."""
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help=f"prompt file; default {PROMPTS}")
    parser.add_argument("--counts-from", type=Path, nargs="+", metavar="FILE", help="count the answers of these .npz")
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, help=f"lists; default {SIZES}")
    parser.add_argument("--num-prompts", type=positive, default=16)
    parser.add_argument("--max-tokens", type=positive, default=128, help="at least 2; default 128")
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each mode per prompt; default 2")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--quick", action="store_true", help="2 prompts, 1 round")
    options = parser.parse_args(arguments)
    if options.max_tokens < 2:
        parser.error("--max-tokens has to be at least 2: the first token is not decoding")
    if options.quick:
        options.num_prompts, options.rounds = 2, 1
    return options


def prepare(options: argparse.Namespace) -> Bench:
    """Load the models, count where counts are asked for."""
    from paceline.models.loading import load_drafter, load_target

    say(f"loading {options.model} in {options.dtype}")
    target = load_target(options.model, dtype=options.dtype, device="cpu")
    drafter = load_drafter(options.draft_model, target)
    if options.counts_from is not None:
        drafter = with_counts(drafter, options.counts_from)
    prompts = read_set(
        NamedFile("prompts", options.prompts),
        target.tokenizer,
        vocab_size=target.contract.vocab_size,
        limit=options.num_prompts,
    ).prompts
    return make_bench(target, drafter, prompts, options.max_tokens, options.sizes)


def with_counts(drafter: LoadedDrafter, files: Sequence[Path]) -> LoadedDrafter:
    """The same drafter with the counts of other text than its folder's."""
    from paceline.training.data import join, read_conversations
    from paceline.training.vocabulary import count_response_tokens

    vocab_size = drafter.contract.target_vocab_size
    data = join([read_conversations(file, vocab_size=vocab_size) for file in files])
    return replace(drafter, token_counts_W=count_response_tokens(data, vocab_size))


def make_bench(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int,
    sizes: Sequence[int],
) -> Bench:
    """One engine per size; each keeps a head of its own."""
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters

    asked: dict[str, DraftVocabSize] = {"full": "full", **{str(size): size for size in sizes}, "auto": "auto"}
    engines = {_BASE: Engine(target, None, EngineSettings(max_num_seqs=1))}
    for name, size in asked.items():
        engines[name] = Engine(target, drafter, EngineSettings(max_num_seqs=1, draft_vocab_size=size))
    sampling = SamplingParameters(max_tokens=max_tokens, ignore_eos=True)
    modes = {name: mode_of(engine, sampling) for name, engine in engines.items()}
    return Bench(engines, modes, prompts, time_heads(target, drafter, asked))


def mode_of(engine: Engine, sampling: SamplingParameters) -> Mode:
    """How an engine runs a prompt."""
    return lambda prompt: run_engine(engine, prompt, sampling)


def time_heads(target: LoadedTarget, drafter: LoadedDrafter, asked: Mapping[str, DraftVocabSize]) -> dict[str, float]:
    """Least time of the output head on the rows of a block, in ms; the heads take turns."""
    import torch

    from paceline.engine.short_list import choose_short_list
    from paceline.models.drafters.short_list import shortened

    weight = target.model.norm.weight
    rows = torch.randn(1, drafter.num_draft_tokens, len(weight), generator=torch.Generator().manual_seed(0))
    hidden = rows.to(weight.dtype)
    heads: dict[str, Callable[[], object]] = {}
    for name, size in asked.items():
        short_list = choose_short_list(target, drafter, size)
        model = drafter.model if short_list is None else shortened(drafter.model, short_list, target.model)
        heads[name] = lambda model=model: model.logits(hidden, target.model)
    least = dict.fromkeys(heads, float("inf"))
    with torch.inference_mode():
        for _ in range(_NUM_HEAD_TIMINGS):
            for name, head in heads.items():
                started_s = time.perf_counter()
                head()
                least[name] = min(least[name], 1e3 * (time.perf_counter() - started_s))
    return least


def make_rows(runs: dict[str, Runs], bench: Bench) -> list[dict[str, object]]:
    """One row per mode."""
    rows = []
    for mode, found in runs.items():
        row = speed_row(mode, found, runs[_BASE])
        for name in ("p10", "p90", "prefill_ms"):
            del row[name]
        if mode != _BASE:
            stats = bench.engines[mode].stats()
            row |= {"ids": stats.num_listed_ids or "all", "coverage": stats.listed_share or 1.0}
            row["head_ms"] = bench.head_ms[mode]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(run(main))
