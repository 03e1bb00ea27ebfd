"""Served acceptance of a drafter on prompt sets, and beside it what the training's simulation says.

    python -m benchmarks.acceptance --set gsm8k=gsm8k.jsonl --set selfchat=selfchat-T0.0.npz --out docs/results
    python -m benchmarks.acceptance --join a/acceptance-smollm2.json b/acceptance-smollm2.json --out docs/results

Every set is served greedily and at temperature 1, all sets of a temperature in one run of the engine; the interval is
a 95 % bootstrap over prompts. Conversations of a token file keep their own prompt ids, and the length of the stored
response is the budget, so that the walk of `training/simulate.py` over the same conversations, in the same dtype,
should come to the same length: that is a row with `simulated`. The greedy row has what served is over it, less 1,
twice: `over_simulated` for the stored text, and `over_simulated_served_text` for a walk over what serving wrote, since
bf16 may leave the stored text at a near-tie; `same_text` is the share of conversations that it did not leave. A walk
judges greedy text alone, so a set that was sampled is named with `--served-only NAME`.

The file has every row as soon as it is known, and `complete` says whether it has all. A run that was cut short, by
`--seconds` or by anything else, goes on with `--resume`; `--join` makes one table of the files of several drafters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.acceptance_rows import comparison, served_conversations, served_row, simulate_walk, simulated_row
from benchmarks.command_line import DTYPES, make_parser, name_of, positive, run, say
from benchmarks.growing_result import GrowingResult, join_results
from benchmarks.prompt_sets import PromptSet, add_set_argument, read_sets
from benchmarks.results import Row, describe_machine, make_result, text_table, write_result
from benchmarks.serving import SetToServe, serve_sets

from paceline.errors import EXIT_DONE, EXIT_INTERRUPTED
from paceline.evaluation.prompts import file_sha256

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME = "acceptance-smollm2"
KEY = ("drafter", "set", "temperature", "simulated")
_PREFILL_CHUNK = 2048  # prompt tokens per step: free slots fill up in a few steps


def main(arguments: Sequence[str]) -> int:
    """Serve all sets at all temperatures, simulate where that can be compared, print the table."""
    options = parse(arguments)
    if options.join:
        joined = join_results(options.join, KEY)
        print(text_table(joined["rows"]))
        say(f"wrote {write_result(options.out, joined)}")
        return EXIT_DONE
    started_s = time.monotonic()
    result = start_result(options, arguments)
    try:
        is_complete = fill(result, options, lambda: time.monotonic() - started_s > options.seconds)
    except KeyboardInterrupt:
        say(f"interrupted; {len(result.rows)} rows are there, and --resume goes on")
        return EXIT_INTERRUPTED
    if is_complete:
        result.finish()
    print(text_table(result.rows))
    if not is_complete:
        say(f"time is up: {len(result.rows)} rows are there, and --resume goes on")
    if options.out is not None and result.rows:
        say(f"wrote {options.out / NAME}.json")
    return EXIT_DONE


def start_result(options: argparse.Namespace, arguments: Sequence[str]) -> GrowingResult:
    """An empty result, or what an earlier run of the same settings left."""
    facts = [f"{options.threads} threads", options.dtype, f"concurrency {options.concurrency}"]
    machine = describe_machine(*facts, device=options.device)
    drafters = [name_of(name) for name in all_drafters(options)]
    sets = [file.name for file in options.sets]

    def order(row: Row) -> tuple[object, ...]:
        at_set = drafters.index(str(row["drafter"])), sets.index(str(row["set"]))
        return *at_set, options.temperatures.index(row["temperature"]), row["simulated"]

    head = make_result(NAME, [], machine=machine, arguments=arguments)
    result = GrowingResult(head, settings_of(options), options.out, key=KEY, order=order)
    if options.resume:
        result.resume()
    return result


def all_drafters(options: argparse.Namespace) -> list[str]:
    """The drafters to be measured, as they were named."""
    return [options.draft_model, *options.also_draft_model]


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """What rows of one table have in common; models and files by name and hash."""
    names = ("dtype", "num_prompts", "max_tokens", "temperatures", "seed", "concurrency", "served_only")
    drafters = {name_of(name): weights_sha256(Path(name)) for name in all_drafters(options)}
    return {
        "model": name_of(options.model),
        **{name: getattr(options, name) for name in names},
        "device": options.device.partition(":")[0],
        "sets": {file.name: file_sha256(file.path) for file in options.sets},
        "drafters": drafters,
    }


def weights_sha256(folder: Path) -> dict[str, str]:
    """Hash of each weight file of a drafter's folder; nothing for one that is a mere name."""
    return {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}


def fill(result: GrowingResult, options: argparse.Namespace, is_time_up: Callable[[], bool]) -> bool:
    """Measure every row that the result lacks; returns whether it has all of them in the end."""
    import torch

    from paceline.models.loading import load_drafter, load_target

    torch.set_num_threads(options.threads)
    target = load_target(options.model, dtype=options.dtype, device=options.device)
    sets = read_sets(options.sets, target.tokenizer, vocab_size=target.contract.vocab_size, limit=options.num_prompts)
    is_complete = True
    for name in all_drafters(options):
        wanted = {
            temperature: missing_sets(result, name_of(name), sets, temperature, options)
            for temperature in options.temperatures
        }
        if not any(wanted.values()):
            continue
        if is_time_up():
            return False
        drafter = load_drafter(name, target)
        say(f"{name_of(name)}: block size {drafter.contract.block_size}")
        measurement = Measurement(name_of(name), target, drafter, options, result)
        engine = make_engine(target, drafter, sets, options)
        for temperature, missing in wanted.items():
            is_complete &= measurement.serve(engine, missing, temperature, is_time_up)
    return is_complete


def missing_sets(
    result: GrowingResult, drafter: str, sets: Sequence[PromptSet], temperature: float, options: argparse.Namespace
) -> list[PromptSet]:
    """Sets whose rows at a temperature are not all there."""

    def is_there(one: PromptSet) -> bool:
        row = result.find(drafter=drafter, set=one.name, temperature=temperature, simulated=False)
        return row is not None and (not is_simulated(one, temperature, options) or "over_simulated" in row)

    return [one for one in sets if not is_there(one)]


def is_simulated(prompt_set: PromptSet, temperature: float, options: argparse.Namespace) -> bool:
    """Whether a walk over the set's conversations says something of it: they are greedy text of the target."""
    return temperature == 0 and prompt_set.conversations is not None and prompt_set.name not in options.served_only


def make_engine(
    target: LoadedTarget, drafter: LoadedDrafter, sets: Sequence[PromptSet], options: argparse.Namespace
) -> Engine:
    """An engine with room for the longest prompt and its budget."""
    from paceline.engine.engine import Engine, EngineSettings

    longest = max(
        len(prompt) + budget
        for one in sets
        for prompt, budget in zip(one.prompts, budgets(one, options.max_tokens), strict=True)
    )
    num_positions = min(target.contract.max_position_embeddings, target.model.position_table.shape[0])
    settings = EngineSettings(
        max_num_seqs=min(options.concurrency, sum(len(one.prompts) for one in sets)),
        max_model_len=min(longest, num_positions),
        prefill_chunk_size=_PREFILL_CHUNK,
    )
    return Engine(target, drafter, settings)


@dataclass(frozen=True)
class Measurement:
    """One drafter's rows on their way into the result."""

    name: str
    target: LoadedTarget
    drafter: LoadedDrafter
    options: argparse.Namespace
    result: GrowingResult

    def serve(
        self, engine: Engine, sets: Sequence[PromptSet], temperature: float, is_time_up: Callable[[], bool]
    ) -> bool:
        """Serve sets at a temperature, each row going into the result at once; returns whether none was left out."""
        by_name = {one.name: one for one in sets}
        left_out = serve_sets(
            engine,
            {one.name: requests_of(one, temperature, self.options) for one in sets},
            lambda name, results: self.take_in(by_name[name], results, temperature),
            label=f"{self.name} at temperature {temperature:g}",
            is_time_up=is_time_up,
        )
        return not left_out

    def take_in(self, prompt_set: PromptSet, results: Sequence[RequestResult], temperature: float) -> None:
        """The rows of a set that was served; the walks come last, since they take longest."""
        served = {"drafter": self.name, **served_row(prompt_set, results, temperature)}
        self.result.put(served)
        if not is_simulated(prompt_set, temperature, self.options):
            return
        assert prompt_set.conversations is not None, "a walk needs conversations"
        texts = {"stored text": prompt_set.conversations, "served text": served_conversations(results)}
        walks = [
            simulate_walk(conversations, self.target, self.drafter, f"{prompt_set.name}, {label}")
            for label, conversations in texts.items()
        ]
        self.result.put(
            served | comparison(prompt_set, results, stored=walks[0], served=walks[1]),
            {"drafter": self.name, **simulated_row(prompt_set, walks[0])},
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--also-draft-model", action="append", default=[], metavar="DRAFTER", help="another one, on the same prompts"
    )
    add_set_argument(parser, required=False)
    parser.add_argument("--num-prompts", type=positive, default=64, help="of each set; default 64")
    parser.add_argument("--max-tokens", type=positive, default=256, help="for sets of mere prompts; default 256")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="default 0 1")
    parser.add_argument("--seed", type=int, default=0, help="prompt i of a set draws with seed + i")
    parser.add_argument(
        "--concurrency", type=positive, default=8, help="requests at once, of all sets together; default 8"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--served-only", action="append", default=[], metavar="NAME", help="set not to be simulated")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="S", help="begin no further set after S seconds"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the rows that the file in --out has")
    parser.add_argument(
        "--join", type=Path, nargs="+", default=[], metavar="FILE", help="measure nothing; make one table of files"
    )
    options = parser.parse_args(arguments)
    if not options.join and not options.sets:
        parser.error("the following arguments are required: --set")
    if (options.join or options.resume) and options.out is None:
        parser.error("--resume and --join need --out")
    for what, names in (
        ("set", [file.name for file in options.sets or ()]),
        ("drafter", list(map(name_of, all_drafters(options)))),
    ):
        if len(set(names)) < len(names):
            parser.error(f"two {what}s have the same name among {', '.join(names)}")
    unknown = set(options.served_only) - {file.name for file in options.sets or ()}
    if unknown:
        parser.error(f"--served-only {', '.join(sorted(unknown))} is none of the sets")
    return options


def budgets(prompt_set: PromptSet, max_tokens: int) -> list[int]:
    """Tokens that each prompt may get: the stored response's number where there is one."""
    if prompt_set.responses is None:
        return [max_tokens] * len(prompt_set.prompts)
    return [len(response) for response in prompt_set.responses]


def requests_of(prompt_set: PromptSet, temperature: float, options: argparse.Namespace) -> SetToServe:
    """What answers every prompt of a set, to a natural stop or the budget."""
    from paceline.engine.request import SamplingParameters

    samplings = [
        SamplingParameters(max_tokens=budget, temperature=temperature, seed=options.seed + index)
        for index, budget in enumerate(budgets(prompt_set, options.max_tokens))
    ]
    return SetToServe(prompt_set.prompts, samplings)


if __name__ == "__main__":
    sys.exit(run(main))
