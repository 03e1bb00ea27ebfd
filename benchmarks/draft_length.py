"""Draft length off, fixed and adaptive, with a trained and with an untrained drafter, one request at a time.

    python -m benchmarks.draft_length --out docs/results           16 prompts, 128 tokens, 2 threads, bf16
    python -m benchmarks.draft_length --quick                      2 prompts

Greedy, past stop ids. `plain` has no drafter; the other modes keep one engine for all prompts, as a server does, so
that what "adaptive" has learned of one prompt serves the next. All modes run in turn on each prompt (A-B-B-A).
`ratio_to_plain` is the median of per-prompt ratios, `low` and `high` its 95 % bootstrap interval over prompts.
`after_50` is the same ratio over the steps behind each prompt's first 50: an adaptive engine should not be slower than
plain there, whatever the drafter is like. `drafts` is the mean number judged per step, `probes` and `switched_off`
count what the adaptive engine did. The untrained drafter has the shipped one's shape and random weights.
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
from benchmarks.command_line import DTYPES, PROMPTS, make_parser, positive, report, run, say
from benchmarks.cpu_main import run_engine
from benchmarks.paired_speeds import Mode, Runs, TimedRun, measure, round_noise, speed_row
from benchmarks.prompt_sets import NamedFile, read_set
from benchmarks.results import text_table

from paceline.errors import EXIT_DONE

if TYPE_CHECKING:
    from paceline.engine.draft_length import DraftLengthMode
    from paceline.engine.engine import Engine
    from paceline.engine.request import SamplingParameters
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME = "draft-length"
NUM_SETTLING_STEPS = 50
_BASE = "plain"
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Bench:
    """Everything that is timed."""

    engines: dict[str, Engine]
    modes: dict[str, Mode]
    prompts: tuple[tuple[int, ...], ...]


def main(arguments: Sequence[str]) -> int:
    """Measure all modes, print the table, write the result if asked for."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    bench = prepare(options)
    for mode in bench.modes.values():  # no timing pays for first-use work, the measuring of step costs included
        mode(bench.prompts[0][:_WARM_UP_TOKENS])
    gc.collect()
    gc.freeze()
    runs = measure(
        bench.modes,
        bench.prompts,
        num_rounds=options.rounds,
        on_prompt=lambda index: say(f"prompt {index + 1} of {len(bench.prompts)}"),
    )
    rows = make_rows(runs, bench.engines)
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
    """Load the target and the drafter, and make one without training."""
    from paceline.models.loading import load_drafter, load_target

    say(f"loading {options.model} in {options.dtype}")
    target = load_target(options.model, dtype=options.dtype, device="cpu")
    drafters = {"trained": load_drafter(options.draft_model, target)}
    drafters["untrained"] = untrained(drafters["trained"], target)
    prompts = read_set(
        NamedFile("prompts", options.prompts),
        target.tokenizer,
        vocab_size=target.contract.vocab_size,
        limit=options.num_prompts,
    ).prompts
    return make_bench(target, drafters, prompts, options.max_tokens)


def untrained(drafter: LoadedDrafter, target: LoadedTarget) -> LoadedDrafter:
    """A drafter of the same shape with random weights."""
    from paceline.models.building import initialise_drafter
    from paceline.models.loading import LoadedDrafter

    weight = target.model.norm.weight
    model = initialise_drafter(drafter.contract, weight.device, seed=0).to(weight.dtype).requires_grad_(False)
    model.backbone.position_table = model.backbone.position_table.float()  # `.to` takes buffers along
    model.prepare_for_serving(target.linear_mode)
    return LoadedDrafter(model, drafter.contract, drafter.num_draft_tokens)


def make_bench(
    target: LoadedTarget, drafters: dict[str, LoadedDrafter], prompts: tuple[tuple[int, ...], ...], max_tokens: int
) -> Bench:
    """One engine per mode and drafter; "off" costs the same whatever was trained, so it is there once."""
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters

    def engine(drafter: LoadedDrafter | None, mode: DraftLengthMode) -> Engine:
        return Engine(target, drafter, EngineSettings(max_num_seqs=1, draft_length=mode))

    engines = {_BASE: engine(None, "off"), "off": engine(drafters["trained"], "off")}
    for name, drafter in drafters.items():
        engines[f"fixed, {name}"] = engine(drafter, "fixed")
        engines[f"adaptive, {name}"] = engine(drafter, "adaptive")
    sampling = SamplingParameters(max_tokens=max_tokens, ignore_eos=True)
    return Bench(engines, {name: mode_of(found, sampling) for name, found in engines.items()}, prompts)


def mode_of(engine: Engine, sampling: SamplingParameters) -> Mode:
    """How an engine runs a prompt."""
    return lambda prompt: run_engine(engine, prompt, sampling)


def make_rows(runs: dict[str, Runs], engines: dict[str, Engine]) -> list[dict[str, object]]:
    """One row per mode."""
    rows = []
    for mode, found in runs.items():
        row = speed_row(mode, found, runs[_BASE])
        for name in ("p10", "p90", "prefill_ms"):
            del row[name]
        later = later_ratio(found, runs[_BASE])
        if later is not None:
            row["after_50"] = later
        row["drafts"] = float(
            np.mean([step.num_draft_tokens for rounds in found for run in rounds for step in run.records])
        )
        if mode.startswith("adaptive"):
            stats = engines[mode].stats()
            row |= {"probes": stats.num_probes, "switched_off": stats.num_switched_off}
        rows.append(row)
    return rows


def later_ratio(runs: Runs, base: Runs) -> float | None:
    """Median over prompts of the speed behind the first 50 steps over the base's; None if no prompt has as many."""
    ratios = [
        ours / theirs
        for ours, theirs in zip(map(later_speed, runs), map(later_speed, base), strict=True)
        if ours is not None and theirs is not None
    ]
    return float(np.median(ratios)) if ratios else None


def later_speed(rounds: Sequence[TimedRun]) -> float | None:
    """Tokens per ms of the steps behind the first 50 of each round."""
    steps = [step for run in rounds for step in run.records[NUM_SETTLING_STEPS:]]
    total_ms = sum(step.step_ms for step in steps)
    return sum(len(step.emitted_ids) for step in steps) / total_ms if total_ms else None


if __name__ == "__main__":
    sys.exit(run(main))
