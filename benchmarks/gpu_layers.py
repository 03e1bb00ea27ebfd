"""The fused launches of a decoder layer on a GPU: right first, then how near each comes to reading its weights once.

    python -m benchmarks.gpu_layers --out docs/results
    python -m benchmarks.gpu_layers --rows 1 16 --shapes qwen3-8b
    python -m benchmarks.gpu_layers --tune --rows 16           which cut of each product is fastest
    python -m benchmarks.gpu_layers --ahead-kb 0 32 64         what it brings to ask early for a part of the weight
    python -m benchmarks.gpu_layers --rules off at-once after-wait --cuts chosen sliced --context 224 --rows 1
    python -m benchmarks.gpu_layers --device cpu               the script itself, on a tiny layer; times mean nothing

`us` is a launch's time inside a captured graph over distinct weights, `library_us` that of the bare product, `floor_us`
what reading the weight takes at the bandwidth given, `dependent_us` the same launch with programmatic dependent launch.
A stack is all layers of a target, fused or with the library's products, with queries in place of attention. A chain is
the same, cut as asked for, under each rule of when a launch lets the next begin; with `--context` attention is in it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.command_line import positive, report, run, say
from benchmarks.results import text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from benchmarks.gpu_layer_cases import Context, Layer, Shape
    from benchmarks.gpu_micro_clock import Bench, Row

    from paceline.ops.paged_attention_kernel import Launch
    from paceline.ops.skinny_tile import Tile

NAME = "gpu-layers"
ROWS = (1, 8, 16, 32, 64)
OPERATIONS = ("heads", "o", "gated", "down")
RULES = ("at-once", "after-wait", "mixed", "late")


def main(arguments: Sequence[str]) -> int:
    """Check and time every case, printing rows as they come; write the result if asked for."""
    options = parse(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is below
    import torch
    from benchmarks.gpu_layer_cases import SHAPES, TINY
    from benchmarks.gpu_micro_clock import Bench, Ceilings, GraphClock

    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device} was asked for; torch sees no GPU", hint="--device cpu")
    torch.manual_seed(0)
    bench = Bench(GraphClock(device, options.num_replays), Ceilings(options.bandwidth_tb * 1e12))
    shapes = [shape for shape in SHAPES if shape.name in options.shapes] if bench.is_real else [TINY]
    sweep = _Sweep(bench, options.seconds)
    for shape, num_rows in itertools.product(shapes, options.rows):
        if options.ahead_kb:
            for ahead_kb in [None, *options.ahead_kb]:
                label = f"{shape.name}, {num_rows} rows, chain, {ahead_kb} KB ahead"
                sweep.attempt(label, partial(_ahead_row, bench, shape, num_rows, ahead_kb))
        elif options.tune:
            _tune(sweep, shape, num_rows, options)
        elif options.rules:
            _chains(sweep, shape, num_rows, options)
        else:
            _measure(sweep, shape, num_rows, options)
    print(text_table(sweep.rows), flush=True)
    for text in sweep.failed:
        say(f"not measured: {text}")
    report(NAME, sweep.rows, options, arguments, device=options.device)
    return EXIT_CHECK_SAYS_NO if sweep.failed else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "qwen3-8b"], help="default both")
    parser.add_argument("--rows", type=positive, nargs="+", default=list(ROWS), help="default 1 8 16 32 64")
    parser.add_argument(
        "--operations", nargs="+", choices=(*OPERATIONS, "head", "stack"), default=[*OPERATIONS, "stack"]
    )
    parser.add_argument("--tune", action="store_true", help="try many cuts of each product, and name the best")
    parser.add_argument(
        "--ahead-kb", type=int, nargs="+", help="time chains whose launches begin early and ask for so much of a weight"
    )
    parser.add_argument("--rules", choices=("off", *RULES), nargs="+", help="time chains whose launches begin by these")
    parser.add_argument("--cuts", nargs="+", default=["chosen"], help="of chains, by name; default chosen")
    parser.add_argument(
        "--context", type=int, default=0, help="positions that chains attend to; default 0, none at all"
    )
    parser.add_argument(
        "--requests", type=positive, default=1, help="among which a chain's rows are divided; default 1"
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["chosen"],
        help="launches in chains: QUERIES,KEYS,WARPS,STAGES; default chosen",
    )
    parser.add_argument("--sliced", action="store_true", help="try cuts in slices alone with --tune")
    parser.add_argument("--processes", type=positive, default=12, help="that compile cuts to be tried; default 12")
    parser.add_argument("--seconds", type=float, default=80.0, help="for everything; default 80")
    parser.add_argument("--num-replays", type=positive, default=15, help="of each graph; default 15")
    parser.add_argument("--bandwidth-tb", type=float, default=4.3, help="for the floor, TB/s; default 4.3")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write FOLDER/{NAME}.json")
    return parser.parse_args(arguments)


class _Sweep:
    """Rows as they come, what failed, and the time that is left."""

    def __init__(self, bench: Bench, seconds: float) -> None:
        self.bench = bench
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self._deadline_s = time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def attempt(self, name: str, call: Callable[[], Row]) -> None:
        """Add a row; a failure is told and kept."""
        if self.is_late:
            self.failed.append(f"{name}: no time was left")
            return
        try:
            row = call()
        except Exception as error:
            say("\n".join(traceback.format_exc().strip().splitlines()[-6:]))
            self.failed.append(f"{name}: {type(error).__name__}")
            return
        self.rows.append(row)
        print(name + ": " + ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float)), flush=True)


def _measure(sweep: _Sweep, shape: Shape, num_rows: int, options: argparse.Namespace) -> None:
    from paceline.ops.skinny_tile import LARGEST_ROWS

    for name in options.operations:
        label = f"{shape.name}, {num_rows} rows, {name}"
        if name != "stack" and num_rows > LARGEST_ROWS:
            continue
        if name == "stack":
            for most_rows in (num_rows, 0) if num_rows <= LARGEST_ROWS else (0,):
                form = "fused" if most_rows else "library"
                sweep.attempt(f"{label}, {form}", lambda most=most_rows: _stack_row(sweep.bench, shape, num_rows, most))  # type: ignore[misc]
        else:
            sweep.attempt(label, lambda name=name: _operation_row(sweep.bench, shape, num_rows, name))  # type: ignore[misc]


def _operation_row(bench: Bench, shape: Shape, num_rows: int, name: str) -> Row:
    from benchmarks.gpu_layer_cases import ALLOWED_ERROR, error_of, make_inputs, make_layer, operation_calls

    inputs = make_inputs(shape, num_rows, bench.device)
    error = error_of(shape, name, make_layer(shape, bench.device, (name,)), inputs)
    if not error <= ALLOWED_ERROR:
        raise ArithmeticError(f"wrong by {error}")
    ours, theirs, num_bytes = operation_calls(bench, shape, name, inputs)
    found = bench.measure(ours, num_bytes=num_bytes)
    return {
        "shape": shape.name,
        "rows": num_rows,
        "operation": name,
        "us": found["us"],
        "dependent_us": _dependent_us(bench, ours),
        "library_us": bench.measure(theirs, num_bytes=num_bytes)["us"],
        "floor_us": found["floor_us"],
        "gb_per_s": found["gb_per_s"],
        "error": error,
    }


def _layer_bytes(shape: Shape) -> int:
    """Of the four weights."""
    return 2 * sum(outputs * width for outputs, width in (shape.sizes[name] for name in OPERATIONS))


def _stack_row(bench: Bench, shape: Shape, num_rows: int, most_rows: int) -> Row:
    from benchmarks.gpu_layer_cases import make_inputs, make_layer, stack_calls

    layers = [make_layer(shape, bench.device) for _ in range(shape.num_layers)]
    calls = stack_calls(shape, layers, make_inputs(shape, num_rows, bench.device), most_rows)
    num_bytes = shape.num_layers * _layer_bytes(shape)
    found = bench.measure(calls, num_bytes=num_bytes)
    return {
        "shape": shape.name,
        "rows": num_rows,
        "operation": "stack, fused" if most_rows else "stack, library",
        "us": found["us"],
        "dependent_us": _dependent_us(bench, calls),
        "library_us": None,
        "floor_us": found["floor_us"],
        "gb_per_s": found["gb_per_s"],
    }


def _ahead_row(bench: Bench, shape: Shape, num_rows: int, ahead_kb: int | None) -> Row:
    """Layers whose products ask for so much of their weights before they wait; None: launches one behind the other."""
    from benchmarks.gpu_layer_cases import chain_call, chosen_tile, make_inputs, make_layer

    from paceline.ops.dispatch import allow_dependent_launch

    layers = [make_layer(shape, bench.device) for _ in range(shape.num_layers)]
    tiles = {name: chosen_tile(name, shape, num_rows)._replace(ahead=(ahead_kb or 0) * 1024) for name in OPERATIONS}
    num_bytes = _layer_bytes(shape)
    allow_dependent_launch("off" if ahead_kb is None else "on")
    try:
        us = bench.clock.time([chain_call(shape, layers, make_inputs(shape, num_rows, bench.device), tiles)]).us
    finally:
        allow_dependent_launch("off")
    row: Row = {"shape": shape.name, "rows": num_rows, "operation": f"chain, ahead {ahead_kb}", "us": us}
    return {**row, "us_per_layer": us / len(layers), "floor_us": bench.ceilings.floor_us(num_bytes)}


def _chains(sweep: _Sweep, shape: Shape, num_rows: int, options: argparse.Namespace) -> None:
    """Layers under every rule, cut in every way, with every launch of attention."""
    from benchmarks.gpu_layer_cases import CHAIN_CUTS, make_layer

    bench = sweep.bench
    layers = [make_layer(shape, bench.device) for _ in range(shape.num_layers)]
    contexts = _contexts(options)
    cuts = {name: CHAIN_CUTS[name] for name in options.cuts} if bench.is_real else {"chosen": {}}
    flat = [(name, tile) for chosen in cuts.values() for name in OPERATIONS for tile in [chosen.get(name)]]
    jobs = [(rule, list(dict.fromkeys(flat)), context) for rule in options.rules for context in contexts]
    _compile_all(bench, [(shape, num_rows, *job) for job in jobs], options.processes)
    for rule, (cut, chosen), context in itertools.product(options.rules, cuts.items(), contexts):
        launch = "" if context is None or context.launch is None else f", attention {_named(context.launch)}"
        label = f"{shape.name}, {num_rows} rows, chain, {cut}{launch}, {rule}"
        row = {"shape": shape.name, "rows": num_rows, "operation": f"chain, {cut}{launch}", "rule": rule}
        sweep.attempt(label, partial(_chain_row, bench, shape, layers, num_rows, rule, chosen, context, row))


def _chain_row(
    bench: Bench,
    shape: Shape,
    layers: Sequence[Layer],
    num_rows: int,
    rule: str,
    cuts: Mapping[str, Tile | None],
    context: Context | None,
    row: Row,
) -> Row:
    from benchmarks.gpu_layer_cases import ALLOWED_ERROR, chain_call, error_of, make_inputs

    from paceline.ops.dispatch import allow_dependent_launch

    inputs = make_inputs(shape, num_rows, bench.device)
    allow_dependent_launch(rule)
    try:
        error = max(error_of(shape, name, layers[0], inputs, cuts.get(name)) for name in OPERATIONS)
        if not error <= ALLOWED_ERROR:
            raise ArithmeticError(f"wrong by {error}")
        timing = bench.clock.time([chain_call(shape, layers, inputs, cuts, context)])
    finally:
        allow_dependent_launch("off")
    us = {"us": timing.us, "p10_us": timing.p10_us, "p90_us": timing.p90_us, "us_per_layer": timing.us / len(layers)}
    return {**row, **us, "error": error}


def _contexts(options: argparse.Namespace) -> list[Context | None]:
    from benchmarks.gpu_layer_cases import Context

    from paceline.ops.paged_attention_kernel import Launch

    if not options.context:
        return [None]
    launches = [None if text == "chosen" else Launch(*map(int, text.split(","))) for text in options.attention]
    return [Context(options.requests, options.context, launch) for launch in launches]


def _named(launch: Launch) -> str:
    return f"{launch.queries},{launch.keys},{launch.warps},{launch.stages}"


def _compile_all(bench: Bench, jobs: Sequence[_Job], processes: int) -> None:
    """Let other processes compile: what they find lands in Triton's cache on disk."""
    if not bench.is_real or processes < 2:
        return
    began_s = time.monotonic()
    split = [
        (*job[:3], job[3][first::processes], None if first else job[4])
        for job in jobs
        for first in range(min(processes, len(job[3])))
    ]
    # Spawned: a process that was forked cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        list(pool.map(_compile, split))
    say(f"{sum(len(job[3]) for job in jobs)} cuts compiled in {time.monotonic() - began_s:.0f} s")


def _dependent_us(bench: Bench, calls: Sequence[Callable[[], object]]) -> float | None:
    """The same launches where each may begin before the one before it has ended."""
    from paceline.ops.dispatch import allow_dependent_launch

    if not bench.is_real:
        return None
    allow_dependent_launch("on")
    try:
        return bench.clock.time(calls).us
    finally:
        allow_dependent_launch("off")


def _tune(sweep: _Sweep, shape: Shape, num_rows: int, options: argparse.Namespace) -> None:
    from benchmarks.gpu_layer_cases import sliced_tiles, tiles

    every = sliced_tiles if options.sliced else tiles
    cuts = [(name, tile) for name in options.operations if name != "stack" for tile in every(name, shape)]
    rule = options.rules[0] if options.rules else "on"
    _compile_all(sweep.bench, [(shape, num_rows, rule, [*cuts], _contexts(options)[0])], options.processes)
    for name in (name for name in options.operations if name != "stack"):
        mine = [tile for kind, tile in cuts if kind == name]
        _tune_operation(sweep, shape, num_rows, name, mine, rule, _contexts(options)[0])


_Job: TypeAlias = "tuple[Shape, int, str, list[tuple[str, Tile | None]], Context | None]"


def _compile(job: _Job) -> None:
    import torch
    from benchmarks.gpu_layer_cases import chain_call, fused, make_inputs, make_layer

    from paceline.ops.dispatch import allow_dependent_launch

    shape, num_rows, rule, cuts, context = job
    device = torch.device("cuda")
    layer, inputs = make_layer(shape, device), make_inputs(shape, num_rows, device)
    allow_dependent_launch(rule)
    for name, tile in cuts:
        try:
            fused(shape, name, layer, inputs, tile)
        except Exception as error:  # this cut will fail again where it is timed, and be told there
            say(f"{name} {tile and tuple(tile)}: {type(error).__name__}")
    if context is not None:
        chain_call(shape, [layer], inputs, {}, context)()
    torch.cuda.synchronize()


def _tune_operation(
    sweep: _Sweep, shape: Shape, num_rows: int, name: str, cuts: Sequence[Tile], rule: str, context: Context | None
) -> None:
    """Time whole layers with dependent launch, this operation cut in every way: what counts is what a chain takes."""
    from benchmarks.gpu_layer_cases import ALLOWED_ERROR, chain_call, error_of, make_inputs, make_layer

    from paceline.ops.dispatch import allow_dependent_launch

    bench = sweep.bench
    inputs = make_inputs(shape, num_rows, bench.device)
    layers = [make_layer(shape, bench.device) for _ in range(min(shape.num_layers, 12 if shape.width > 1024 else 30))]
    found = []
    allow_dependent_launch(rule)
    for tile in [None, *cuts]:
        if sweep.is_late:
            sweep.failed.append(f"{shape.name}, {num_rows} rows, {name}: no time was left for all cuts")
            break
        try:
            error = error_of(shape, name, layers[0], inputs, tile)
            us = bench.clock.time([chain_call(shape, layers, inputs, {name: tile}, context)], 5).us / len(layers)
        except Exception as failure:
            say(f"{name} {tile and tuple(tile)}: {type(failure).__name__}: {str(failure).splitlines()[0][:100]}")
            continue
        found.append((us if error <= ALLOWED_ERROR else float("inf"), tile and tuple(tile), error))
    allow_dependent_launch("off")
    found.sort(key=lambda one: one[0])
    chosen_us = next((us for us, tile, _ in found if tile is None), None)
    floor_us = bench.ceilings.floor_us(_layer_bytes(shape))
    say(f"{shape.name} {num_rows} {name}: {chosen_us} us per layer as chosen, floor {floor_us:.2f}")
    for us, cut, error in found[:6]:
        say(f"{shape.name} {num_rows} {name} {cut}: {us:.3f} us per layer, error {error:.1e}")
    for us, cut, error in found[:1]:
        row: Row = {"shape": shape.name, "rows": num_rows, "operation": name, "tile": str(cut), "us": us}
        sweep.rows.append({**row, "chosen_us": chosen_us, "floor_us": floor_us, "error": error})


if __name__ == "__main__":
    sys.exit(run(main))
