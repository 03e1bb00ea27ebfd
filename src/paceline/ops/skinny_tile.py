"""How a product of few rows is cut (`skinny_product.py`): as measured for sizes that matter, by a rule for all others.

T rows, I in, O out.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from paceline.ops.dispatch import triton

LARGEST_ROWS: Final = 64  # in one tile; above, products are bound by arithmetic and left to the library
_NUM_PROCESSORS: Final = 132
_FEW_PROGRAMS: Final = 96  # from here on, tiles in flight make up for processors that have no program
_SMALLEST_BLOCK: Final = 64
_SHARED_BYTES: Final = 108_000  # of a multiprocessor, for tiles in flight: half, so that the next launch finds room
_SMALL_BYTES: Final = 8_000_000  # of a weight whose launches begin early: what fills the memory's bandwidth has none
_MOST_OUTPUTS_IN_SLICES: Final = 32  # of a program: with more, warps have tiles of their own
_AHEAD_BYTES: Final = 98_304  # of it, by a program


class Tile(NamedTuple):
    """How a product is cut.

    Attributes:
        outputs: weight rows per program, both halves of a pair counted.
        block: inputs per turn of the loop.
        parts: programs that share a run of outputs.
        warps: per program.
        stages: tiles of the loop in flight.
        ahead: bytes of the weight that a program asks for while the launch ahead still runs, at most.
        slices: of a block, each summed by warps of its own. Few rows and outputs make one short tile, whose steps along
            the inputs wait for each other; slices have a chain of steps each.
        is_held: a program reads its whole weight before it waits for the launch ahead; then slices are of all inputs.
    """

    outputs: int
    block: int
    parts: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    slices: int = 1
    is_held: bool = False


# Measured in chains of layers (`benchmarks/gpu_layers --tune`), by outputs and inputs: the 8B shape with 16 rows, and
# heads of the 135M shape that are normed whole.
_MEASURED: Final = {
    (960, 576): Tile(64, 64, 4, 4, 3, _AHEAD_BYTES),
    (6144, 4096): Tile(128, 64, 2, 4, 12),
    (4096, 4096): Tile(64, 256, 4, 4, 3),
    (24576, 4096): Tile(64, 128, 1, 4, 4),
    (4096, 12288): Tile(128, 128, 4, 4, 6),
}


def choose_tile(num_rows: int, num_outputs: int, width: int, *, least_outputs: int = 16) -> Tile:
    """A cut for a product with a weight of this size.

    Args:
        num_rows: T.
        num_outputs: O.
        width: I.
        least_outputs: of a program: what its end needs at once, such as a whole head that is normed; up to 32 halves
            do as well.
    """
    is_few, is_small = padded_rows(num_rows) == 16, is_small_weight(num_outputs, width)
    can_slice = is_few and is_small and least_outputs <= _MOST_OUTPUTS_IN_SLICES
    measured = _MEASURED.get((num_outputs, width))
    if measured is not None and is_few and measured.outputs >= least_outputs and not can_slice:
        return measured
    outputs = least_outputs
    while outputs < 64 and num_outputs // (2 * outputs) >= _FEW_PROGRAMS:
        outputs *= 2
    # A block that divides the width needs no masks.
    block = min(256, max(_SMALLEST_BLOCK, 16384 // outputs), max(_SMALLEST_BLOCK, width & -width))
    if not is_few:
        block = min(block, 128)
    slices = 1
    if can_slice and outputs <= _MOST_OUTPUTS_IN_SLICES:
        block, slices = max(block, 128), 4
        if triton.cdiv(2 * num_outputs, outputs) <= _NUM_PROCESSORS:
            outputs //= 2  # each program still finds a multiprocessor of its own
    num_runs, turns = triton.cdiv(num_outputs, outputs), triton.cdiv(width, block)
    parts = 1
    while (
        num_runs < _FEW_PROGRAMS and 2 * parts * num_runs <= 3 * _NUM_PROCESSORS and turns >= 16 * parts and parts < 8
    ):
        parts *= 2
    resident = min(4, triton.cdiv(num_runs * parts, _NUM_PROCESSORS))
    bytes_per_stage = 2 * block * (outputs + padded_rows(num_rows))
    stages = max(3, min(9, triton.cdiv(turns, parts), 1 + _SHARED_BYTES // resident // bytes_per_stage))
    return Tile(outputs, block, parts, 4, stages, _AHEAD_BYTES if is_small else 0, slices)


def is_small_weight(num_outputs: int, width: int) -> bool:
    """Whether launches over such a weight leave bandwidth for those behind them, which may then begin early."""
    return 2 * num_outputs * width <= _SMALL_BYTES


def padded_rows(num_rows: int) -> int:
    """Rows of the tile that holds `num_rows`."""
    return max(16, int(triton.next_power_of_2(num_rows)))
