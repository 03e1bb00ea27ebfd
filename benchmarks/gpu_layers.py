"""The fused launches of a decoder layer on a GPU: right first, then how near each comes to reading its weights once.

    python -m benchmarks.gpu_layers --out docs/results
    python -m benchmarks.gpu_layers --rows 1 16 --shapes qwen3-8b
    python -m benchmarks.gpu_layers --tune --rows 16           which cut of each product is fastest
    python -m benchmarks.gpu_layers --ahead-kb 0 32 64         what it brings to ask early for a part of the weight
    python -m benchmarks.gpu_layers --device cpu               the script itself, on a tiny layer; times mean nothing

`us` is a launch's time inside a captured graph over distinct weights, `library_us` that of the bare product, `floor_us`
what reading the weight takes at the bandwidth given, `dependent_us` the same launch with programmatic dependent launch.
A stack is all layers of a target, fused or with the library's products, with queries in place of attention.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command_line import positive, report, run, say
from benchmarks.results import text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from benchmarks.gpu_layer_cases import Shape
    from benchmarks.gpu_micro_clock import Bench, Row

    from paceline.ops.skinny_product import Tile

NAME = "gpu-layers"
ROWS = (1, 8, 16, 32, 64)
OPERATIONS = ("heads", "o", "gated", "down")


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
                sweep.attempt(label, partial(_chain_row, bench, shape, num_rows, ahead_kb))
        elif options.tune:
            _tune(sweep, shape, num_rows, options)
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
    from paceline.ops.skinny_product import LARGEST_ROWS

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


def _chain_row(bench: Bench, shape: Shape, num_rows: int, ahead_kb: int | None) -> Row:
    """Layers whose products ask for so much of their weights before they wait; None: launches one behind the other."""
    from benchmarks.gpu_layer_cases import chain_call, chosen_tile, make_inputs, make_layer

    from paceline.ops.dispatch import allow_dependent_launch

    layers = [make_layer(shape, bench.device) for _ in range(shape.num_layers)]
    tiles = {name: chosen_tile(name, shape, num_rows)._replace(ahead=(ahead_kb or 0) * 1024) for name in OPERATIONS}
    num_bytes = _layer_bytes(shape)
    allow_dependent_launch(ahead_kb is not None)
    try:
        us = bench.clock.time([chain_call(shape, layers, make_inputs(shape, num_rows, bench.device), tiles)]).us
    finally:
        allow_dependent_launch(False)
    row: Row = {"shape": shape.name, "rows": num_rows, "operation": f"chain, ahead {ahead_kb}", "us": us}
    return {**row, "us_per_layer": us / len(layers), "floor_us": bench.ceilings.floor_us(num_bytes)}


def _dependent_us(bench: Bench, calls: Sequence[Callable[[], object]]) -> float | None:
    """The same launches where each may begin before the one before it has ended."""
    from paceline.ops.dispatch import allow_dependent_launch

    if not bench.is_real:
        return None
    allow_dependent_launch(True)
    try:
        return bench.clock.time(calls).us
    finally:
        allow_dependent_launch(False)


def _tune(sweep: _Sweep, shape: Shape, num_rows: int, options: argparse.Namespace) -> None:
    from benchmarks.gpu_layer_cases import tiles

    cuts = [(name, tile) for name in options.operations if name != "stack" for tile in tiles(name, shape)]
    began_s = time.monotonic()
    if sweep.bench.is_real and options.processes > 1:
        jobs = [
            (shape, num_rows, options.dependent_mb, cuts[first :: options.processes])
            for first in range(options.processes)
        ]
        # Spawned: a process that was forked cannot use CUDA. What they compile lands in Triton's cache on disk.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=context) as pool:
            list(pool.map(_compile, jobs))
    say(f"{shape.name}, {num_rows} rows: {len(cuts)} cuts compiled in {time.monotonic() - began_s:.0f} s")
    for name in (name for name in options.operations if name != "stack"):
        _tune_operation(sweep, shape, num_rows, name, [tile for kind, tile in cuts if kind == name])


def _compile(job: tuple[Shape, int, list[tuple[str, Tile]]]) -> None:
    import torch
    from benchmarks.gpu_layer_cases import fused, make_inputs, make_layer

    from paceline.ops.dispatch import allow_dependent_launch

    shape, num_rows, cuts = job
    device = torch.device("cuda")
    layer, inputs = make_layer(shape, device), make_inputs(shape, num_rows, device)
    allow_dependent_launch(True)
    for name, tile in cuts:
        try:
            fused(shape, name, layer, inputs, tile)
        except Exception as error:  # this cut will fail again where it is timed, and be told there
            say(f"{name} {tuple(tile)}: {type(error).__name__}")
    torch.cuda.synchronize()


def _tune_operation(sweep: _Sweep, shape: Shape, num_rows: int, name: str, cuts: Sequence[Tile]) -> None:
    """Time whole layers with dependent launch, this operation cut in every way: what counts is what a chain takes."""
    from benchmarks.gpu_layer_cases import ALLOWED_ERROR, chain_call, error_of, make_inputs, make_layer

    from paceline.ops.dispatch import allow_dependent_launch

    bench = sweep.bench
    inputs = make_inputs(shape, num_rows, bench.device)
    layers = [make_layer(shape, bench.device) for _ in range(min(shape.num_layers, 12 if shape.width > 1024 else 30))]
    found = []
    allow_dependent_launch(True)
    for tile in [None, *cuts]:
        if sweep.is_late:
            sweep.failed.append(f"{shape.name}, {num_rows} rows, {name}: no time was left for all cuts")
            break
        try:
            error = error_of(shape, name, layers[0], inputs, tile)
            us = bench.clock.time([chain_call(shape, layers, inputs, {name: tile})], 5).us / len(layers)
        except Exception as failure:
            say(f"{name} {tile and tuple(tile)}: {type(failure).__name__}: {str(failure).splitlines()[0][:100]}")
            continue
        found.append((us if error <= ALLOWED_ERROR else float("inf"), tile and tuple(tile), error))
    allow_dependent_launch(False)
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
