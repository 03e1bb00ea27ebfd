"""Attention over blocks on a GPU: a launch's time inside a captured graph, beside the time that reading the keys takes.

    python -m benchmarks.gpu_attention --out docs/results
    python -m benchmarks.gpu_attention --shapes smollm2 --batches 1 --contexts 1024 --starts in-turn early --sweep keys
    python -m benchmarks.gpu_attention --device cpu        the script itself, on tiny inputs; times mean nothing

A graph holds launches over as many different layers as it takes for the L2 cache not to hold their keys. `floor_us` is
their bytes over the bandwidth of a large copy, `sdpa_us` torch's own attention over contiguous keys of the same sizes,
where nothing has to be looked up. `--starts early` launches each while the one ahead still runs. `--sweep` also tries
other numbers of parts, or turns of other sizes. Results are compared with the definition first, at every size; the exit
code is 3 if one is wrong or fails.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command_line import positive, run, say
from benchmarks.growing_result import GrowingResult
from benchmarks.results import describe_machine, make_result, text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

if TYPE_CHECKING:
    import torch
    from benchmarks.gpu_micro_clock import GraphClock

    from paceline.ops.paged_attention_kernel import Launch

NAME = "gpu-attention"
BATCHES, CONTEXTS, ROWS = (1, 8, 32), (1024, 8192, 32768), (1, 16)
STARTS = ("in-turn", "early")
BLOCK_SIZE = 64
_ALLOWED = 2**-7  # relative error in bf16
_MOST_SHARED_BYTES = 190 * 1024  # of a multiprocessor, for keys and values
_MOST_CACHE_BYTES = 24 * 2**30
_MOST_CHECKED_KEYS = 2**17  # over all requests
_LAUNCHES = (  # queries, keys, warps, stages
    (16, 64, 4, 3),
    (16, 64, 8, 3),
    (16, 128, 4, 3),
    (16, 128, 8, 2),
    (16, 128, 8, 3),
    (16, 256, 8, 2),
    (32, 64, 8, 3),
    (32, 128, 8, 2),
    (64, 64, 4, 3),
    (64, 64, 8, 3),
    (64, 128, 8, 2),
)
_KEY = ("shape", "batch", "context", "rows", "starts", "parts", "queries", "keys", "warps", "stages", "least_turns")
_COLUMNS = (*_KEY, "us", "floor_us", "ratio", "sdpa_us", "error")


@dataclass(frozen=True)
class Shape:
    """N query and M key/value heads of H channels."""

    N: int
    M: int
    H: int


SHAPES = {"smollm2": Shape(9, 3, 64), "qwen3-8b": Shape(32, 8, 128)}


@dataclass(frozen=True)
class Size:
    """One combination of sizes."""

    name: str
    shape: Shape
    batch: int
    context: int
    rows: int

    @property
    def num_query_rows(self) -> int:
        """Packed rows of a key/value head."""
        return self.rows * self.shape.N // self.shape.M

    @property
    def num_bytes(self) -> int:
        """Keys and values read once, queries read and results written once, in bf16."""
        keys = 2 * self.batch * (self.context + self.rows) * self.shape.M * self.shape.H
        return 2 * (keys + 2 * self.batch * self.rows * self.shape.N * self.shape.H)

    @property
    def num_flops(self) -> float:
        """Of scores and sums."""
        return 4.0 * self.batch * self.rows * self.context * self.shape.N * self.shape.H


@dataclass
class Inputs:
    """Of all layers of a size: requests at the same length, their blocks shuffled."""

    q_BTNH: torch.Tensor
    planes: torch.Tensor
    table: torch.Tensor
    slots_B: torch.Tensor
    starts_B: torch.Tensor

    @classmethod
    def make(cls, size: Size, num_layers: int, device: torch.device) -> Inputs:
        """Random ones."""
        import torch

        shape, B = size.shape, size.batch
        each = -(-(size.context + size.rows) // BLOCK_SIZE)
        options = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}
        planes = torch.empty(num_layers, 2, shape.M, 1 + B * each, BLOCK_SIZE, shape.H, **options).normal_()
        table = torch.zeros(B + 1, each, dtype=torch.int32, device=device)
        table[:B] = 1 + torch.randperm(B * each, device=device).view(B, each)
        return cls(
            torch.randn(B, size.rows, shape.N, shape.H, **options),
            planes,
            table,
            torch.arange(B, device=device),
            torch.full((B,), size.context, device=device),
        )

    def arguments(self, layer: int) -> tuple[object, ...]:
        """Of the operation and its definition."""
        scale = self.q_BTNH.shape[3] ** -0.5
        where = (self.table, self.slots_B, self.starts_B)
        return (self.q_BTNH, self.planes[layer], *where, None, None, None, True, None, scale)


def main(arguments: Sequence[str]) -> int:
    """Check, time, print every row as it comes; write the result if asked for."""
    options = parse(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which is below
    import torch
    from benchmarks.gpu_micro_clock import GraphClock

    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {options.device} was asked for; torch sees no GPU", hint="--device cpu")
    torch.manual_seed(0)
    clock = GraphClock(device, options.num_replays)
    result = _result(options, arguments, [] if clock.is_real else ["a trial: times mean nothing"])
    failed: list[str] = []
    deadline_s = time.monotonic() + options.seconds
    for size in sizes_of(options, is_real=clock.is_real):
        if time.monotonic() > deadline_s:
            failed.append(f"{size}: no time was left")
            continue
        try:
            for row in measure(size, clock, options, deadline_s):
                result.put(row)
                numbers = (f"{key} {row[key]:.4g}" for key in _COLUMNS if isinstance(row.get(key), float))
                print(*(row[key] for key in _KEY), *numbers, flush=True)
        except Exception:
            say("\n".join(traceback.format_exc().strip().splitlines()[-6:]))
            failed.append(f"{size}: it failed")
    result.finish()
    print(text_table(result.rows, _COLUMNS), flush=True)
    for text in failed:
        say(f"not measured: {text}")
    return EXIT_CHECK_SAYS_NO if failed else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default all")
    parser.add_argument("--batches", type=positive, nargs="+", default=list(BATCHES), help="requests; 1 8 32")
    parser.add_argument("--contexts", type=positive, nargs="+", default=list(CONTEXTS), help="1024 8192 32768")
    parser.add_argument("--rows", type=positive, nargs="+", default=list(ROWS), help="per request; 1 16")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["in-turn"], help="of launches; default in-turn")
    parser.add_argument("--sweep", choices=("none", "parts", "keys"), default="parts", help="what else is tried")
    parser.add_argument("--sweep-batch", type=positive, default=8, help="the largest at which it is; default 8")
    parser.add_argument("--seconds", type=float, default=55.0, help="for all; default 55")
    parser.add_argument("--num-replays", type=positive, default=15, help="of each graph; default 15")
    parser.add_argument("--bandwidth-tb", type=float, default=4.3, help="of a large copy, TB/s; default 4.3 (H200)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write FOLDER/{NAME}.json as rows come")
    return parser.parse_args(arguments)


def sizes_of(options: argparse.Namespace, *, is_real: bool) -> Iterator[Size]:
    """Every combination that memory has room for, small ones first."""
    if not is_real:
        yield from (Size("tiny", Shape(6, 2, 16), batch, 130, rows) for batch in (1, 2) for rows in (1, 3))
        return
    for context, batch, name, rows in itertools.product(
        options.contexts, options.batches, options.shapes, options.rows
    ):
        yield Size(name, SHAPES[name], batch, context, rows)


def measure(
    size: Size, clock: GraphClock, options: argparse.Namespace, deadline_s: float
) -> Iterator[dict[str, object]]:
    """The chosen number of parts first, then the others."""
    from paceline.ops import paged_attention_kernel as kernels
    from paceline.ops.dispatch import allow_dependent_launch

    num_layers = max(2, min(20, clock.copies(size.num_bytes), _MOST_CACHE_BYTES // size.num_bytes))
    inputs = Inputs.make(size, num_layers, clock.device)
    chosen = kernels.choose_launch(size.num_query_rows, size.batch * size.shape.M, size.shape.H, inputs.planes.dtype)
    error = _error(inputs, chosen) if size.batch * size.context <= _MOST_CHECKED_KEYS else None
    if error is not None and not error <= _ALLOWED:
        raise ValueError(f"wrong by {error}")
    floor_us = size.num_bytes / (options.bandwidth_tb * 1e6)
    sdpa_us = clock.time(_sdpa_calls(size, num_layers, clock.device)).us if clock.is_real else None
    sweep = options.sweep if size.batch <= options.sweep_batch else "none"
    for starts, (launch, parts) in itertools.product(options.starts, list(_variants(size, chosen, inputs, sweep))):
        if time.monotonic() > deadline_s:
            return
        allow_dependent_launch("on" if starts == "early" else "off")
        calls = [_call(inputs, layer, launch, parts) for layer in range(num_layers)]
        us = clock.time(calls * max(1, 20 // num_layers)).us
        allow_dependent_launch("off")
        yield {
            "shape": size.name,
            "batch": size.batch,
            "context": size.context,
            "rows": size.rows,
            "starts": starts,
            "parts": parts,
            "queries": launch.queries,
            "keys": launch.keys,
            "warps": launch.warps,
            "stages": launch.stages,
            "least_turns": launch.least_turns,
            "is_chosen": (launch, parts) == (chosen, _parts(size, inputs, chosen)),
            "us": us,
            "floor_us": floor_us,
            "ratio": us / floor_us,
            "gb_per_s": size.num_bytes / us * 1e-3,
            "tflops": size.num_flops / us * 1e-6,
            "sdpa_us": sdpa_us,
            "error": error,
        }


def _parts(size: Size, inputs: Inputs, launch: Launch) -> int:
    from paceline.ops import paged_attention_kernel as kernels

    num_tiled = size.batch * size.shape.M * -(-size.num_query_rows // launch.queries)
    num_sums = min(size.num_query_rows, launch.queries) * size.shape.H
    return kernels.choose_parts(num_tiled, inputs.table.shape[1] * BLOCK_SIZE, num_sums, launch)


def _variants(size: Size, chosen: Launch, inputs: Inputs, sweep: str) -> Iterator[tuple[Launch, int]]:
    """What is chosen first; then the others of a sweep, each once."""
    parts = _parts(size, inputs, chosen)
    yield chosen, parts
    if sweep == "parts":
        yield from ((chosen, number) for number in (1, 2, 4, 8, 16, 32) if number != parts)
        yield from ((replace(chosen, least_turns=turns, alone_turns=2 * turns), 32) for turns in (1, 2, 4, 8))
    elif sweep == "keys":
        for queries, keys, warps, stages in _LAUNCHES:
            launch = replace(chosen, queries=queries, keys=keys, warps=warps, stages=stages)
            is_needed = queries == 16 or queries // 2 < size.num_query_rows
            if launch != chosen and is_needed and 4 * keys * stages * size.shape.H <= _MOST_SHARED_BYTES:
                yield launch, _parts(size, inputs, launch)


def _call(inputs: Inputs, layer: int, launch: Launch, parts: int) -> Callable[[], object]:
    from paceline.ops.paged_attention_kernel import new_arrivals, paged_attention_triton

    arguments = inputs.arguments(layer)
    arrivals = new_arrivals(arguments[0].device)
    return lambda: paged_attention_triton(*arguments, num_parts=parts, launch=launch, arrivals=arrivals)


def _sdpa_calls(size: Size, num_layers: int, device: torch.device) -> list[Callable[[], object]]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    shape, B = size.shape, size.batch
    options = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(B, shape.N, size.rows, shape.H, **options)
    both = torch.empty(num_layers, 2, B, shape.M, size.context, shape.H, **options).normal_()

    def call(layer: int) -> Callable[[], object]:
        keys, values = both[layer]
        return lambda: scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    return [call(layer) for layer in range(num_layers)] * max(1, 20 // num_layers)


def _error(inputs: Inputs, launch: Launch) -> float:
    """Of what is chosen by itself, alone and shared by as many programs as may be."""
    from benchmarks.gpu_micro_clock import relative_error

    from paceline.ops.paged_attention import paged_attention_reference
    from paceline.ops.paged_attention_kernel import paged_attention_triton

    expected = paged_attention_reference(*inputs.arguments(0))
    found = (paged_attention_triton(*inputs.arguments(0), num_parts=parts, launch=launch) for parts in (None, 8))
    return max(relative_error(each, expected) for each in found)


def _result(options: argparse.Namespace, arguments: Sequence[str], facts: Sequence[str]) -> GrowingResult:
    machine = describe_machine(*facts, device=options.device)
    head = make_result(NAME, [], machine=machine, arguments=arguments)
    settings = {"num_replays": options.num_replays, "sweep": options.sweep}
    return GrowingResult(head, settings, options.out, key=_KEY, order=lambda row: 0)  # as they came


if __name__ == "__main__":
    sys.exit(run(main))
