"""Attention of training blocks over their context: a dense mask against flex attention, forward and backward.

    python -m benchmarks.block_attention --device cuda --out docs/results

Both as training runs them (`models/attends.py`, `training/flex_attend.py`): every block sees the context before its
anchor and its own rows. A step builds one mask for all layers of a kind, so its cost is divided by the number of
layers. Times are medians over whole calls, the first ones left out; `mask_ms` is what one mask takes, `dense_ms` and
`flex_ms` a layer's forward and backward, `flex_over_dense` compares layer plus its share of the mask. Outputs and
gradients of both are compared first. From which size on `schedule.attention = "auto"` takes flex attention follows from
these figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.command_line import positive, report, run, say
from benchmarks.results import Row, text_table
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from paceline.errors import EXIT_DONE
from paceline.models.attends import BlocksOverContext
from paceline.models.loading import resolve_device
from paceline.training.anchors import block_visibility
from paceline.training.flex_attend import FlexBlocks, FlexBlocksOverContext

NAME = "block-attention"
_TOLERANCE = 0.04  # of the largest number, in bf16


@dataclass(frozen=True)
class Shape:
    """A batch of blocks: B rows of S tokens with A blocks of Q rows each; N query and M key heads of size H."""

    B: int
    S: int
    A: int
    Q: int
    N: int
    M: int
    H: int
    num_layers: int


_SMOL = {"N": 9, "M": 3, "H": 64, "num_layers": 4}
_LARGE = {"N": 32, "M": 8, "H": 128, "num_layers": 5}
SHAPES = (
    Shape(B=64, S=384, A=32, Q=8, **_SMOL),
    Shape(B=64, S=512, A=64, Q=8, **_SMOL),
    Shape(B=16, S=2048, A=128, Q=8, **_SMOL),
    Shape(B=8, S=2048, A=256, Q=16, **_LARGE),
    Shape(B=2, S=8192, A=512, Q=16, **_LARGE),
)
SMALL_SHAPES = (Shape(B=2, S=96, A=4, Q=8, N=9, M=3, H=64, num_layers=4),)


def main(arguments: Sequence[str]) -> int:
    """Compare and time every shape; print the table."""
    options = parse(arguments)
    device = resolve_device(options.device)
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for shape in SHAPES if device.type == "cuda" else SMALL_SHAPES:
        say(f"{shape}")
        rows.append(measure(shape, device, options.repeats))
        print(text_table(rows[-1:]), flush=True)
        report(NAME, rows, options, arguments, device=device.type)
    return EXIT_DONE


def measure(shape: Shape, device: torch.device, repeats: int) -> Row:
    """Check that both agree, then time them."""
    has_gradient = device.type == "cuda"  # flex attention has none on a CPU
    inputs, anchors = make_inputs(shape, device, has_gradient=has_gradient)
    q, k, v, *context = inputs
    blocks = FlexBlocks(shape.S, shape.A, is_compiled=has_gradient)

    def make_visible() -> Tensor:
        return block_visibility(anchors, shape.Q, shape.S, window=None, causal=False)

    def make_mask() -> BlockMask:
        return blocks.mask(anchors, shape.Q, shape.S, window=None, causal=False)

    visible = make_visible()
    over_dense = BlocksOverContext([(context[0], context[1])], [visible])
    over_tiles = FlexBlocksOverContext([(context[0], context[1])], [make_mask()], blocks.is_compiled)

    def dense() -> Tensor:
        return over_dense(0, q, k, v)

    def flex() -> Tensor:
        return over_tiles(0, q, k, v)

    largest_difference = compare(dense, flex, inputs, has_gradient=has_gradient)
    dense_ms = timed_ms(lambda: step(dense, has_gradient), device, repeats)
    flex_ms = timed_ms(lambda: step(flex, has_gradient), device, repeats)
    dense_mask_ms = timed_ms(make_visible, device, repeats)
    flex_mask_ms = timed_ms(make_mask, device, repeats)
    layers = shape.num_layers
    return {
        "rows": f"{shape.B} x {shape.S}",
        "blocks": f"{shape.A} x {shape.Q}",
        "heads": f"{shape.N}/{shape.M} x {shape.H}",
        "dense_ms": dense_ms,
        "dense_mask_ms": dense_mask_ms,
        "flex_ms": flex_ms,
        "flex_mask_ms": flex_mask_ms,
        "flex_over_dense": (flex_ms + flex_mask_ms / layers) / (dense_ms + dense_mask_ms / layers),
        "visible_share": float(visible.float().mean()),
        "largest_difference": largest_difference,
    }


def make_inputs(shape: Shape, device: torch.device, *, has_gradient: bool) -> tuple[list[Tensor], Tensor]:
    """Seeded queries, keys and values of the blocks, keys and values of the context; and sorted anchors."""
    generator = torch.Generator().manual_seed(0)

    def random(length: int, heads: int) -> Tensor:
        numbers = torch.randn(shape.B, length, heads, shape.H, generator=generator)
        return numbers.to(device, torch.bfloat16).requires_grad_(has_gradient)

    anchors = torch.stack(
        [torch.randperm(shape.S - 1, generator=generator)[: shape.A].sort().values + 1 for _ in range(shape.B)]
    )
    num_rows = shape.A * shape.Q
    sizes = [(num_rows, shape.N), (num_rows, shape.M), (num_rows, shape.M), (shape.S, shape.M), (shape.S, shape.M)]
    return [random(*size) for size in sizes], anchors.to(device)


def compare(
    dense: Callable[[], Tensor], flex: Callable[[], Tensor], inputs: Sequence[Tensor], *, has_gradient: bool
) -> float:
    """Largest difference of outputs and gradients, relative to the largest number.

    Raises:
        AssertionError: it is beyond what bf16 explains.
    """
    expected, found = dense(), flex()
    pairs = [(expected, found)]
    if has_gradient:
        gradient = torch.randn_like(expected)
        pairs += zip(
            torch.autograd.grad(expected, inputs, gradient), torch.autograd.grad(found, inputs, gradient), strict=True
        )
    worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    assert worst < _TOLERANCE, f"dense and flex attention differ by {worst:.3g}"
    return worst


def step(forward: Callable[[], Tensor], has_gradient: bool) -> None:
    """A layer's attention as training runs it."""
    mixed = forward()
    if has_gradient:
        mixed.backward(torch.ones_like(mixed))


def timed_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of a call."""
    times = []
    for _ in range(repeats + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(times[3:])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--repeats", type=positive, default=20, help="timed calls; default 20")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(main))
