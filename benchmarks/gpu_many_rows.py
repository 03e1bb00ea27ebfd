"""What lies between the products of a pass with many rows, on a GPU: right first, then how near its bytes each comes.

    python -m benchmarks.gpu_many_rows --out docs/results
    python -m benchmarks.gpu_many_rows --batches 128 --operations chain attention --sweep
    python -m benchmarks.gpu_many_rows --device cpu        the script itself, on a tiny shape; times mean nothing

Rows are those of a verification: every request has an anchor and 15 drafts. `us` is a launch's time inside a captured
graph over as many different inputs as it takes for the L2 cache not to hold them, `early_us` the same with programmatic
dependent launch, `floor_us` its bytes over the bandwidth of a large copy. A chain is whole layers with distinct weights
and real attention, timed as one: what a launch costs beside products shows there alone. `--sweep` also tries other
launches of attention and of the largest scores. `gate-up` is the product and its activation as two launches and as one,
alone and in a chain. The exit code is 3 if a result is wrong or a case fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.command_line import positive, report, run, say
from benchmarks.results import text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE, ConfigError

if TYPE_CHECKING:
    import torch
    from benchmarks.gpu_attention import Inputs
    from benchmarks.gpu_layer_cases import Shape
    from benchmarks.gpu_micro_clock import Bench, Call, Row

    from paceline.models.fused_layer import FusedLayer
    from paceline.ops.paged_attention import PagedAttend

NAME = "gpu-many-rows"
OPERATIONS = ("norm", "place", "gated", "attention", "largest", "chain", "gate-up")
ROWS_OF_REQUEST = 16
_ALLOWED = 1e-2  # relative error in bf16
_ALLOWED_OF_CHAIN = 5e-2  # between the same rows among many and among few
_CHAIN = 12  # layers
_LAUNCHES = ((64, 64, 4, 3), (64, 32, 4, 2), (64, 32, 4, 4), (64, 32, 8, 3), (64, 64, 4, 2), (64, 64, 8, 3))
_RUNS = ((2048, 4, 1), (2048, 4, 3), (2048, 4, 6), (4096, 4, 1), (4096, 8, 3), (8192, 8, 1))  # turn, warps, stages
_PRODUCT_TILES = (
    (128, 128, 64, 8, 4),
    (128, 128, 64, 8, 3),
    (256, 64, 64, 8, 4),
)  # rows, outputs, width, warps, stages
_Case = tuple[str, list["Call"], float, Callable[[], float]]  # what, calls, bytes of one, error


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
    shape = SHAPES[1] if bench.is_real else TINY
    rows: list[Row] = []
    failed: list[str] = []
    deadline_s = time.monotonic() + options.seconds
    for batch in options.batches if bench.is_real else [2]:
        for operation in options.operations:
            try:
                for row in _measured(bench, shape, operation, batch, options, deadline_s):
                    rows.append(row)
                    say(
                        " ".join(
                            f"{key} {value:.4g}" if isinstance(value, float) else str(value)
                            for key, value in row.items()
                        )
                    )
                    if not row["is_right"]:
                        failed.append(f"{row['operation']}, {batch} requests: wrong by {row['error']}")
            except Exception:
                say("\n".join(traceback.format_exc().strip().splitlines()[-6:]))
                failed.append(f"{operation}, {batch} requests: it failed")
    print(text_table(rows), flush=True)
    for text in failed:
        say(f"not measured: {text}")
    report(NAME, rows, options, arguments, device=options.device)
    return EXIT_CHECK_SAYS_NO if failed or not rows else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a trial; default cuda")
    parser.add_argument("--batches", type=positive, nargs="+", default=[32, 128], help="requests; default 32 128")
    parser.add_argument("--context", type=positive, default=208, help="positions before the block; default 208")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS), help="default all")
    parser.add_argument("--sweep", action="store_true", help="also try other launches")
    parser.add_argument("--seconds", type=float, default=80.0, help="for everything; default 80")
    parser.add_argument("--num-replays", type=positive, default=15, help="of each graph; default 15")
    parser.add_argument("--bandwidth-tb", type=float, default=4.3, help="for the floor, TB/s; default 4.3")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write FOLDER/{NAME}.json")
    return parser.parse_args(arguments)


def _measured(
    bench: Bench, shape: Shape, operation: str, batch: int, options: argparse.Namespace, deadline_s: float
) -> Iterator[Row]:
    from paceline.ops.dispatch import allow_dependent_launch

    for name, calls, num_bytes, error_of in _cases(bench, shape, operation, batch, options):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no time was left for {name}")
        error, allowed = error_of(), _ALLOWED_OF_CHAIN if "chain" in name else _ALLOWED
        us = bench.clock.time(calls).us
        allow_dependent_launch("on", most_rows=10**6)
        early_us = bench.clock.time(calls).us
        allow_dependent_launch("off")
        yield {
            "operation": name,
            "batch": batch,
            "us": us,
            "early_us": early_us,
            "floor_us": bench.ceilings.floor_us(num_bytes) if num_bytes else None,
            "error": error,
            "is_right": error <= allowed,
        }


def _cases(bench: Bench, shape: Shape, operation: str, batch: int, options: argparse.Namespace) -> Iterator[_Case]:
    from paceline.ops import gated_activation

    rows = batch * ROWS_OF_REQUEST
    if operation == "norm":
        yield from _norms(bench, shape, rows)
    elif operation == "place":
        yield _places(bench, shape, rows)
    elif operation == "gated":
        yield _gated(bench, shape, rows)
    elif operation == "attention":
        yield from _attentions(bench, shape, batch, options)
    elif operation == "largest":
        yield from _largest(bench, shape, rows, is_swept=options.sweep)
    elif operation == "chain":
        for order in (0, 1, 2) if options.sweep else (gated_activation._ORDER,):
            with patch.object(gated_activation, "_ORDER", order):
                name, calls, size, error = _chain(bench, shape, batch, options.context)
                yield f"{name}, activations in order {order}", calls, size, error
    else:
        yield from _gate_up(bench, shape, batch, options.context)


def _copies(bench: Bench, num_bytes: float, make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    return [make() for _ in range(min(12, bench.clock.copies(int(num_bytes))))]


def _random(bench: Bench, *sizes: int) -> torch.Tensor:
    import torch
    from benchmarks.gpu_layer_cases import dtype_on

    return torch.randn(sizes, device=bench.device, dtype=dtype_on(bench.device))


def _worst(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    from benchmarks.gpu_micro_clock import relative_error

    return max(relative_error(ours, right) for ours, right in zip(found, expected, strict=True))


def _norms(bench: Bench, shape: Shape, rows: int) -> Iterator[_Case]:
    """Of the stream alone, with a copy of it, and of a sum as it was before products added to the stream."""
    from paceline.ops.add_norm import add_norm_reference, add_norm_triton

    gain = _random(bench, shape.width)
    size = 2.0 * rows * shape.width
    for name, adds, copies, num_tensors in (
        ("norm", False, False, 2),
        ("norm, copy", False, True, 3),
        ("sum, norm", True, False, 4),
    ):
        streams = _copies(bench, size * num_tensors, partial(_random, bench, rows, shape.width))
        y = _random(bench, rows, shape.width) if adds else None
        calls: list[Call] = [partial(add_norm_triton, x, y, gain, 1e-6, copies) for x in streams]
        x = streams[0]

        def error(x: torch.Tensor = x, y: torch.Tensor | None = y, copies: bool = copies) -> float:
            return _worst(add_norm_triton(x, y, gain, 1e-6, copies), add_norm_reference(x, y, gain, 1e-6, copies))

        yield name, calls, size * num_tensors, error


def _places(bench: Bench, shape: Shape, rows: int) -> _Case:
    import torch
    from benchmarks.gpu_layer_cases import make_inputs

    from paceline.ops.heads import Cells, HeadForm
    from paceline.ops.place_heads import place_heads_reference, place_heads_triton

    turns = make_inputs(shape, min(rows, 1000), bench.device).turns
    turns = turns.repeat(-(-rows // turns.shape[0]), 1, 1)[:rows].contiguous()
    gains = (_random(bench, shape.head_size), _random(bench, shape.head_size))
    form, outputs = HeadForm(shape.num_heads, 1e-6), shape.sizes["heads"][0]
    size = 4.0 * rows * outputs
    many = _copies(bench, size, partial(_random, bench, rows, outputs))
    at = torch.randperm(2 * rows, device=bench.device)[:rows]
    planes = [_random(bench, 2, shape.num_kv_heads, 2 * rows // 16, 16, shape.head_size) for _ in range(2)]
    calls: list[Call] = [partial(place_heads_triton, qkv, gains, turns, Cells(planes[0], at), form) for qkv in many]

    def error() -> float:
        q = place_heads_triton(many[0], gains, turns, Cells(planes[0], at), form)
        right = place_heads_reference(many[0], gains, turns, Cells(planes[1], at), form)
        ours, theirs = (both.flatten(2, 3)[:, :, at] for both in planes)
        return _worst((q, ours), (right, theirs))

    return "place", calls, size, error


def _gated(bench: Bench, shape: Shape, rows: int) -> _Case:
    from paceline.ops.gated_activation import Activation, gated_activation_reference, gated_activation_triton

    size, silu = 6.0 * rows * shape.intermediate_size, Activation("silu")
    both = _copies(bench, size, partial(_random, bench, rows, 2 * shape.intermediate_size))
    calls: list[Call] = [partial(gated_activation_triton, *one.chunk(2, dim=-1), silu) for one in both]
    halves = both[0].chunk(2, dim=-1)

    def error() -> float:
        return _worst([gated_activation_triton(*halves, silu)], [gated_activation_reference(*halves, silu)])

    return "gated", calls, size, error


def _attentions(bench: Bench, shape: Shape, batch: int, options: argparse.Namespace) -> Iterator[_Case]:
    from benchmarks.gpu_attention import Inputs, Size
    from benchmarks.gpu_attention import Shape as Heads

    from paceline.ops.paged_attention import paged_attention_reference
    from paceline.ops.paged_attention_kernel import choose_launch, paged_attention_triton

    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_size)
    size = Size(shape.name, heads, batch, options.context, ROWS_OF_REQUEST)
    inputs = Inputs.make(size, max(2, min(6, bench.clock.copies(size.num_bytes))), bench.device)
    chosen = choose_launch(size.num_query_rows, batch * heads.M, heads.H, inputs.planes.dtype)
    launches = [chosen]
    if options.sweep:
        for queries, keys, warps, stages in _LAUNCHES:
            launches.append(replace(chosen, queries=queries, keys=keys, warps=warps, stages=stages))
    expected = paged_attention_reference(*inputs.arguments(0))  # type: ignore[arg-type]
    for launch in launches:
        attend = partial(paged_attention_triton, launch=launch)
        calls: list[Call] = [partial(attend, *inputs.arguments(layer)) for layer in range(len(inputs.planes))]

        def error(attend: Callable[..., torch.Tensor] = attend) -> float:
            return _worst([attend(*inputs.arguments(0))], [expected])

        cut = f"{launch.queries} {launch.keys} {launch.warps} {launch.stages}"
        yield f"attention {cut}", calls, size.num_bytes, error


def _largest(bench: Bench, shape: Shape, rows: int, *, is_swept: bool) -> Iterator[_Case]:
    from paceline.ops import largest_ids

    scores = _random(bench, rows, shape.vocab_size)
    expected = scores.max(dim=-1).indices.cpu()
    size = 2.0 * scores.numel()
    yield "largest, torch", [lambda: scores.max(dim=-1)], size, lambda: 0.0
    settings: list[tuple[int, int, int] | None] = [None, *(_RUNS if is_swept else ())]
    for setting in settings:
        names = zip(("_TURN", "_WARPS", "_STAGES"), setting or (), strict=False)
        with (
            patch.multiple(largest_ids, **dict(names))
            if setting
            else patch.object(largest_ids, "_TURN", largest_ids._TURN)
        ):
            for name, call in (
                ("ids", partial(largest_ids.largest_ids_triton, scores)),
                ("runs", partial(largest_ids.largest_of_runs, scores)),
            ):

                def error() -> float:
                    return float((largest_ids.largest_ids_triton(scores).cpu() != expected).any())

                yield f"largest {name}, {setting or 'as chosen'}", [call], size, error


def _chain(bench: Bench, shape: Shape, batch: int, context: int) -> _Case:
    """Whole layers; their first requests must come out as they do among few others."""
    from benchmarks.gpu_attention import Inputs, Size
    from benchmarks.gpu_attention import Shape as Heads
    from benchmarks.gpu_layer_cases import make_inputs

    from paceline.models.fused_layer import run_fused

    num_layers, rows = (_CHAIN if bench.is_real else 2), batch * ROWS_OF_REQUEST
    heads = Heads(shape.num_heads, shape.num_kv_heads, shape.head_size)
    inputs = Inputs.make(Size(shape.name, heads, batch, context, ROWS_OF_REQUEST), num_layers, bench.device)
    layers = [_layer(bench, shape) for _ in range(num_layers)]
    x_BTD = _random(bench, batch, ROWS_OF_REQUEST, shape.width)
    turns = make_inputs(shape, ROWS_OF_REQUEST, bench.device).turns.repeat(batch, 1, 1)
    attend = _attend(inputs, context)
    calls: list[Call] = [lambda: run_fused(layers, x_BTD, turns, attend)]

    def error() -> float:
        whole = run_fused(layers, x_BTD, turns, attend)
        few = slice(0, 1 + 64 // ROWS_OF_REQUEST)
        num_few = x_BTD[few].shape[0]
        alone = replace(inputs, slots_B=inputs.slots_B[few], starts_B=inputs.starts_B[few])
        lone = run_fused(layers, x_BTD[few], turns[: num_few * ROWS_OF_REQUEST], _attend(alone, context))
        return _worst([whole[few]], [lone])

    return f"chain of {num_layers} layers at {rows} rows", calls, 0.0, error


def _gate_up(bench: Bench, shape: Shape, batch: int, context: int) -> Iterator[_Case]:
    import torch.nn.functional as functional

    from paceline.models import fused_layer
    from paceline.ops.gated_activation import Activation, gated_activation_triton
    from paceline.ops.gated_product import ProductTile, gated_product_reference, gated_product_triton

    x, silu = _random(bench, batch * ROWS_OF_REQUEST, shape.width), Activation("silu")
    sizes = shape.sizes["gated"]
    weights = [_random(bench, *sizes) * sizes[1] ** -0.5 for _ in range(_CHAIN if bench.is_real else 2)]
    expected = gated_product_reference(x, weights[0])

    def two(weight: torch.Tensor) -> torch.Tensor:
        return gated_activation_triton(*functional.linear(x, weight).chunk(2, dim=-1), silu)

    yield (
        "gate-up, two launches",
        [partial(two, weight) for weight in weights],
        0.0,
        lambda: _worst([two(weights[0])], [expected]),
    )
    for numbers in _PRODUCT_TILES if bench.is_real else ((16, 16, 16, 4, 2),):
        tile = ProductTile(*numbers)
        one = partial(gated_product_triton, tile=tile)
        calls: list[Call] = [partial(one, x, weight) for weight in weights]

        def error(one: Callable[..., torch.Tensor] = one) -> float:
            return _worst([one(x, weights[0])], [expected])

        yield f"gate-up, one launch, {numbers}", calls, 0.0, error

        def activated(y_RD: torch.Tensor, layer: FusedLayer, one: Callable[..., torch.Tensor] = one) -> torch.Tensor:
            return one(y_RD, layer.gate_up)

        with patch.object(fused_layer, "_activated", activated):
            name, calls, size, error = _chain(bench, shape, batch, context)
            yield f"{name}, gate-up in one launch, {numbers}", calls, size, error


def _layer(bench: Bench, shape: Shape) -> FusedLayer:
    from paceline.models.fused_layer import FusedLayer
    from paceline.ops.skinny_launch import new_counters

    weights = {name: _random(bench, *sizes) * sizes[1] ** -0.5 for name, sizes in shape.sizes.items() if name != "head"}
    gains = [1 + 0.2 * _random(bench, size) for size in (shape.width, shape.width, shape.head_size, shape.head_size)]
    return FusedLayer(
        num_heads=shape.num_heads,
        eps=1e-6,
        value_scale=1.0,
        input_gain_D=gains[0],
        qkv=weights["heads"],
        qkv_bias=None,
        qk_gains=(gains[2], gains[3]),
        sink_N=None,
        o=weights["o"],
        o_bias=None,
        mlp_gain_D=gains[1],
        gate_up=weights["gated"],
        gate_up_bias=None,
        down=weights["down"],
        down_bias=None,
        counters=new_counters(bench.device),
        most_rows=16,
    )


def _attend(inputs: Inputs, context: int) -> PagedAttend:
    """The verification's attention: every request's rows behind its context."""
    import torch

    from paceline.ops.paged_attention import PagedAttend, paged_attention
    from paceline.ops.paged_attention_kernel import new_arrivals

    arrivals = new_arrivals(inputs.table.device)
    block_size = inputs.planes.shape[4]
    at_T = context + torch.arange(ROWS_OF_REQUEST, device=inputs.table.device)
    blocks_BT = inputs.table[inputs.slots_B][:, at_T // block_size].long()
    rows_T = (blocks_BT * block_size + at_T % block_size).flatten()

    class Attends(PagedAttend):
        def cells(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            return inputs.planes[layer], rows_T

        def stored(self, layer: int, q_BTNH: torch.Tensor, *, sink_N: torch.Tensor | None = None) -> torch.Tensor:
            return paged_attention(
                q_BTNH, inputs.planes[layer], inputs.table, inputs.slots_B, inputs.starts_B, arrivals=arrivals
            )

    return Attends()


if __name__ == "__main__":
    sys.exit(run(main))
