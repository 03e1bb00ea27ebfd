"""What the operations around a product of few rows launch alike: grid, workspace, constants (`skinny_product.py`).

Their kernels begin with the same parameters (`SkinnyLaunch.operands`) and have the same ones between their outputs and
their own numbers (`SkinnyLaunch.workspace`).
T rows, I in, O out, S partial sums of squares.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from paceline.ops.dispatch import dependent_launch, next_begins, triton
from paceline.ops.skinny_tile import Tile, is_small_weight, padded_rows

NUM_COUNTERS: Final = 4096  # runs of outputs that several programs may share, in one launch
_LEAST_SLICE: Final = 16


class Cut(NamedTuple):
    """How a kernel's product is cut: its constant CUT.

    Attributes:
        width: I.
        part: inputs per part, whole blocks; those of the last parts may lie past the end. Where the weight is held,
            inputs per slice.
        parts: programs that share a run of outputs.
        rows: of the tile that holds them, at least 16.
        outputs: of a run.
        block: inputs per turn of the loop; of a held slice, those in one piece, as `rest` are in another.
        rest: see `block`.
        slices: of a block, or of all inputs where the weight is held.
        is_held: whether the whole weight of a program is read before the wait for the launch ahead.
        is_pair: whether a program has two runs.
        chunks: pieces of each weight row that are asked for early.
        chunk: inputs of such a piece; 0 asks for nothing.
        begins: from `dispatch.next_begins`, 0 where launches follow each other.
    """

    width: int
    part: int
    parts: int
    rows: int
    outputs: int
    block: int
    rest: int
    slices: int
    is_held: bool
    is_pair: bool
    chunks: int
    chunk: int
    begins: int


class SkinnyLaunch(NamedTuple):
    """The common part of a launch.

    Attributes:
        grid: runs of outputs, and parts.
        operands: rows, sums of squares, weight, bias; in place of what is missing the rows, which are not read as such.
        workspace: sums of the parts, counters, T, S.
        constants: CUT, what there is of squares and bias, and the options of the launch.
    """

    grid: tuple[int, int]
    operands: tuple[Tensor, Tensor, Tensor, Tensor]
    workspace: tuple[Tensor, Tensor, int, int]
    constants: dict[str, Any]


def skinny_launch(
    tile: Tile,
    num_runs: int,
    x_TI: Tensor,
    squares_TS: Tensor | None,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    counters: Tensor | None,
    *,
    is_pair: bool = False,
) -> SkinnyLaunch:
    """Prepare a launch.

    Args:
        tile: how the product is cut.
        num_runs: of outputs, each of a pair where there are pairs.
        x_TI: the rows, contiguous.
        squares_TS: of a norm before.
        weight_OI: the weight.
        bias_O: its bias.
        counters: from `new_counters`; None makes them where they are needed.
        is_pair: whether a program has two runs of outputs.
    """
    num_rows = x_TI.shape[0]
    num_squares = 0 if squares_TS is None else squares_TS.shape[1]
    is_dependent = is_small_weight(*weight_OI.shape) and dependent_launch(num_rows)
    constants: dict[str, Any] = {
        "SQUARES": triton.next_power_of_2(max(1, num_squares)),
        "HAS_SQUARES": num_squares > 0,
        "HAS_BIAS": bias_O is not None,
        "CUT": make_cut(tile, x_TI, is_pair=is_pair, is_dependent=is_dependent),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if is_dependent:
        constants["launch_pdl"] = True
    return SkinnyLaunch(
        (num_runs, tile.parts),
        (x_TI, x_TI if squares_TS is None else squares_TS, weight_OI, x_TI if bias_O is None else bias_O),
        (*new_parts(tile, num_runs, x_TI, counters), num_rows, num_squares),
        constants,
    )


def make_cut(tile: Tile, x_TI: Tensor, *, is_pair: bool, is_dependent: bool) -> Cut:
    """The constant CUT for these rows.

    Args:
        tile: how the product is cut.
        x_TI: the rows.
        is_pair: whether a program has two runs of outputs.
        is_dependent: whether the launch may begin before the one ahead has ended.
    """
    num_rows, width = x_TI.shape
    outputs = tile.outputs // 2 if is_pair else tile.outputs
    part = triton.cdiv(triton.cdiv(width, tile.block), tile.parts) * tile.block
    is_whole = tile.slices == 1 or tile.is_held or tile.block // tile.slices >= _LEAST_SLICE
    assert is_whole, "a slice is at least what one step of the matrix units takes"
    rest = 0
    if tile.is_held:
        assert tile.parts == 1 and tile.slices > 1, "a held weight is divided among warps alone"
        part = triton.cdiv(width, 8 * tile.slices) * 8  # of a slice, whole steps of 16 bytes
        rest = 0 if tile.block >= part else max(16, int(triton.next_power_of_2(part - tile.block)))
    chunks = max(1, 32 * tile.warps // outputs)  # so that each thread asks for another piece
    per_row = min(part, width, tile.ahead // (x_TI.element_size() * tile.outputs))
    return Cut(
        width=width,
        part=part,
        parts=tile.parts,
        rows=padded_rows(num_rows),
        outputs=outputs,
        block=tile.block,
        rest=rest,
        slices=tile.slices,
        is_held=tile.is_held,
        is_pair=is_pair,
        chunks=chunks,
        chunk=per_row // chunks // 8 * 8 if width % 8 == 0 and not tile.is_held else 0,  # in steps of 16 bytes
        begins=next_begins(is_small=False) if is_dependent else 0,
    )


def new_counters(device: torch.device) -> Tensor:
    """int32 zeros, one for each run of outputs of a launch. Every launch leaves zeros; it may be used by the next."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def new_parts(tile: Tile, num_runs: int, x_TI: Tensor, counters: Tensor | None) -> tuple[Tensor, Tensor]:
    """A launch's workspace: float32 for the sums of every part, and counters."""
    if tile.parts == 1:
        return x_TI, x_TI  # neither is touched
    assert num_runs <= NUM_COUNTERS, "a product of that many outputs needs no parts"
    size = num_runs * tile.parts * padded_rows(x_TI.shape[0]) * tile.outputs
    parts = _new_floats(size, x_TI.device)
    return parts, new_counters(x_TI.device) if counters is None else counters


def _new_floats(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)
