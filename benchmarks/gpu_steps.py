"""Decode steps on a GPU with random weights: plain, and drafting with every draft refused.

    python -m benchmarks.gpu_steps --out docs/results
    python -m benchmarks.gpu_steps --shapes qwen3-8b --batches 1 32 --kinds plain --skip-gate
    python -m benchmarks.gpu_steps --device cpu --shapes tiny-smollm2 --batches 1 2         the script itself

Shapes: SmolLM2-135M, Qwen3-8B, and `k3-mini`, a Kimi-K3 of 47 million parameters. `dflash` adds a random drafter of
five layers that makes 15 drafts: a step verifies 16 rows of every request and drafts again, which is what drafting
costs where it earns nothing. A closed batch of requests with prompts of 128 random tokens gets 192 tokens each,
greedily, past any stop; the prefix cache is off.

* `ours_ms`, `peer_ms`, their ratio `peer_over_ours`: wall time of the whole batch, prompt passes included, over its
  steps (192 where every draft is refused); the best of some rounds. The peer is measured the same way
  (`benchmarks/vllm/`) and read from `--peer`.
* `decode_ms`: wall time of an engine step while all requests decode: the median of a round, the best of the rounds.
* `step_ms`, `p10_ms`, `p90_ms`: bare steps between events on the device, 50 for warming up, 200 timed, each launched
  while the one before runs, no results read; `noise` is how far a second series lies off. `context` is the mean of the
  closed batches. Fewer are timed where a case would take longer than `--case-seconds`: `num_timed`. Eager steps are run
  bare alone.
* `floor_ms`: bytes over what a copy reaches, operations over what a product reaches, both measured first
  (`gpu_floors.py`), at the contexts of these steps. `floor_ratio` is `step_ms` over it.
* `weights`: how the models were filled (`random_weights.py`); the peer's times are of weights of the same kind.
* `replayed`: share of the bare steps that came from a recording.

First come the gates (`gpu_gate.py`): 50 recorded steps equal eager ones, token for token; the smallest shape follows a
float32 model of the same weights as closely as plain bf16 does. A shape that fails is not measured, and the exit code
is 3. A case that fails is told and left out; rows are on disk as soon as they are known.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import positive, run, say
from benchmarks.gpu_floors import Ceilings, measure_ceilings, step_floor_ms
from benchmarks.gpu_gate import (
    DEFAULT,
    EAGER,
    GRAPH,
    MODES,
    PREFILL_CHUNK_SIZE,
    answer,
    compare_modes,
    compare_with_float32,
    engine_settings,
    records_steps,
)
from benchmarks.growing_result import GrowingResult
from benchmarks.random_dense import DENSE_SHAPES, LINEAR_MODES, random_prompts
from benchmarks.random_weights import WEIGHTS, Weights
from benchmarks.results import describe_machine, make_result, text_table
from benchmarks.step_driver import StepTimes, time_steps
from benchmarks.step_shapes import DFLASH, KINDS, MAIN_SHAPES, PLAIN, SHAPES, make_drafter, make_target
from benchmarks.vllm.peers import Peers, peer_columns, read_peers

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE
from paceline.trace.acceptance import AcceptanceSummary

if TYPE_CHECKING:
    import torch

    from paceline.engine.engine import Engine
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME, GATE_NAME, PASSES = "gpu-steps", "gpu-gate", "passes"
KEY = ("shape", "kind", "batch", "mode", "weights")
_SMALL_SHAPE, _SMALL_BATCHES = "k3-mini", (1, 32)
_BATCHES = (1, 8, 32, 128)
_NUM_WARM_UP_TOKENS = 16
_NUM_LAST_LINES = 6
# of a case's time: all rounds together, and each of two series of bare steps, of so many steps at least
_SHARE_OF_ROUNDS, _SHARE_OF_STEPS, _FEWEST_STEPS = 0.5, 0.25, 25
_SHOWN = (
    "shape",
    "batch",
    "kind",
    "mode",
    "weights",
    "ours_ms",
    "peer_ms",
    "peer_over_ours",
    "decode_ms",
    "step_ms",
    "p10_ms",
    "p90_ms",
    "noise",
    "floor_ms",
    "floor_ratio",
    "tokens_per_second",
    "acceptance_length",
    "replayed",
)


@dataclass(frozen=True)
class Round:
    """One closed batch.

    Attributes:
        total_s: from the first request's arrival to the last token.
        num_steps: of the request that took most, the prompt pass among them.
        decode_s: each engine step in which all requests decoded.
        num_tokens: of all requests.
        acceptance: tokens per step; None without drafts.
    """

    total_s: float
    num_steps: int
    decode_s: tuple[float, ...]
    num_tokens: int
    acceptance: float | None


def main(arguments: Sequence[str]) -> int:
    """Check, measure case after case, print the table as it stands at the end."""
    options = parse(arguments)
    import torch

    device = torch.device(options.device)
    machine = describe_machine("bfloat16, random weights", device=options.device)
    head = make_result(NAME, [], machine=machine, arguments=arguments)
    gate_head = make_result(GATE_NAME, [], machine=machine, arguments=arguments)
    unsound = set() if options.skip_gate else check(options, device, gate_head)
    exit_code = EXIT_CHECK_SAYS_NO if unsound else EXIT_DONE
    if options.gate_only:
        return exit_code
    ceilings = measure_ceilings(device)
    say(f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, product {ceilings.operations_per_s / 1e12:.0f} TFLOP/s")
    settings = {
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "prefill_chunk_size": PREFILL_CHUNK_SIZE,
        "warm_up": options.warm_up,
        "timed": options.timed,
        "max_model_len": options.max_model_len,
        "linear_mode": options.linear_mode,
        "record_prompts": options.record_prompts,
        "ceilings": asdict(ceilings),
    }
    result = GrowingResult(head, settings, options.out, key=KEY, order=_reading_order)
    peers = read_peers(options.peer)
    for shape in options.shapes:
        if shape in unsound:
            say(f"{shape} is not measured: it did not pass the gate")
            continue
        for weights in weights_of(shape, options):
            with guarded(f"{shape}, {weights} weights"):
                measure_shape(shape, weights, options, device, ceilings, peers, result)
            release(device)
    if len(result.rows) == sum(num_rows(shape, options) for shape in options.shapes):
        result.finish()
    print(text_table(result.rows, _SHOWN), flush=True)
    return exit_code


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(MAIN_SHAPES))
    parser.add_argument(
        "--batches", type=positive, nargs="+", help="default 1 8 32 128, of k3-mini 1 32; steps of so many requests"
    )
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument(
        "--modes",
        choices=MODES,
        nargs="+",
        help="recorded steps, eager ones, or what the engine chooses; the default, of k3-mini graph and eager",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        nargs="+",
        default=["normal"],
        help="whose rows differ, or vLLM's own dummy ones, whose rows hardly do (dense shapes alone); default normal",
    )
    parser.add_argument("--linear-mode", choices=LINEAR_MODES, default="auto", help="arithmetic; default auto")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=positive, default=192)
    parser.add_argument("--rounds", type=positive, default=3, help="closed batches per case; default 3")
    parser.add_argument("--warm-up", type=positive, default=50, help="bare steps that are not timed; default 50")
    parser.add_argument("--timed", type=positive, default=200, help="bare steps that are; default 200")
    parser.add_argument(
        "--case-seconds", type=float, default=12.0, help="rounds and steps of a case are fewer beyond; default 12"
    )
    parser.add_argument(
        "--record-prompts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="record passes of prompts as well; default",
    )
    parser.add_argument("--skip-wall", action="store_true", help="bare steps alone: no rounds of closed batches")
    parser.add_argument("--max-model-len", type=positive, default=1024, help="of the engines; default 1024")
    parser.add_argument("--skip-gate", action="store_true", help="measure without checking first")
    parser.add_argument("--gate-only", action="store_true", help="check and measure nothing")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="JSON lines of benchmarks.vllm.stepping")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    options = parser.parse_args(arguments)
    room = options.prompt_tokens + options.new_tokens
    if options.max_model_len < room:
        parser.error(f"--max-model-len has to be at least {room} for so many tokens")
    return options


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Tell what fails and go on: a case costs its own row and no other."""
    began_s = time.perf_counter()
    try:
        yield
    except Exception:
        lines = traceback.format_exc().splitlines()[-_NUM_LAST_LINES:]
        say(f"{what} FAILED after {time.perf_counter() - began_s:.1f} s:\n  " + "\n  ".join(lines))


def release(device: torch.device) -> None:
    """Give the memory of what is no longer held back to the device."""
    import torch

    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check(options: argparse.Namespace, device: torch.device, head: dict[str, object]) -> set[str]:
    """Run the gates of every shape; returns those that did not pass."""
    result = GrowingResult(
        head, {}, options.out, key=("shape", "kind", "check"), order=lambda row: str(row["shape"]) + str(row["kind"])
    )
    unsound: set[str] = set()
    for place, shape in enumerate(options.shapes):
        began_s = time.perf_counter()
        passes = False
        with guarded(f"gate of {shape}"):
            passes = check_shape(shape, options, device, result, with_reference=place == 0)
        result.put({"shape": shape, "kind": None, "check": PASSES, PASSES: passes})
        if not passes:
            unsound.add(shape)
        release(device)
        say(f"gate of {shape}: {time.perf_counter() - began_s:.1f} s")
    result.finish()
    print(text_table(result.rows), flush=True)
    return unsound


def check_shape(
    shape: str, options: argparse.Namespace, device: torch.device, result: GrowingResult, *, with_reference: bool
) -> bool:
    """The gates of one shape; a comparison that cannot be made is no, too, unless the engine records nothing at all."""
    is_sound = True
    target = _target(shape, "normal", options, device)
    drafters = {kind: None if kind == PLAIN else make_drafter(target) for kind in options.kinds}
    prompts = random_prompts(4, options.prompt_tokens, target.contract.vocab_size)
    for kind, drafter in drafters.items():
        if not records_steps(device):
            say(f"{shape}, {kind}: no recorded steps to compare")
            continue
        has_passed = False
        with guarded(f"recorded against eager steps of {shape}, {kind}"):
            found = compare_modes(target, drafter, prompts, max_model_len=options.max_model_len)
            result.put({"shape": shape, "kind": kind, "check": "graph equals eager", **found})
            has_passed = found["num_same"] == found["num_prompts"] and bool(found["num_replayed"])
        is_sound &= has_passed
    if with_reference and target.contract.kimi is None:
        for kind, drafter in drafters.items():
            has_passed = False
            with guarded(f"{shape}, {kind}, against float32"):
                texts = [each.token_ids for each in _answers(target, drafter, prompts, options)]
                found = compare_with_float32(target, prompts, texts)
                result.put({"shape": shape, "kind": kind, "check": "follows float32", **found})
                has_passed = bool(found["follows"])
            is_sound &= has_passed
    return is_sound


def _answers(
    target: LoadedTarget, drafter: LoadedDrafter | None, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[Any]:
    from paceline.engine.engine import Engine

    engine = Engine(target, drafter, _settings(options, DEFAULT, len(prompts)))
    try:
        return answer(engine, prompts, options.new_tokens)
    finally:
        engine.close()


def _target(shape: str, weights: Weights, options: argparse.Namespace, device: torch.device) -> LoadedTarget:
    import torch

    began_s = time.perf_counter()
    target = make_target(shape, device, dtype=torch.bfloat16, linear_mode=options.linear_mode, weights=weights)
    say(f"{shape}, {weights} weights: made in {time.perf_counter() - began_s:.1f} s, linear mode {target.linear_mode}")
    return target


def _settings(options: argparse.Namespace, mode: str, batch: int) -> Any:
    return engine_settings(
        mode, max_num_seqs=batch, max_model_len=options.max_model_len, record_prompts=options.record_prompts
    )


def batches_and_modes(shape: str, options: argparse.Namespace) -> tuple[Sequence[int], Sequence[str]]:
    """What a shape is measured at: as asked for, or fewer batches and eager steps besides for the small Kimi-K3."""
    is_small = shape == _SMALL_SHAPE
    return (
        options.batches or (_SMALL_BATCHES if is_small else _BATCHES),
        options.modes or ((GRAPH, EAGER) if is_small else (DEFAULT,)),
    )


def weights_of(shape: str, options: argparse.Namespace) -> Sequence[Weights]:
    """What a shape's models are filled with, in turn: a Kimi target with one kind alone."""
    return options.weights if shape in DENSE_SHAPES else ["normal"]


def num_rows(shape: str, options: argparse.Namespace) -> int:
    """How many rows a shape has if nothing fails."""
    batches, modes = batches_and_modes(shape, options)
    return len(weights_of(shape, options)) * len(batches) * len(modes) * len(options.kinds)


def measure_shape(
    shape: str,
    weights: Weights,
    options: argparse.Namespace,
    device: torch.device,
    ceilings: Ceilings,
    peers: Peers,
    result: GrowingResult,
) -> None:
    """All cases of a shape, each engine serving all batches, as a server's would."""
    from paceline.engine.engine import Engine

    target = _target(shape, weights, options, device)
    drafter = make_drafter(target, weights) if DFLASH in options.kinds else None
    batches, modes = batches_and_modes(shape, options)
    for mode in modes:
        for kind in options.kinds:
            chosen = drafter if kind == DFLASH else None
            engine: Engine | None = None
            for batch in batches:
                label = f"{shape}, {kind}, batch {batch}, {mode}"
                with guarded(label):
                    if engine is None:
                        began_s = time.perf_counter()
                        engine = Engine(target, chosen, _settings(options, mode, max(batches)))
                        gc.collect()
                        gc.freeze()  # until `release`: no step should pay for walking what was loaded
                        say(f"{shape}, {kind}, {mode}: engine made in {time.perf_counter() - began_s:.1f} s")
                    with_rounds = not options.skip_wall and mode != EAGER
                    row = measure_case(engine, target, chosen, batch, options, ceilings, with_rounds=with_rounds)
                    row = {"shape": shape, "batch": batch, "kind": kind, "mode": mode, "weights": weights, **row}
                    result.put(row | peer_columns(peers, row))
                    say(f"{label}: " + ", ".join(f"{name} {_short(row[name])}" for name in _SHOWN[4:] if name in row))
                    continue
                engine = None  # it stopped half-way
                release(device)
            if engine is not None:
                engine.close()
            del engine
            release(device)


def measure_case(
    engine: Engine,
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    batch: int,
    options: argparse.Namespace,
    ceilings: Ceilings,
    *,
    with_rounds: bool,
) -> dict[str, object]:
    """Closed batches, then bare steps, twice; fewer of each where they would take too long."""
    row: dict[str, object] = {}
    if with_rounds:
        prompts = random_prompts(batch, options.prompt_tokens, target.contract.vocab_size)
        run_round(engine, prompts, min(_NUM_WARM_UP_TOKENS, options.new_tokens))
        rounds = run_rounds(engine, prompts, options)
        best = min(rounds, key=lambda one: one.total_s)
        row |= {
            "ours_ms": 1e3 * best.total_s / best.num_steps,
            "decode_ms": min((1e3 * median(one.decode_s) for one in rounds if one.decode_s), default=None),
            "tokens_per_second": best.num_tokens / best.total_s,
            "acceptance_length": best.acceptance,
            "num_steps": best.num_steps,
            "num_rounds": len(rounds),
        }

    context = options.prompt_tokens + options.new_tokens // 2

    def series(num_warm_up: int, num_timed: int) -> StepTimes:
        return time_steps(engine, batch=batch, context=context, num_warm_up=num_warm_up, num_timed=num_timed)

    expected_ms = series(2, 1).median_ms  # and whatever happens at first use has happened
    num_affordable = int(_SHARE_OF_STEPS * options.case_seconds * 1e3 / expected_ms)
    share = min(1.0, max(_FEWEST_STEPS, num_affordable) / (options.warm_up + options.timed))
    num_warm_up, num_timed = round(share * options.warm_up), round(share * options.timed)
    num_replayed = engine.stats().num_replayed_steps
    twice = [series(num_warm_up, num_timed) for _ in range(2)]
    num_replayed = engine.stats().num_replayed_steps - num_replayed
    steps = min(twice, key=lambda one: one.median_ms)
    floor_ms = step_floor_ms(target, drafter, batch=batch, context=context, ceilings=ceilings)
    return row | {
        "step_ms": steps.median_ms,
        "p10_ms": steps.p10_ms,
        "p90_ms": steps.p90_ms,
        "noise": max(one.median_ms for one in twice) / steps.median_ms - 1,
        "floor_ms": floor_ms,
        "floor_ratio": steps.median_ms / floor_ms,
        "context": context,
        "num_timed": num_timed,
        "replayed": num_replayed / (2 * (num_warm_up + num_timed)),
    }


def run_rounds(engine: Engine, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> list[Round]:
    """As many closed batches as were asked for, or as their share of a case's time suffices for."""
    began_s = time.perf_counter()
    rounds = [run_round(engine, prompts, options.new_tokens)]
    for _ in range(options.rounds - 1):
        spent_s = time.perf_counter() - began_s
        if spent_s + spent_s / len(rounds) > _SHARE_OF_ROUNDS * options.case_seconds:
            break
        rounds.append(run_round(engine, prompts, options.new_tokens))
    return rounds


def run_round(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> Round:
    """One closed batch: all requests arrive at once and end with their budget."""
    from paceline.engine.request import SamplingParameters

    sampling = SamplingParameters(max_tokens=num_tokens, ignore_eos=True)
    began_s = time.perf_counter()
    names = [engine.add_request(prompt, sampling) for prompt in prompts]
    begun: set[str] = set()
    decode_s: list[float] = []
    has_ended = False
    last_s = began_s
    while engine.has_unfinished():
        all_decode = len(begun) == len(names) and not has_ended
        for delta in engine.step():
            begun.add(delta.request_id)
            has_ended |= delta.finish_reason is not None
        now_s = time.perf_counter()
        if all_decode and not has_ended:
            decode_s.append(now_s - last_s)
        last_s = now_s
    results = [engine.take_result(name) for name in names]
    records = [record for one in results for record in one.trace.records]
    drafted = any(record.proposed_ids for record in records)
    return Round(
        last_s - began_s,
        1 + max(len(one.trace.records) for one in results),
        tuple(decode_s),
        sum(len(one.token_ids) for one in results),
        AcceptanceSummary.from_steps(records).acceptance_length if drafted else None,
    )


def _reading_order(row: Any) -> tuple[int, int, int, int, int]:
    chosen = (row["kind"], KINDS), (row["mode"], MODES), (row["weights"], WEIGHTS)
    kind, mode, weights = (names.index(name) for name, names in chosen)
    return SHAPES.index(row["shape"]), kind, row["batch"], mode, weights


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(run(main))
