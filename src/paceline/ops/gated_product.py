"""The gate and up projections of many rows and the activation behind them, in one launch.

    y = silu(x Wg^T) * (x Wu^T)        summed and activated in float32, rounded once

The library's product writes both projections, twice as wide as what the next product reads, and a second launch reads
them again. Here a program takes tile after tile: rows by as many gates and their ups, which lie in one tile of the
weight seen as [2, I, D].

R rows, D width, I outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import HAS_TRITON, choose, kernel, tensor_descriptor, tl, triton
from paceline.ops.elementwise import sigmoid, widen
from paceline.ops.gated_activation import activate

_MULTIPROCESSORS = 132
_LEAST_ROWS = 512  # fewer were not measured, and fill tiles of 128 rows badly
_LEAST_BYTES = 64_000_000  # nor were smaller weights: the 135M shape's make fewer tiles than there are multiprocessors


class ProductTile(NamedTuple):
    """How the product is cut.

    Attributes:
        rows: of a tile.
        outputs: of a tile, each of which is a gate and an up.
        width: of a turn.
        warps: of a program.
        stages: turns on their way.
    """

    rows: int = 128
    outputs: int = 128
    width: int = 64
    warps: int = 8
    stages: int = 4


def gated_product_reference(x_RD: Tensor, gate_up_XD: Tensor, tile: ProductTile | None = None) -> Tensor:
    """The definition."""
    del tile
    gate_RI, up_RI = functional.linear(widen(x_RD), widen(gate_up_XD)).chunk(2, dim=-1)
    return (gate_RI * sigmoid(gate_RI) * up_RI).to(x_RD.dtype)


@kernel
def _gated_product_kernel(
    x_rows: tl.tensor,
    weight_tiles: tl.tensor,
    y_rows: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    tiles_of_rows = tl.cdiv(num_rows, ROWS)
    num_tiles = tiles_of_rows * tl.cdiv(num_outputs, OUTPUTS)
    # Programs at work together share few tiles of the weight: all rows stay in the L2 cache.
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        row, output = (tile % tiles_of_rows) * ROWS, (tile // tiles_of_rows) * OUTPUTS
        sums = tl.zeros([ROWS, 2 * OUTPUTS], dtype=tl.float32)
        for turn in range(0, tl.cdiv(width, WIDTH)):
            x = x_rows.load([row, turn * WIDTH])
            weight = weight_tiles.load([0, output, turn * WIDTH]).reshape(2 * OUTPUTS, WIDTH)
            sums = tl.dot(x, weight.T, sums, input_precision="ieee")
        gate, up = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, OUTPUTS)), (0, 2, 1)))
        y = activate(gate, up, 1.0, 1.0, False, False)
        y_rows.store([row, output], y.to(y_rows.dtype))


def gated_product_triton(x_RD: Tensor, gate_up_XD: Tensor, tile: ProductTile | None = None) -> Tensor:
    """Launch one program per multiprocessor."""
    tile = tile or ProductTile()
    num_rows, width = x_RD.shape
    num_outputs = gate_up_XD.shape[0] // 2
    y_RI = torch.empty(num_rows, num_outputs, dtype=x_RD.dtype, device=x_RD.device)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
    with torch.cuda.device_of(x_RD):
        _gated_product_kernel[min(num_tiles, _MULTIPROCESSORS),](
            tensor_descriptor(x_RD.contiguous(), [tile.rows, tile.width]),
            tensor_descriptor(gate_up_XD.view(2, num_outputs, width), [2, tile.outputs, tile.width]),
            tensor_descriptor(y_RI, [tile.rows, tile.outputs]),
            num_rows,
            num_outputs,
            width,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            WIDTH=tile.width,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return y_RI


def takes_one_launch(x_RD: Tensor, gate_up_XD: Tensor) -> bool:
    """Whether one launch is faster than the library's product and another for the activation.

    With the 8B shape's weights, at 512 rows and 2,048, chains of layers are 6 to 7 % faster on an H200
    (`benchmarks.gpu_many_rows --operations gate-up chain`): less is moved on a chip that is bound by its power.
    """
    if not HAS_TRITON or x_RD.device.type != "cuda" or x_RD.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(x_RD.device)[0] == 9 and _is_large(x_RD, gate_up_XD)


def _is_large(x_RD: Tensor, gate_up_XD: Tensor) -> bool:
    tile = ProductTile()
    is_aligned = x_RD.shape[1] % tile.width == 0 and gate_up_XD.shape[0] % (2 * tile.outputs) == 0
    num_bytes = gate_up_XD.numel() * gate_up_XD.element_size()
    return is_aligned and x_RD.shape[0] >= _LEAST_ROWS and num_bytes >= _LEAST_BYTES


def gated_product(x_RD: Tensor, gate_up_XD: Tensor, *, tile: ProductTile | None = None) -> Tensor:
    """Project rows to gates and ups and multiply the activated gates with the ups.

    Args:
        x_RD: rows; D a multiple of 8.
        gate_up_XD: contiguous, in the rows' dtype; I gates, then I ups, I a multiple of 8.
        tile: None takes the one that is used by default.
    Returns:
        [R, I] in the rows' dtype.
    Raises:
        ShapeError: the weight does not fit the rows.
    """
    if gate_up_XD.shape[1] != x_RD.shape[1] or gate_up_XD.shape[0] % 2:
        raise ShapeError("gate_up", expected=f"[an even number, {x_RD.shape[1]}]", found=gate_up_XD.shape)
    if x_RD.shape[0] == 0:
        return gated_product_reference(x_RD, gate_up_XD)
    run = choose("gated_product", x_RD, gated_product_reference, gated_product_triton)
    return run(x_RD, gate_up_XD, tile)
