"""Speculative over plain decoding of real text on a GPU, at 1, 8, 32 and 128 requests at once.

    python -m benchmarks.gpu_text --set gsm8k=gsm8k.jsonl --set selfchat=a.npz --set selfchat=b.npz --out docs/results
    python -m benchmarks.gpu_text --device cpu --concurrency 1 2 --num-prompts 2 --max-tokens 8        the script itself

A JSONL file gives the first turns of its prompts, a token file its held-out conversations, which no drafter was
trained on; files of one name are one set, taken in turn. Greedy and at temperature 1, answers end where the target ends
them, or after `--max-tokens`; the prefix cache is off. Two engines, with the drafter and without it, answer the same
prompts in closed loops (a request that ends is replaced at once): plain, speculative, speculative, plain. Before that
both run such loops until nothing is compiled or recorded any more, three at most. How much is drafted follows
`--draft-length`, how drafts are judged at temperature 1 `--verify-method`.

* `plain_tokens_per_second`, `speculative_tokens_per_second`: all tokens over all time, prompt passes included.
* `ratio`, `low`, `high`: median over prompts of the speed that a reader sees after the first token, speculative over
  plain, and its 95 % bootstrap interval over prompts. `total_ratio` is that of the throughputs.
* `acceptance_length`: tokens per step that judged drafts; `drafts_per_step` of them. `drafted_share` of all steps did.
* `..._ttft_ms_p50`, `..._tpot_ms_p50`, `..._p99`: time to the first token, and per token behind it, over requests.
* `noise`: how far the two plain rounds lie apart. `num_same`: greedy texts that are equal in both modes; in bf16 a
  near-tie may fall either way. `num_replayed` steps of the speculative rounds came from recordings, of `num_steps`.
* `num_prompts_replayed`: passes of prompts in both modes' rounds that came from recordings, of `num_prompt_passes`
  where these are recorded; `num_late_recordings` were made in the rounds, which should be none: each costs tens of ms.

* `lengths`: which numbers of drafts the speculative rounds judged, their share of all steps of requests, and the median
  of what such steps took, by the wall. `believed`: what "adaptive" reckons with behind the rounds, for each number of
  drafts that differs: ms of a step, and tokens per request; 0 is a plain step without the drafter's context.
* `num_switched_off`, `num_probes`: how often drafting stopped, and was tried again, in the speculative rounds.
* `plain_step_ms`: the median of what a step of the plain engine took, to be set against what is believed of it.

Rows are on disk as soon as they are known; what the time does not suffice for is left out, and named.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.command_line import DRAFTER, PROMPTS, TARGET, name_of, positive, run, say
from benchmarks.cpu_serving import count_prompts
from benchmarks.gpu_gate import DEFAULT, MODES, PREFILL_CHUNK_SIZE, engine_settings
from benchmarks.gpu_steps import guarded
from benchmarks.growing_result import GrowingResult
from benchmarks.paired_speeds import bootstrap_median
from benchmarks.peers.closed_loop import Piece, TimedAnswer, closed_loop
from benchmarks.prompt_sets import NamedFile, add_set_argument, read_set
from benchmarks.results import describe_machine, make_result, text_table
from benchmarks.serving_rows import Loop, decode_tokens_per_second, round_noise, tokens_per_second

from paceline.errors import EXIT_DONE
from paceline.ops.acceptance import VERIFY_METHODS
from paceline.trace.acceptance import AcceptanceSummary
from paceline.trace.step import StepRecord

if TYPE_CHECKING:
    from paceline.engine.draft_length import BelievedStep
    from paceline.engine.engine import Engine
    from paceline.engine.request import SamplingParameters
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME = "gpu-text"
KEY = ("drafter", "set", "temperature", "concurrency")
PLAIN, SPECULATIVE = "plain", "speculative"
_NUM_PROMPTS = {1: 32, 8: 64, 32: 128, 128: 256}  # a second or so of decoding each
_PROMPTS_PER_SLOT = 2  # at another concurrency
_MOST_WARM_UPS = 3
_WARM_UP_TOKENS = 16  # of an answer at one request: whoever is alone meets no other shapes later
_ROOM = 64  # positions beyond prompt and answer: the last block may reach past the budget
_SHOWN = (
    "set",
    "temperature",
    "concurrency",
    "plain_tokens_per_second",
    "speculative_tokens_per_second",
    "ratio",
    "low",
    "high",
    "total_ratio",
    "acceptance_length",
    "drafts_per_step",
    "drafted_share",
    "num_prompts",
    "num_same",
    "noise",
    "num_replayed",
    "num_steps",
    "num_prompts_replayed",
    "num_prompt_passes",
    "num_late_recordings",
)

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Cell:
    """What a row is measured at."""

    set_name: str
    prompts: Prompts
    temperature: float
    concurrency: int

    @property
    def label(self) -> str:
        """For lines of progress."""
        return f"{self.set_name}, T {self.temperature:g}, {self.concurrency} at once"


def main(arguments: Sequence[str]) -> int:
    """Measure cell after cell, print the table as it stands at the end."""
    options = parse(arguments)
    from paceline.models.loading import load_drafter, load_target

    began_s = time.monotonic()
    target = load_target(str(options.model), dtype=options.dtype, device=options.device)
    drafter = load_drafter(options.draft_model, target)
    sets = read_prompts(options, target)
    engines = make_engines(target, drafter, sets, options)
    gc.collect()
    gc.freeze()  # no step should pay for walking what was loaded
    say(f"loaded, two engines made: {time.monotonic() - began_s:.1f} s")
    facts = f"{options.dtype}, linear mode {target.linear_mode}"
    head = make_result(NAME, [], machine=describe_machine(facts, device=options.device), arguments=arguments)
    settings = {
        "model": name_of(options.model),
        "draft_length": options.draft_length,
        "mode": options.mode,
        "record_prompts": options.record_prompts,
        "verify_method": options.verify_method,
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "prefill_chunk_size": PREFILL_CHUNK_SIZE,
    }
    result = GrowingResult(head, settings, options.out, key=KEY, order=_order)
    left_out = []
    wanted = list(cells(sets, options))
    for cell in wanted:
        if time.monotonic() - began_s > options.seconds:
            left_out.append(cell.label)
            continue
        cell_began_s = time.monotonic()
        with guarded(cell.label):
            row = measure(engines, cell, options)
            result.put({"drafter": name_of(options.draft_model), **row})
            shown = text_table([row], _SHOWN).splitlines()
            say(shown[0] + "\n" + shown[1])
            say(f"  plain step {row['plain_step_ms']:.3f} ms; drafts judged: {row['lengths']}")
            say(f"  believed: {row['believed']}")
            say(f"{cell.label}: {time.monotonic() - cell_began_s:.1f} s")
    if len(result.rows) == len(wanted):
        result.finish()
    print(text_table(result.rows, _SHOWN), flush=True)
    for label in left_out:
        say(f"no time was left for {label}")
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TARGET, help=f"target; default {TARGET}")
    parser.add_argument("--draft-model", default=DRAFTER, help=f"drafter; default {DRAFTER}")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", choices=MODES, default=DEFAULT, help="recorded steps, eager ones, or what is usual")
    parser.add_argument(
        "--record-prompts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="record passes of prompts as well; default",
    )
    parser.add_argument("--verify-method", choices=VERIFY_METHODS, default="standard", help="default standard")
    parser.add_argument("--draft-length", choices=("adaptive", "fixed"), default="adaptive")
    add_set_argument(parser, required=False)
    parser.add_argument("--concurrency", type=positive, nargs="+", default=list(_NUM_PROMPTS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--num-prompts", type=positive, help="of each loop; default 32, 64, 128 and 256, or 2 per request at once"
    )
    parser.add_argument("--max-tokens", type=positive, default=128, help="of an answer; default 128")
    parser.add_argument("--rounds", type=positive, default=2, help="of each mode; default 2")
    parser.add_argument("--seconds", type=float, default=300.0, help="cells are begun only before that; default 300")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    options = parser.parse_args(arguments)
    if options.sets is None:
        options.sets = [NamedFile("first", PROMPTS)]
    return options


def num_prompts(options: argparse.Namespace, concurrency: int) -> int:
    """Of one loop; where a set has fewer, it is read again from its start."""
    default = _NUM_PROMPTS.get(concurrency, max(_NUM_PROMPTS[1], _PROMPTS_PER_SLOT * concurrency))
    return int(options.num_prompts or default)


def read_prompts(options: argparse.Namespace, target: LoadedTarget) -> dict[str, Prompts]:
    """Sets by name; files of one name are taken in turn, prompt by prompt."""
    most = max(num_prompts(options, concurrency) for concurrency in options.concurrency)
    vocab_size = target.contract.vocab_size
    found: dict[str, list[Prompts]] = {}
    for file in options.sets:
        prompts = read_set(file, target.tokenizer, vocab_size=vocab_size, limit=_at_most(file, most)).prompts
        found.setdefault(file.name, []).append(prompts)
    return {
        name: [prompt for row in itertools.zip_longest(*files) for prompt in row if prompt is not None]
        for name, files in found.items()
    }


def _at_most(file: NamedFile, limit: int) -> int:
    """No more prompts than a prompt file has; a token file gives what it has by itself."""
    if file.path.suffix == ".npz" or not file.path.is_file():
        return limit
    return min(limit, count_prompts(file.path))


def make_engines(
    target: LoadedTarget, drafter: LoadedDrafter, sets: Mapping[str, Prompts], options: argparse.Namespace
) -> dict[str, Engine]:
    """One engine per mode; it serves every concurrency, as a server would."""
    from paceline.engine.engine import Engine

    longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
    settings = {
        "max_num_seqs": max(options.concurrency),
        "max_model_len": longest + options.max_tokens + _ROOM,
        "record_prompts": options.record_prompts,
    }
    return {
        PLAIN: Engine(target, None, engine_settings(options.mode, **settings)),
        SPECULATIVE: Engine(
            target,
            drafter,
            engine_settings(
                options.mode, draft_length=options.draft_length, verify_method=options.verify_method, **settings
            ),
        ),
    }


def cells(sets: Mapping[str, Prompts], options: argparse.Namespace) -> Iterator[Cell]:
    """The fewest requests first, for the case that time runs out."""
    for concurrency in options.concurrency:
        for temperature in options.temperatures:
            for name, prompts in sets.items():
                asked = list(itertools.islice(itertools.cycle(prompts), num_prompts(options, concurrency)))
                yield Cell(name, asked, temperature, concurrency)


def measure(engines: Mapping[str, Engine], cell: Cell, options: argparse.Namespace) -> dict[str, object]:
    """Warm both modes up, run them there and back, and say what came of it."""
    for engine in engines.values():
        warm_up(engine, cell, options.max_tokens)
    loops: dict[str, list[Loop]] = {name: [] for name in engines}
    before = {name: engine.stats() for name, engine in engines.items()}
    for round_index in range(options.rounds):
        names = list(engines)
        for name in names if round_index % 2 == 0 else reversed(names):
            loops[name].append(run_loop(engines[name], cell.prompts, cell, options.max_tokens))
    after = {name: engine.stats() for name, engine in engines.items()}

    def added(field: str, *names: str) -> int:
        return sum(getattr(after[name], field) - getattr(before[name], field) for name in names or engines)

    num_prompts_replayed = added("num_replayed_prompts")
    believed = engines[SPECULATIVE].believed_steps(sampling_of(cell, options.max_tokens, 0), cell.concurrency)
    return make_row(cell, loops[PLAIN], loops[SPECULATIVE]) | {
        "num_replayed": added("num_replayed_steps", SPECULATIVE),
        "num_steps": added("num_steps", SPECULATIVE),
        "num_prompts_replayed": num_prompts_replayed,
        "num_prompt_passes": num_prompts_replayed + added("num_unrecorded_prompts"),
        "num_late_recordings": added("num_recordings"),
        "num_switched_off": added("num_switched_off", SPECULATIVE),
        "num_probes": added("num_probes", SPECULATIVE),
        "plain_step_ms": _median_ms([record for loop in loops[PLAIN] for record in loop.records]),
        "lengths": lengths_of([record for loop in loops[SPECULATIVE] for record in loop.records]),
        "believed": believed_text(believed),
    }


def lengths_of(records: Sequence[StepRecord]) -> str:
    """Numbers of drafts judged, with their shares and what their steps took."""
    by_length: defaultdict[int, list[StepRecord]] = defaultdict(list)
    for record in records:
        by_length[record.num_draft_tokens].append(record)
    return ", ".join(
        f"{length}: {len(found) / len(records):.0%} {_median_ms(found):.3f} ms"
        for length, found in sorted(by_length.items())
    )


def believed_text(steps: Sequence[BelievedStep]) -> str:
    """What is believed of each number of drafts; of those that cost the same, of the largest."""
    ends = [one for one, more in itertools.zip_longest(steps, steps[1:]) if more is None or one.step_ms != more.step_ms]
    return ", ".join(f"{one.num_drafts}: {one.step_ms:.3f} ms {one.tokens:.2f}" for one in ends)


def _median_ms(records: Sequence[StepRecord]) -> float:
    return float(np.median([record.step_ms for record in records]))


def sampling_of(cell: Cell, max_tokens: int, index: int) -> SamplingParameters:
    """What a prompt of a cell is asked with."""
    from paceline.engine.request import SamplingParameters

    return SamplingParameters(max_tokens=max_tokens, temperature=cell.temperature, seed=index)


def warm_up(engine: Engine, cell: Cell, max_tokens: int) -> int:
    """Run loops until one has met no shape that is new, or that was not recorded yet; returns how many it took."""
    if cell.concurrency == 1:
        max_tokens = min(max_tokens, _WARM_UP_TOKENS)
    known = -1
    for num_loops in range(_MOST_WARM_UPS):
        stats = engine.stats()
        found = stats.num_recordings + stats.num_unrecorded_steps + stats.num_unrecorded_prompts
        if found == known:
            return num_loops
        known = found
        run_loop(engine, cell.prompts, cell, max_tokens)
    return _MOST_WARM_UPS


def run_loop(engine: Engine, prompts: Prompts, cell: Cell, max_tokens: int) -> Loop:
    """One closed loop."""

    def add(index: int) -> None:
        engine.add_request(prompts[index], sampling_of(cell, max_tokens, index), request_id=str(index))

    def step() -> Iterator[Piece]:
        for delta in engine.step():
            yield int(delta.request_id), delta.token_ids, delta.finish_reason is not None

    answers = closed_loop(len(prompts), cell.concurrency, add, step)
    results = [engine.take_result(str(index)) for index in range(len(prompts))]
    return Loop(answers, [record for result in results for record in result.trace.records])


def make_row(cell: Cell, plain: Sequence[Loop], speculative: Sequence[Loop]) -> dict[str, object]:
    """One row of the table."""
    shares = [
        ours / theirs
        for ours, theirs in zip(reader_speeds(speculative), reader_speeds(plain), strict=True)
        if ours is not None and theirs is not None
    ]
    low, high = bootstrap_median(shares) if shares else (None, None)
    records = [record for loop in speculative for record in loop.records]
    acceptance = AcceptanceSummary.from_steps(records)
    is_greedy = cell.temperature == 0.0
    return {
        "set": cell.set_name,
        "temperature": cell.temperature,
        "concurrency": cell.concurrency,
        "plain_tokens_per_second": tokens_per_second(plain),
        "speculative_tokens_per_second": tokens_per_second(speculative),
        "ratio": float(np.median(shares)) if shares else None,
        "low": low,
        "high": high,
        "total_ratio": tokens_per_second(speculative) / tokens_per_second(plain),
        "plain_decode_tokens_per_second": _decode_rate(plain),
        "speculative_decode_tokens_per_second": _decode_rate(speculative),
        **_waiting("plain", plain),
        **_waiting("speculative", speculative),
        "acceptance_length": acceptance.acceptance_length,
        "drafts_per_step": acceptance.num_draft_tokens / max(1, acceptance.num_steps),
        "drafted_share": acceptance.num_steps / max(1, len(records)),
        "num_prompts": len(cell.prompts),
        "num_same": num_same(plain[0], speculative[0]) if is_greedy else None,
        "noise": round_noise(plain),
    }


def _waiting(mode: str, loops: Sequence[Loop]) -> dict[str, object]:
    """Milliseconds to the first token, and per token behind it, over requests."""
    answers = [answer for loop in loops for answer in loop.answers]
    per_token = [(one.last_s - one.first_s) / (len(one.token_ids) - 1) for one in answers if len(one.token_ids) > 1]
    row: dict[str, object] = {
        f"{mode}_ttft_ms_p50": 1e3 * float(np.median([one.first_s - one.added_s for one in answers]))
    }
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        row[f"{mode}_tpot_ms_{name}"] = 1e3 * float(np.quantile(per_token, share)) if per_token else None
    return row


def _decode_rate(loops: Sequence[Loop]) -> float | None:
    """None where every answer came in one piece."""
    return decode_tokens_per_second(loops) if any(loop.decode_s > 0 for loop in loops) else None


def reader_speeds(loops: Sequence[Loop]) -> list[float | None]:
    """Tokens per second after the first, by prompt, all rounds together; None where an answer is a single token."""
    return [_speed(rounds) for rounds in zip(*(loop.answers for loop in loops), strict=True)]


def _speed(rounds: Sequence[TimedAnswer]) -> float | None:
    seconds = sum(answer.last_s - answer.first_s for answer in rounds)
    return sum(len(answer.token_ids) - 1 for answer in rounds) / seconds if seconds > 0 else None


def num_same(one: Loop, other: Loop) -> int:
    """Prompts that both answered with the same tokens."""
    return sum(left.token_ids == right.token_ids for left, right in zip(one.answers, other.answers, strict=True))


def _order(row: Mapping[str, object]) -> tuple[str, ...]:
    return str(row["set"]), f"{row['temperature']}", f"{row['concurrency']:>8}"


if __name__ == "__main__":
    sys.exit(run(main))
