"""The products of a decoder layer at the sizes of two targets, each as one fused launch and as the library's product.

Weights come in as many copies as it takes to keep them out of the L2 cache. In place of attention a layer passes its
queries on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from benchmarks.gpu_micro_clock import Bench, Call, relative_error
from torch import Tensor

from paceline.models.fused_layer import FusedLayer, run_fused
from paceline.ops.heads import Cells, HeadForm
from paceline.ops.linear_gated import linear_gated_reference, linear_gated_triton
from paceline.ops.linear_residual import linear_residual_reference, linear_residual_triton
from paceline.ops.paged_attention import PagedAttend, paged_attention
from paceline.ops.paged_attention_kernel import Launch, new_arrivals, paged_attention_triton
from paceline.ops.project_heads import project_heads_reference, project_heads_triton
from paceline.ops.rotary import rotary_table
from paceline.ops.scale_rows import scale_rows
from paceline.ops.skinny_launch import new_counters
from paceline.ops.skinny_product import ScaledRows
from paceline.ops.skinny_tile import Tile, choose_tile

OPERATIONS = ("heads", "o", "gated", "down")
_AHEAD = 98_304  # bytes that a program asks for early
# Cuts of a chain's products that are compared as a whole, beside those that the operations choose.
CHAIN_CUTS: dict[str, dict[str, Tile | None]] = {
    "chosen": {},
    "streamed": {
        "heads": Tile(64, 64, 4, 4, 3, _AHEAD),
        "o": Tile(16, 128, 1, 4, 5, _AHEAD),
        "gated": Tile(32, 64, 1, 4, 9, _AHEAD),
        "down": Tile(16, 256, 1, 4, 6, _AHEAD),
    },
    "sliced": {
        "heads": Tile(32, 128, 1, 4, 5, _AHEAD, 4),
        "o": Tile(16, 128, 1, 4, 5, _AHEAD, 4),
        "gated": Tile(32, 128, 1, 4, 5, _AHEAD, 4),
        "down": Tile(16, 256, 1, 4, 6, _AHEAD, 4),
    },
    "held": {
        "heads": Tile(32, 128, 1, 8, 2, 0, 8, True),
        "o": Tile(16, 128, 1, 8, 2, 0, 8, True),
        "gated": Tile(32, 128, 1, 8, 2, 0, 8, True),
        "down": Tile(16, 256, 1, 8, 2, 0, 8, True),
    },
    "held in two": {
        "heads": Tile(32, 64, 1, 8, 2, 0, 8, True),
        "o": Tile(16, 64, 1, 8, 2, 0, 8, True),
        "gated": Tile(32, 64, 1, 8, 2, 0, 8, True),
        "down": Tile(16, 128, 1, 8, 2, 0, 8, True),
    },
    "held, 8 outputs": {
        "heads": Tile(16, 128, 1, 8, 2, 0, 8, True),
        "o": Tile(8, 128, 1, 8, 2, 0, 8, True),
        "gated": Tile(32, 128, 1, 8, 2, 0, 8, True),
        "down": Tile(8, 256, 1, 8, 2, 0, 8, True),
    },
    "held, o and heads": {
        "heads": Tile(32, 128, 1, 8, 2, 0, 8, True),
        "o": Tile(16, 128, 1, 8, 2, 0, 8, True),
        "gated": Tile(32, 128, 1, 4, 5, _AHEAD, 4),
        "down": Tile(16, 256, 1, 4, 6, _AHEAD, 4),
    },
    "sliced, much shared": {  # all programs have more than 48 KB, as those of attention do
        "heads": Tile(32, 128, 1, 4, 6, _AHEAD, 4),
        "o": Tile(16, 128, 1, 4, 8, _AHEAD, 4),
        "gated": Tile(32, 128, 1, 4, 6, _AHEAD, 4),
        "down": Tile(16, 256, 1, 4, 6, _AHEAD, 4),
    },
    "sliced, little shared": {  # and none of them has
        "heads": Tile(32, 128, 1, 4, 4, _AHEAD, 4),
        "o": Tile(16, 128, 1, 4, 5, _AHEAD, 4),
        "gated": Tile(32, 128, 1, 4, 4, _AHEAD, 4),
        "down": Tile(16, 256, 1, 4, 3, _AHEAD, 4),
    },
    "sliced, 8 warps": {
        "heads": Tile(32, 256, 1, 8, 3, _AHEAD, 8),
        "o": Tile(16, 256, 1, 8, 3, _AHEAD, 8),
        "gated": Tile(32, 256, 1, 8, 3, _AHEAD, 8),
        "down": Tile(16, 512, 1, 8, 3, _AHEAD, 8),
    },
    "sliced, 8 outputs": {
        "heads": Tile(16, 128, 1, 4, 5, _AHEAD, 4),
        "o": Tile(8, 128, 1, 4, 5, _AHEAD, 4),
        "gated": Tile(16, 128, 1, 4, 5, _AHEAD, 4),
        "down": Tile(8, 256, 1, 4, 6, _AHEAD, 4),
    },
}
ALLOWED_ERROR = 1e-2  # of bf16 results against float32
NUM_SQUARES = 32  # in so many parts a product of real sizes leaves its rows' squares
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
    vocab_size: int

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each operation's weight."""
        heads = self.num_heads * self.head_size
        return {
            "heads": (heads + 2 * self.num_kv_heads * self.head_size, self.width),
            "o": (self.width, heads),
            "gated": (2 * self.intermediate_size, self.width),
            "down": (self.width, self.intermediate_size),
            "head": (self.vocab_size, self.width),
        }


SHAPES = (
    Shape("smollm2-135m", 576, 30, 9, 3, 64, 1536, False, 49_152),
    Shape("qwen3-8b", 4096, 36, 32, 8, 128, 12_288, True, 151_936),
)
_REFERENCES: dict[str, Callable[..., Tensor | ScaledRows]] = {
    "heads": project_heads_reference,
    "o": linear_residual_reference,
    "gated": linear_gated_reference,
    "down": linear_residual_reference,
    "head": linear_residual_reference,
}
TINY = Shape("tiny", 64, 2, 3, 1, 16, 40, True, 70)


@dataclass
class Layer:
    """Weights of one layer, and what its operations share."""

    weights: dict[str, Tensor]
    gains: tuple[Tensor, Tensor]
    qk_gains: tuple[Tensor, Tensor] | None
    planes: Tensor
    counters: Tensor


class Inputs(NamedTuple):
    """Rows of a pass; x as the stream, `scaled` and `squares` as the norm before a product wants it."""

    x: Tensor
    scaled: Tensor
    squares: Tensor
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
    x = random(shape.width)
    rows = scale_rows(x, 1 + random(shape.width)[0] * 0.2)
    squares = rows.squares_TS / NUM_SQUARES
    return Inputs(
        x,
        rows.scaled_TD,
        squares.expand(-1, NUM_SQUARES).contiguous(),
        random(shape.num_heads * shape.head_size),
        random(shape.intermediate_size),
        turns,
        rows_T,
    )


def fused(shape: Shape, name: str, layer: Layer, inputs: Inputs, tile: Tile | None = None) -> Tensor:
    """One operation as one launch."""
    run, arguments = _launch(shape, name, layer, inputs, layer.planes)
    return _stream(run(*arguments, tile=tile, counters=layer.counters))


def _launch(
    shape: Shape, name: str, layer: Layer, inputs: Inputs, planes: Tensor
) -> tuple[Callable[..., Tensor | ScaledRows], tuple[object, ...]]:
    """The launcher of an operation and its arguments, which are those of its definition."""
    weight = layer.weights[name]
    if name == "heads":
        cells, form = Cells(planes, inputs.rows_T), HeadForm(shape.num_heads, _EPS)
        arguments = inputs.scaled, inputs.squares, weight, None, layer.qk_gains, inputs.turns, cells, form
        return project_heads_triton, arguments
    if name == "head":
        return linear_residual_triton, (inputs.x, None, weight, None, None, None, 0.0)
    if name == "gated":
        return linear_gated_triton, (inputs.scaled, inputs.squares, weight, None, _EPS)
    rows = inputs.heads if name == "o" else inputs.inside
    gain = layer.gains[1 if name == "o" else 0]
    return linear_residual_triton, (rows, None, weight, None, inputs.x, gain, 0.0)


def _stream(result: Tensor | ScaledRows) -> Tensor:
    return result if isinstance(result, Tensor) else result.x_TD


def error_of(shape: Shape, name: str, layer: Layer, inputs: Inputs, tile: Tile | None = None) -> float:
    """How far a launch is from its float32 definition: queries, keys and values where it projects heads."""
    planes = torch.zeros_like(layer.planes)
    run, arguments = _launch(shape, name, layer, inputs, layer.planes)
    found = run(*arguments, tile=tile, counters=layer.counters)
    _, arguments = _launch(shape, name, layer, inputs, planes)
    expected = _REFERENCES[name](*arguments)
    errors = [relative_error(_stream(found), _stream(expected))]
    if name == "heads":
        stored, right = (both.flatten(2, 3)[:, :, inputs.rows_T] for both in (layer.planes, planes))
        errors.append(relative_error(stored, right))
    if isinstance(found, ScaledRows) and isinstance(expected, ScaledRows):
        errors.append(relative_error(found.scaled_TD, expected.scaled_TD))
        errors.append(relative_error(found.squares_TS.sum(-1), expected.squares_TS.sum(-1)))
    return max(errors)


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


def stack_calls(shape: Shape, layers: Sequence[Layer], inputs: Inputs, most_rows: int) -> list[Call]:
    """All layers as one call, as a model runs them; with more rows than `most_rows` the library's products."""
    planes_to_rows = {"attend": _Passes(layers, inputs.rows_T), "is_neox_style": True}
    forms = [
        FusedLayer(
            num_heads=shape.num_heads,
            eps=_EPS,
            value_scale=1.0,
            input_gain_D=layer.gains[0],
            qkv=layer.weights["heads"],
            qkv_bias=None,
            qk_gains=layer.qk_gains,
            sink_N=None,
            o=layer.weights["o"],
            o_bias=None,
            mlp_gain_D=layer.gains[1],
            gate_up=layer.weights["gated"],
            gate_up_bias=None,
            down=layer.weights["down"],
            down_bias=None,
            counters=layer.counters,
            most_rows=most_rows,
        )
        for layer in layers
    ]
    return [lambda: run_fused(forms, inputs.x.unsqueeze(0), inputs.turns, **planes_to_rows)]  # type: ignore[arg-type]


class _Passes(PagedAttend):
    """Attention that passes queries on."""

    def __init__(self, layers: Sequence[Layer], rows_T: Tensor) -> None:
        self._layers, self._rows_T = layers, rows_T

    def cells(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer].planes, self._rows_T

    def stored(self, layer: int, q_BTNH: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
        return q_BTNH


class Context(NamedTuple):
    """Attention of a chain: requests that have so many positions each, their rows the last of them.

    Attributes:
        num_requests: B, among which the rows are divided.
        num_positions: L.
        launch: of attention, by default its own choice.
    """

    num_requests: int
    num_positions: int
    launch: Launch | None = None


def chain_call(
    shape: Shape,
    layers: Sequence[Layer],
    inputs: Inputs,
    tiles: Mapping[str, Tile | None],
    context: Context | None = None,
) -> Call:
    """All layers as one call, operations of these names cut by these tiles; attention where there is a context."""
    attend = None if context is None else _attention_of(inputs, context)

    def run() -> Tensor:
        here = inputs
        for layer in layers:
            for operation in OPERATIONS:
                launcher, arguments = _launch(shape, operation, layer, here, layer.planes)
                result = launcher(*arguments, tile=tiles.get(operation), counters=layer.counters)
                if isinstance(result, ScaledRows):
                    here = here._replace(x=result.x_TD, scaled=result.scaled_TD, squares=result.squares_TS)
                elif operation == "heads":
                    here = here._replace(heads=(result if attend is None else attend(layer, result)).flatten(1))
                else:
                    here = here._replace(inside=result)
        return here.x

    return run


def _attention_of(inputs: Inputs, context: Context) -> Callable[[Layer, Tensor], Tensor]:
    """Attention over blocks of every request's own, in order."""
    device, num_requests = inputs.x.device, context.num_requests
    num_rows = inputs.x.shape[0] // num_requests
    each = -(-context.num_positions // _BLOCK_SIZE)
    assert num_rows * num_requests == inputs.x.shape[0] and num_requests * each <= _BLOCKS, "rows and blocks suffice"
    table = torch.zeros(num_requests + 1, 1024 // _BLOCK_SIZE, dtype=torch.int32, device=device)
    table[:num_requests, :each] = torch.arange(num_requests * each, device=device).view(num_requests, each)
    slots_B = torch.arange(num_requests, device=device)
    starts_B = torch.full_like(slots_B, context.num_positions - num_rows)
    options = {"launch": context.launch, "arrivals": new_arrivals(device)}

    def attend(layer: Layer, q_RNH: Tensor) -> Tensor:
        q_BTNH = q_RNH.unflatten(0, (num_requests, num_rows))
        scale, pages = q_RNH.shape[2] ** -0.5, layer.planes
        none = (None, None, None, True, None)  # no tail, no first position, no window; causal; no sink
        if device.type == "cpu":  # whose interpreter does not count turns
            return paged_attention(q_BTNH, pages, table, slots_B, starts_B, scale=scale).flatten(0, 1)
        y_BTNH = paged_attention_triton(q_BTNH, pages, table, slots_B, starts_B, *none, scale, **options)
        return y_BTNH.flatten(0, 1)

    return attend


def chosen_tile(name: str, shape: Shape, num_rows: int) -> Tile:
    """The cut that an operation takes by itself."""
    whole_head = shape.head_size if shape.has_qk_norm else 32
    return choose_tile(num_rows, *shape.sizes[name], least_outputs={"heads": whole_head, "gated": 32}.get(name, 16))


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
        if (width % block and width > 1024) or not least <= num_programs <= (800 if parts == 1 else 540):
            continue
        if turns < 2 or output * block > 16384 or (parts > 1 and num_outputs // output >= 120):
            continue
        most = max(3, min(turns, 1 + 210_000 // resident // per_stage, 12))
        for stages in sorted({most, max(3, min(turns, 1 + 108_000 // resident // per_stage))}):
            for warps in (4, 8) if output * block >= 8192 else (4,):
                if (stages - 1) * per_stage < 220_000:
                    yield Tile(output, block, parts, warps, stages)


def sliced_tiles(name: str, shape: Shape) -> Iterator[Tile]:
    """Cuts whose blocks are divided among warps, for small weights and up to 16 rows."""
    num_outputs, width = shape.sizes[name]
    whole_head = name == "heads" and shape.has_qk_norm
    outputs = (shape.head_size,) if whole_head else (16, 32, 64) if name in ("heads", "gated") else (8, 16, 32)
    for output, block, parts, slices in itertools.product(outputs, (64, 128, 256, 512), (1, 2), (2, 4, 8)):
        turns = -(-width // (block * parts))
        per_stage = 2 * block * (output + 16)
        if block // slices < 16 or block >= 2 * width or (parts > 1 and num_outputs // output >= 90):
            continue
        stages = max(2, min(turns + 1, 7, 1 + 100_000 // per_stage))
        if (stages - 1) * per_stage < 110_000:
            yield Tile(output, block, parts, 8 if slices == 8 else 4, stages, _AHEAD, slices)


def _bound(function: Callable[..., Tensor], *arguments: object) -> Call:
    return lambda: function(*arguments)
