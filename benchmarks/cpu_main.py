"""Speculative against plain decoding and against transformers on this CPU, one request at a time.

    make bench                                 16 prompts, 128 tokens, 2 threads, bf16
    make bench ARGS=--quick                    2 prompts
    python -m benchmarks.cpu_main --out docs/results

Greedy, answers of at most 128 tokens; `speculative` drafts as many tokens as the drafter was trained for,
`speculative-adaptive` as many as pay. Behind the end of an answer comes text that nobody asks for and no drafter knows;
`--ignore-eos` measures it all the same, up to the last token. All modes run in turn on each prompt (A-B-B-A). Times are
those of decoding: ours without the prompt pass, that of transformers from the first token's arrival at a streamer to
the last one's. `ratio_to_plain` is the median of per-prompt ratios, `low` and `high` its 95 % bootstrap interval over
prompts, `p10` and `p90` the spread of the prompts. The floor is the bytes a token needs over the measured bandwidth.
The second table has other arithmetics, each beside its own plain decoding: weights of 16 bits, where the first table's
are in the codes of their file; and the row-invariant one, in which speculative ids must equal plain ids: exit code 3 if
not.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.command_line import PROMPTS, make_parser, positive, report, run, say
from benchmarks.memory_floor import plain_step_bytes, read_bandwidth, speculative_step_bytes
from benchmarks.paired_speeds import (
    Mode,
    Runs,
    TimedRun,
    acceptance,
    bootstrap_median,
    measure,
    num_same_ids,
    ratios,
    round_noise,
    speed_row,
    speeds,
)
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

if TYPE_CHECKING:
    from paceline.engine.draft_length import DraftLengthMode
    from paceline.engine.engine import Engine
    from paceline.engine.request import SamplingParameters
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME, PAST_THE_END = "cpu-main", "cpu-past-the-end"
ADAPTIVE_MODE = "speculative-adaptive"
MAIN_MODES = ("plain", "speculative", ADAPTIVE_MODE, "transformers")
WIDE_MODES = ("plain-16-bits", "speculative-16-bits")
EXACT_MODES = ("plain-row-invariant", "speculative-row-invariant")
_NUM_WARM_UP_TOKENS = 16
_OWN = ("ratio_to_own_plain", "own_low", "own_high")
_SHOWN = (
    "mode",
    "tokens_per_second",
    "ratio_to_plain",
    "low",
    "high",
    "p10",
    "p90",
    "acceptance_length",
    "prefill_ms",
    "floor_tokens_per_second",
    "floor_share",
)


@dataclass(frozen=True)
class Bench:
    """Everything that is timed, and what its floor is computed from."""

    modes: dict[str, Mode]
    prompts: tuple[tuple[int, ...], ...]
    target: LoadedTarget
    drafter: LoadedDrafter
    max_tokens: int
    num_listed_ids: int | None = None  # ids that drafts are chosen from, if not all
    wide: tuple[LoadedTarget, LoadedDrafter] | None = None  # of `WIDE_MODES`

    @property
    def mean_context(self) -> float:
        """Tokens in the cache on average while a token is made."""
        return float(np.mean([len(prompt) for prompt in self.prompts])) + self.max_tokens / 2


def main(arguments: Sequence[str]) -> int:
    """Measure all modes, print two tables, write the result if asked for."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    bandwidth = read_bandwidth()
    say(f"memory reads {bandwidth / 1e9:.1f} GB/s with {options.threads} threads")
    bench = prepare(options)
    warm_up(bench)
    gc.collect()
    gc.freeze()  # three loaded models are a large heap; no mode should pay for walking it
    runs = measure(
        bench.modes,
        bench.prompts,
        num_rounds=options.rounds,
        on_prompt=lambda index: say(f"prompt {index + 1} of {len(bench.prompts)}"),
    )
    rows = make_rows(runs, floors(bench, runs, bandwidth))
    print(text_table([row for row in rows if row["mode"] in MAIN_MODES], _SHOWN))
    print()
    print(text_table([row for row in rows if row["mode"] not in MAIN_MODES], [*_SHOWN[:8], *_OWN]))
    exact = [runs[mode] for mode in EXACT_MODES]
    same = num_same_ids(*exact)
    print(f"\nrow-invariant ids, speculative equal to plain: {same} of {len(bench.prompts)}")
    own_same = num_same_ids(runs["plain"], runs["speculative"])
    print(f"ids of the first table, in mode {bench.target.linear_mode}, likewise: {own_same} of {len(bench.prompts)}")
    noise = round_noise(runs["plain"])
    if noise is not None:
        print(f"two rounds of plain decoding differ by {100 * noise:.1f} % (median of prompts)")
    if same != len(bench.prompts):
        say("the ids differ, so the speeds above mean nothing; no result is written")
        return EXIT_CHECK_SAYS_NO
    facts = [
        f"{options.dtype}",
        f"reads {bandwidth / 1e9:.1f} GB/s",
        f"linear mode {bench.target.linear_mode}",
        f"speculative ids equal plain ids: {own_same} of {len(bench.prompts)}, row-invariant {same}",
    ]
    name = PAST_THE_END if options.ignore_eos else NAME
    report(name, rows, options, arguments, facts=facts)
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options; `--quick` is two prompts, one round."""
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help=f"prompt file; default {PROMPTS}")
    parser.add_argument("--num-prompts", type=positive, default=16)
    parser.add_argument("--max-tokens", type=positive, default=128, help="at least 2; default 128")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on to --max-tokens, past the end of an answer, into no man's text"
    )
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each mode per prompt; default 2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--without-transformers", action="store_true", help="leave the slowest mode out")
    parser.add_argument("--quick", action="store_true", help="2 prompts, 1 round")
    options = parser.parse_args(arguments)
    if options.max_tokens < 2:
        parser.error("--max-tokens has to be at least 2: the first token is not decoding")
    if options.quick:
        options.num_prompts, options.rounds = 2, 1
    return options


def prepare(options: argparse.Namespace) -> Bench:
    """Load the target in both arithmetics, the drafter for each, and the same weights in transformers."""
    from benchmarks.transformers_models import load_in_transformers

    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters
    from paceline.models.layers import CODE_MODES
    from paceline.models.loading import load_drafter, load_target

    sampling = SamplingParameters(max_tokens=options.max_tokens, ignore_eos=options.ignore_eos)
    modes: dict[str, Mode] = {}
    say(f"loading {options.model} in {options.dtype}")
    target = load_target(options.model, dtype=options.dtype, device="cpu")
    drafter = load_drafter(options.draft_model, target)
    modes["plain"] = engine_mode(target, None, sampling)
    modes["speculative"] = engine_mode(target, drafter, sampling)
    modes[ADAPTIVE_MODE] = engine_mode(target, drafter, sampling, draft_length="adaptive")
    wide = None
    if target.linear_mode in CODE_MODES:
        wide_target = load_target(options.model, dtype=options.dtype, device="cpu", linear_mode="native")
        wide = wide_target, load_drafter(options.draft_model, wide_target)
        modes[WIDE_MODES[0]] = engine_mode(wide_target, None, sampling)
        modes[WIDE_MODES[1]] = engine_mode(*wide, sampling)
    exact_target = load_target(options.model, dtype=options.dtype, device="cpu", linear_mode="row_invariant")
    exact_drafter = load_drafter(options.draft_model, exact_target)
    modes["plain-row-invariant"] = engine_mode(exact_target, None, sampling)
    modes["speculative-row-invariant"] = engine_mode(exact_target, exact_drafter, sampling)
    if not options.without_transformers:
        say("loading the same weights in transformers")
        model = load_in_transformers(options.model, target.contract, target.model.norm.weight.dtype)
        stop_token_ids = () if options.ignore_eos else target.contract.stop_token_ids
        modes["transformers"] = transformers_mode(model, options.max_tokens, stop_token_ids)
    prompts = read_set(
        NamedFile("prompts", options.prompts),
        target.tokenizer,
        vocab_size=target.contract.vocab_size,
        limit=options.num_prompts,
    ).prompts
    num_listed_ids = Engine(target, drafter, EngineSettings(max_num_seqs=1)).stats().num_listed_ids
    return Bench(modes, prompts, target, drafter, options.max_tokens, num_listed_ids, wide)


def engine_mode(
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    sampling: SamplingParameters,
    *,
    draft_length: DraftLengthMode = "fixed",
) -> Mode:
    """One of our engines with a single slot; it serves all prompts, so what it learns of one is there for the next."""
    from paceline.engine.engine import Engine, EngineSettings

    engine = Engine(target, drafter, EngineSettings(max_num_seqs=1, draft_length=draft_length))
    return lambda prompt: run_engine(engine, prompt, sampling)


def run_engine(engine: Engine, prompt: Sequence[int], sampling: SamplingParameters) -> TimedRun:
    """Run one prompt alone and time its decoding."""
    result = engine.generate([prompt], sampling)[0]
    trace = result.trace
    return TimedRun(
        result.token_ids, trace.prefill_ms / 1e3, (trace.total_ms - trace.prefill_ms) / 1e3, tuple(trace.records)
    )


def transformers_mode(model: object, max_tokens: int, stop_token_ids: Sequence[int]) -> Mode:
    """`model.generate` of transformers."""
    from benchmarks.transformers_models import generate_greedily

    def once(prompt: Sequence[int]) -> TimedRun:
        text = generate_greedily(model, prompt, max_tokens, stop_token_ids)
        return TimedRun(text.token_ids, text.prefill_s, text.decode_s)

    return once


def warm_up(bench: Bench) -> None:
    """Run every mode twice, so that no timing pays for first-use work."""
    say(f"warming up {', '.join(bench.modes)}")
    for mode in bench.modes.values():
        for _ in range(2):
            mode(bench.prompts[0][:_NUM_WARM_UP_TOKENS])


def floors(bench: Bench, runs: dict[str, Runs], bandwidth: float) -> dict[str, float]:
    """Tokens per second that the memory's bandwidth allows; none for steps that differ in what they read."""
    found = {}
    for mode in (mode for mode in runs if mode != ADAPTIVE_MODE):
        target, drafter = (mode in WIDE_MODES and bench.wide) or (bench.target, bench.drafter)
        if mode.startswith("speculative"):
            step_bytes = speculative_step_bytes(target, drafter, bench.mean_context, bench.num_listed_ids)
            found[mode] = bandwidth / step_bytes * acceptance(runs[mode]).delivered_per_step
        else:
            found[mode] = bandwidth / plain_step_bytes(target, bench.mean_context)
    return found


def make_rows(runs: dict[str, Runs], floor_speeds: dict[str, float]) -> list[dict[str, object]]:
    """Rows of the modes that ran, main ones first."""
    rows = []
    for mode in (mode for mode in (*MAIN_MODES, *WIDE_MODES, *EXACT_MODES) if mode in runs):
        row = speed_row(mode, runs[mode], runs["plain"])
        if mode in floor_speeds:
            row["floor_tokens_per_second"] = floor_speeds[mode]
            row["floor_share"] = float(np.median(speeds(runs[mode]))) / floor_speeds[mode]
        for own_plain, speculative in (WIDE_MODES, EXACT_MODES):
            if mode == speculative:
                shares = ratios(runs[mode], runs[own_plain])
                row["ratio_to_own_plain"] = float(np.median(shares))
                row["own_low"], row["own_high"] = bootstrap_median(shares)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(run(main))
