"""The products of a decoder layer at the sizes of two targets, each as one fused launch and as the library's product.

Weights come in as many copies as it takes to keep them out of the L2 cache. In place of attention a layer passes its
queries on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from benchmarks.gpu_micro_clock import Bench, Call, relative_error
from torch import Tensor

from paceline.ops.linear_gated import linear_gated_reference, linear_gated_triton
from paceline.ops.linear_residual import linear_residual_reference, linear_residual_triton
from paceline.ops.project_heads import Cells, HeadForm, project_heads_reference, project_heads_triton
from paceline.ops.rotary import rotary_table
from paceline.ops.skinny_product import Tile, new_counters

OPERATIONS = ("heads", "o", "gated", "down")
ALLOWED_ERROR = 1e-2  # of bf16 results against float32
_EPS = 1e-6
_BLOCKS, _BLOCK_SIZE = 40, 64


class Shape(NamedTuple):
    """A target's layer."""

    name: str
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    has_qk_norm: bool

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each operation's weight."""
        heads = self.num_heads * self.head_size
        return {
            "heads": (heads + 2 * self.num_kv_heads * self.head_size, self.width),
            "o": (self.width, heads),
            "gated": (2 * self.intermediate_size, self.width),
            "down": (self.width, self.intermediate_size),
        }


SHAPES = (
    Shape("smollm2-135m", 576, 30, 9, 3, 64, 1536, False),
    Shape("qwen3-8b", 4096, 36, 32, 8, 128, 12_288, True),
)
TINY = Shape("tiny", 64, 2, 3, 1, 16, 40, True)


@dataclass
class Layer:
    """Weights of one layer, and what its operations share."""

    weights: dict[str, Tensor]
    gains: tuple[Tensor, Tensor]
    qk_gains: tuple[Tensor, Tensor] | None
    planes: Tensor
    counters: Tensor


class Inputs(NamedTuple):
    """Rows of a pass."""

    x: Tensor
    heads: Tensor
    inside: Tensor
    turns: Tensor
    rows_T: Tensor


def dtype_on(device: torch.device) -> torch.dtype:
    """bf16, which Triton's interpreter cannot multiply."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def make_layer(shape: Shape, device: torch.device, operations: Sequence[str] = OPERATIONS) -> Layer:
    """Random weights of some operations."""

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, device=device, dtype=dtype_on(device)) * scale).contiguous()

    weights = {name: random(*shape.sizes[name], scale=shape.sizes[name][1] ** -0.5) for name in operations}
    gains = 1 + random(shape.width, scale=0.2), 1 + random(shape.width, scale=0.2)
    qk_gains = (1 + random(shape.head_size, scale=0.2), 1 + random(shape.head_size, scale=0.2))
    planes = torch.zeros(
        2, shape.num_kv_heads, _BLOCKS, _BLOCK_SIZE, shape.head_size, device=device, dtype=dtype_on(device)
    )
    return Layer(weights, gains, qk_gains if shape.has_qk_norm else None, planes, new_counters(device))


def make_inputs(shape: Shape, num_rows: int, device: torch.device) -> Inputs:
    """Random rows."""

    def random(width: int) -> Tensor:
        return torch.randn(num_rows, width, device=device, dtype=dtype_on(device))

    half = shape.head_size // 2
    frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    turns = rotary_table(frequencies, 2048)[700 : 700 + num_rows].contiguous()
    rows_T = torch.randperm(_BLOCKS * _BLOCK_SIZE, device=device)[:num_rows]
    return Inputs(
        random(shape.width), random(shape.num_heads * shape.head_size), random(shape.intermediate_size), turns, rows_T
    )


def fused(shape: Shape, name: str, layer: Layer, inputs: Inputs, tile: Tile | None = None) -> Tensor:
    """One operation as one launch."""
    weight, options = layer.weights[name], {"tile": tile, "counters": layer.counters}
    if name == "heads":
        form = HeadForm(shape.num_heads, _EPS)
        cells = Cells(layer.planes, inputs.rows_T)
        return project_heads_triton(
            inputs.x, weight, None, layer.gains[0], layer.qk_gains, inputs.turns, cells, form, **options
        )
    if name == "gated":
        return linear_gated_triton(inputs.x, weight, None, layer.gains[1], _EPS, **options)
    rows = inputs.heads if name == "o" else inputs.inside
    return linear_residual_triton(rows, weight, None, inputs.x, None, 0.0, **options)


def error_of(shape: Shape, name: str, layer: Layer, inputs: Inputs, tile: Tile | None = None) -> float:
    """How far a launch is from its float32 definition: queries, keys and values where it projects heads."""
    found = fused(shape, name, layer, inputs, tile)
    weight = layer.weights[name]
    if name == "heads":
        cells = Cells(torch.zeros_like(layer.planes), inputs.rows_T)
        form = HeadForm(shape.num_heads, _EPS)
        expected = project_heads_reference(
            inputs.x, weight, None, layer.gains[0], layer.qk_gains, inputs.turns, cells, form
        )
        stored = relative_error(
            layer.planes.flatten(2, 3)[:, :, inputs.rows_T], cells.planes.flatten(2, 3)[:, :, inputs.rows_T]
        )
        return max(relative_error(found, expected), stored)
    if name == "gated":
        expected = linear_gated_reference(inputs.x, weight, None, layer.gains[1], _EPS)
    else:
        rows = inputs.heads if name == "o" else inputs.inside
        expected = linear_residual_reference(rows, weight, None, inputs.x, None, 0.0)
    return relative_error(found, expected)


def operation_calls(
    bench: Bench, shape: Shape, name: str, inputs: Inputs, *, tile: Tile | None = None
) -> tuple[list[Call], list[Call], int]:
    """Launches of one operation over distinct weights, the library's bare products over the same, and bytes of one."""
    num_outputs, width = shape.sizes[name]
    num_bytes = 2 * num_outputs * width
    layers = [make_layer(shape, bench.device, (name,)) for _ in range(bench.clock.copies(num_bytes))]
    rows = {"o": inputs.heads, "down": inputs.inside}.get(name, inputs.x)
    ours: list[Call] = [_bound(fused, shape, name, layer, inputs, tile) for layer in layers]
    theirs: list[Call] = [_bound(functional.linear, rows, layer.weights[name]) for layer in layers]
    return ours, theirs, num_bytes


def stack_calls(shape: Shape, layers: Sequence[Layer], inputs: Inputs) -> list[Call]:
    """All layers, each on what the one before gave, as one call."""

    def run() -> Tensor:
        x = inputs.x
        for layer in layers:
            here = inputs._replace(x=x)
            here = here._replace(heads=fused(shape, "heads", layer, here).flatten(1))
            here = here._replace(x=fused(shape, "o", layer, here))
            here = here._replace(inside=fused(shape, "gated", layer, here))
            x = fused(shape, "down", layer, here)
        return x

    return [run]


def tiles(name: str, shape: Shape) -> Iterator[Tile]:
    """Cuts worth trying."""
    num_outputs, width = shape.sizes[name]
    if name == "heads" and shape.has_qk_norm:
        outputs: tuple[int, ...] = (shape.head_size,)
    else:
        outputs = (16, 32, 64, 128) if name in ("o", "down") else (32, 64, 128)
    least = 90 if width >= 4096 else 24
    for output, block, parts in itertools.product(outputs, (64, 128, 256), (1, 2, 3, 4, 8)):
        num_programs = -(-num_outputs // output) * parts
        turns = -(-width // (block * parts))
        per_stage = 2 * block * (output + 16)
        resident = min(4, -(-num_programs // 132))
        if width % block or not least <= num_programs <= (800 if parts == 1 else 540):
            continue
        if turns < 2 or output * block > 16384 or (parts > 1 and num_outputs // output >= 120):
            continue
        stages = max(2, min(turns, 210_000 // resident // per_stage))
        for warps in (4, 8) if output * block >= 8192 else (4,):
            yield Tile(output, block, parts, warps, stages)
        if stages >= 8:
            yield Tile(output, block, parts, 4, stages // 2)


def _bound(function: Callable[..., Tensor], *arguments: object) -> Call:
    return lambda: function(*arguments)
