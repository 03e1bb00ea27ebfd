"""The product of few rows with a weight, as the fused operations of a layer use it: x @ W^T, summed in float32.

With at most 64 rows such a product is bound by reading the weight. So a program takes a run of outputs, keeps several
tiles of the weight in flight, and holds all rows in one tile; what comes behind (rotation, activation, residual)
happens in the same launch. Nothing is computed on the way from memory to the matrix units. A norm before a product is
therefore prepared by whoever writes the rows (`ScaledRows`): they come multiplied with its gain, and with their squares
summed, and the norm's row factor f multiplies the sums: x * f * gain @ W^T = f * ((x * gain) @ W^T).

Where there are too few runs of outputs to fill the multiprocessors, several programs share one: each leaves its part of
the sums in a workspace, and whoever arrives last adds them in the order of the parts, so that results do not depend on
who that is. T rows, I in, O out, S partial sums of squares.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import dependent_launch, kernel, next_begins, tl, triton

LARGEST_ROWS: Final = 64  # in one tile; above, products are bound by arithmetic and left to the library
NUM_COUNTERS: Final = 4096  # runs of outputs that several programs may share, in one launch
_NUM_PROCESSORS: Final = 132
_FEW_PROGRAMS: Final = 96  # from here on, tiles in flight make up for processors that have no program
_SMALLEST_BLOCK: Final = 64
_SHARED_BYTES: Final = 108_000  # of a multiprocessor, for tiles in flight: half, so that the next launch finds room
_SMALL_BYTES: Final = 8_000_000  # of a weight whose launches begin early: what fills the memory's bandwidth has none
_LEAST_SLICE: Final = 16
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
    """

    outputs: int
    block: int
    parts: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0
    slices: int = 1
    is_held: bool = False


class ScaledRows(NamedTuple):
    """Rows of the residual stream, prepared for the norm and product that come next.

    Attributes:
        x_TD: the rows.
        scaled_TD: rows times the norm's gain, rounded.
        squares_TS: float32, sums of squares of `x_TD`, in parts.
    """

    x_TD: Tensor
    scaled_TD: Tensor
    squares_TS: Tensor


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
    is_few, is_small = padded_rows(num_rows) == 16, _is_small(num_outputs, width)
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


def _is_small(num_outputs: int, width: int) -> bool:
    return 2 * num_outputs * width <= _SMALL_BYTES


def padded_rows(num_rows: int) -> int:
    """Rows of the tile that holds `num_rows`."""
    return max(16, int(triton.next_power_of_2(num_rows)))


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


def launch_options(tile: Tile, x_TI: Tensor, weight_OI: Tensor, *, num_halves: int = 1) -> dict[str, Any]:
    """What every kernel around `product_of_run` is launched with.

    Args:
        tile: how the product is cut.
        x_TI: the rows.
        weight_OI: the weight.
        num_halves: 2 for a pair of runs.
    """
    num_rows, width = x_TI.shape
    outputs = tile.outputs // num_halves
    part = triton.cdiv(triton.cdiv(width, tile.block), tile.parts) * tile.block
    is_whole = tile.slices == 1 or tile.is_held or tile.block // tile.slices >= _LEAST_SLICE
    assert is_whole, "a slice is at least what one step of the matrix units takes"
    block, rest = tile.block, 0
    if tile.is_held:
        assert tile.parts == 1 and tile.slices > 1, "a held weight is divided among warps alone"
        part = triton.cdiv(width, 8 * tile.slices) * 8  # of a slice, whole steps of 16 bytes
        rest = 0 if block >= part else max(16, int(triton.next_power_of_2(part - block)))
    chunks = max(1, 32 * tile.warps // outputs)  # so that each thread asks for another piece
    per_row = min(part, width, tile.ahead // (x_TI.element_size() * tile.outputs))
    is_dependent = _is_small(*weight_OI.shape) and dependent_launch(num_rows)
    return {
        "WIDTH": width,
        "PART": part,
        "PARTS": tile.parts,
        "ROWS": padded_rows(num_rows),
        "OUTPUTS": outputs,
        "BLOCK": block,
        "REST": rest,
        "IS_HELD": tile.is_held,
        "CHUNKS": chunks,
        "CHUNK": per_row // chunks // 8 * 8 if width % 8 == 0 and not tile.is_held else 0,  # in steps of 16 bytes
        "SLICES": tile.slices,
        "BEGINS": next_begins(is_small=False) if is_dependent else 0,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **({"launch_pdl": True} if is_dependent else {}),
    }


def check_product(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    squares_TS: Tensor | None = None,
    *,
    holds_any_number: bool | None = None,
) -> None:
    """Refuse what does not fit.

    Args:
        x_TI: rows.
        weight_OI: the weight.
        bias_O: its bias.
        squares_TS: of a norm before.
        holds_any_number: of rows, as references do; by default on a CPU.
    Raises:
        ShapeError: widths differ, or there are more rows than the kernel holds on the device that would run it.
    """
    if x_TI.dim() != 2 or weight_OI.shape[1] != x_TI.shape[1]:
        raise ShapeError("weight", expected=f"[O, {x_TI.shape[-1]}]", found=weight_OI.shape)
    if bias_O is not None and bias_O.shape != weight_OI.shape[:1]:
        raise ShapeError("bias", expected=weight_OI.shape[:1], found=bias_O.shape)
    if squares_TS is not None and squares_TS.shape[:1] != x_TI.shape[:1]:
        raise ShapeError("squares", expected=f"[{x_TI.shape[0]}, S]", found=squares_TS.shape)
    if holds_any_number is None:
        holds_any_number = x_TI.device.type == "cpu"
    if not holds_any_number and x_TI.shape[0] > LARGEST_ROWS:
        raise ShapeError("rows", expected=f"[at most {LARGEST_ROWS}, {x_TI.shape[1]}]", found=x_TI.shape)


def multiply_reference(x_TI: Tensor, weight_OI: Tensor, squares_TS: Tensor | None, eps: float) -> Tensor:
    """float32 [T, O]: the sums of a product, times the norm's factor where there are squares."""
    sums_TO = x_TI.float() @ weight_OI.float().T
    if squares_TS is None:
        return sums_TO
    return sums_TO * torch.rsqrt(squares_TS.sum(-1, keepdim=True) / x_TI.shape[-1] + eps)


@kernel
def _prefetch(
    weight_ptr: tl.tensor, output: tl.tensor, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    # Asks for the beginning of weight rows in the L2 cache; nothing is waited for.
    NUM_BYTES: tl.constexpr = CHUNK * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    address = (weight_ptr + output[:, None] * WIDTH + (tl.arange(0, CHUNKS) * CHUNK)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full(address.shape, NUM_BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@kernel
def _hold(
    weight_ptr: tl.tensor,
    output: tl.tensor,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    SLICES: tl.constexpr,
) -> tl.tensor:
    # [SLICES, SIZE, OUTPUTS], of each slice the inputs from FIRST on. They go to shared memory as they come.
    within = FIRST + tl.arange(0, SIZE)[None, :, None]
    start = (tl.arange(0, SLICES) * PART)[:, None, None]
    is_input = (within < PART) & (start + within < WIDTH)
    return tl.load(weight_ptr + output[None, None, :] * WIDTH + start + within, mask=is_input, other=0.0)


@kernel
def begin_run(
    weight_ptr: tl.tensor,
    output: tl.tensor,
    other_output: tl.tensor,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    SLICES: tl.constexpr,
    IS_HELD: tl.constexpr,
    IS_PAIR: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BEGINS: tl.constexpr,
) -> tl.tensor:
    """Wait for the launch ahead, where this one may begin before that has ended; the weight is asked for meanwhile.

    The weight is constant. All else may be an earlier launch's to write, or to read, until the wait is over. So the
    launch behind may begin at any time; it cannot get before what the pass began with, which lets nobody begin before
    its own wait is over. Begun at once, launches that wait pile up until they fill the multiprocessors; begun behind
    the wait, one waits at a time. What the end of a kernel needs is best read right behind the wait: it arrives while
    the product runs.

    Args:
        weight_ptr: [outputs, WIDTH].
        output: int64 [OUTPUTS], rows of the weight.
        other_output: as many more, for a pair.
        WIDTH: I.
        PART: inputs per part, or per slice where the weight is held.
        BLOCK: inputs of a slice that are held in one piece, as REST are in another.
        REST: see BLOCK.
        SLICES: of the tile.
        IS_HELD: whether the whole weight of a program is read here.
        IS_PAIR: whether there are two runs.
        CHUNKS: pieces of each weight row that are asked for.
        CHUNK: inputs of a piece.
        BEGINS: from `dispatch.next_begins`, 0 where launches follow each other.
    Returns:
        What is held, for `product_of_run`: both pieces of a run, and of the other.
    """
    if BEGINS == 1:
        tl.extra.cuda.gdc_launch_dependents()
    held, held_rest, other_held, other_rest = 0, 0, 0, 0
    if IS_HELD:
        held = _hold(weight_ptr, output, WIDTH, PART, 0, BLOCK, SLICES)
        if REST > 0:
            held_rest = _hold(weight_ptr, output, WIDTH, PART, BLOCK, REST, SLICES)
        if IS_PAIR:
            other_held = _hold(weight_ptr, other_output, WIDTH, PART, 0, BLOCK, SLICES)
            if REST > 0:
                other_rest = _hold(weight_ptr, other_output, WIDTH, PART, BLOCK, REST, SLICES)
    if BEGINS > 0:
        if CHUNK > 0:
            first = tl.minimum(tl.program_id(1) * PART, WIDTH - CHUNKS * CHUNK)
            _prefetch(weight_ptr + first, output, WIDTH, CHUNKS, CHUNK)
            if IS_PAIR:
                _prefetch(weight_ptr + first, other_output, WIDTH, CHUNKS, CHUNK)
        tl.extra.cuda.gdc_wait()
        if BEGINS == 2:
            tl.extra.cuda.gdc_launch_dependents()
    return held, held_rest, other_held, other_rest


@kernel
def load_squares(
    squares_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_squares: tl.tensor,
    ROWS: tl.constexpr,
    SQUARES: tl.constexpr,
) -> tl.tensor:
    """[ROWS, SQUARES] sums of squares. They are only added behind the product: adding waits for them to arrive."""
    row, part = tl.arange(0, ROWS), tl.arange(0, SQUARES)
    is_cell = (row < num_rows)[:, None] & (part < num_squares)[None, :]
    return tl.load(squares_ptr + row[:, None] * num_squares + part[None, :], mask=is_cell, other=0.0)


@kernel
def norm_factor(squares: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """[ROWS, 1] factors of a norm from `load_squares`, added in one fixed order."""
    return tl.rsqrt(tl.sum(squares, axis=1) / WIDTH + eps)[:, None]


@kernel
def _added_slices(batch: tl.tensor, other_batch: tl.tensor, IS_PAIR: tl.constexpr) -> tl.tensor:
    # Both runs at once: what is added across warps waits for all of them.
    if IS_PAIR:
        sums, other_sums = tl.split(tl.sum(tl.join(batch, other_batch), axis=0))
    else:
        sums = tl.sum(batch, axis=0)
        other_sums = sums
    return sums, other_sums


@kernel
def _sums_of_slices(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output: tl.tensor,
    other_output: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PAIR: tl.constexpr,
    SLICES: tl.constexpr,
) -> tl.tensor:
    # Products of a batch of slices go to different warps, which add their sums up once, at the end, in order.
    SLICE: tl.constexpr = BLOCK // SLICES
    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[None, :, None]
    first = (tl.arange(0, SLICES) * SLICE)[:, None, None]
    x_column = first + tl.arange(0, SLICE)[None, None, :]
    column = first + tl.arange(0, SLICE)[None, :, None]
    sums = tl.zeros([SLICES, ROWS, OUTPUTS], dtype=tl.float32)
    other_sums = tl.zeros([SLICES, ROWS, OUTPUTS], dtype=tl.float32)
    x_at = x_ptr + row.to(tl.int64)[None, :, None] * WIDTH + x_column
    weight_at = weight_ptr + output[None, None, :] * WIDTH + column
    other_at = weight_ptr + other_output[None, None, :] * WIDTH + column
    for done in range(0, PART, BLOCK):
        if IS_WHOLE:
            x = tl.load(x_at + done, mask=is_row, other=0.0)
            weight = tl.load(weight_at + done)
        else:
            x = tl.load(x_at + done, mask=is_row & (x_column < num_inputs - done), other=0.0)
            weight = tl.load(weight_at + done, mask=column < num_inputs - done, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
        if IS_PAIR:
            if IS_WHOLE:
                other_weight = tl.load(other_at + done)
            else:
                other_weight = tl.load(other_at + done, mask=column < num_inputs - done, other=0.0)
            other_sums = tl.dot(x, other_weight, other_sums, input_precision="ieee")
    return _added_slices(sums, other_sums, IS_PAIR)


@kernel
def _rows_of_slices(
    x_ptr: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    SLICES: tl.constexpr,
) -> tl.tensor:
    # [SLICES, ROWS, SIZE], what `_hold` is multiplied with.
    row = tl.arange(0, ROWS)[None, :, None]
    within = FIRST + tl.arange(0, SIZE)[None, None, :]
    start = (tl.arange(0, SLICES) * PART)[:, None, None]
    is_input = (within < PART) & (start + within < WIDTH)
    return tl.load(x_ptr + row.to(tl.int64) * WIDTH + start + within, mask=is_input & (row < num_rows), other=0.0)


@kernel
def product_of_run(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    output: tl.tensor,
    other_output: tl.tensor,
    held: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    IS_PAIR: tl.constexpr,
    SLICES: tl.constexpr,
    IS_HELD: tl.constexpr,
    BEGINS: tl.constexpr,
) -> tl.tensor:
    """Sums of two runs of outputs, in a grid of (runs, parts), after `begin_run`.

    Args:
        x_ptr: [rows, WIDTH].
        weight_ptr: [outputs, WIDTH].
        parts_ptr: from `new_parts`.
        counter_ptr: from `new_counters`.
        output: int64 [OUTPUTS], rows of the weight, all of which exist.
        other_output: as many more, read for a pair.
        held: from `begin_run`.
        num_rows: at most ROWS.
        WIDTH: I.
        PART: inputs per part, whole blocks; those of the last parts may lie past the end.
        PARTS: of the tile, as OUTPUTS (of one half of a pair) and BLOCK are.
        ROWS: of the tile that holds them, at least 16.
        OUTPUTS: see PARTS.
        BLOCK: see PARTS.
        REST: as for `begin_run`.
        IS_PAIR: whether there are two runs.
        SLICES: of the tile.
        IS_HELD: as for `begin_run`.
        BEGINS: as for `begin_run`.
    Returns:
        Both sums, [ROWS, OUTPUTS], the second of no use without a pair; and whether this is the program that has them.
        Others have a part of the sums, and write nothing.
    """
    run, part = tl.program_id(0), tl.program_id(1)
    first = part * PART
    row = tl.arange(0, ROWS)
    if IS_HELD:
        x = _rows_of_slices(x_ptr, num_rows, WIDTH, PART, ROWS, 0, BLOCK, SLICES)
        x_rest = x
        if REST > 0:
            x_rest = _rows_of_slices(x_ptr, num_rows, WIDTH, PART, ROWS, BLOCK, REST, SLICES)
        batch = tl.dot(x, held[0], input_precision="ieee")
        if REST > 0:
            batch = tl.dot(x_rest, held[1], batch, input_precision="ieee")
        other_batch = batch
        if IS_PAIR:
            other_batch = tl.dot(x, held[2], input_precision="ieee")
            if REST > 0:
                other_batch = tl.dot(x_rest, held[3], other_batch, input_precision="ieee")
        sums, other_sums = _added_slices(batch, other_batch, IS_PAIR)
    elif SLICES > 1:
        sums, other_sums = _sums_of_slices(
            x_ptr + first,
            weight_ptr + first,
            output,
            other_output,
            num_rows,
            WIDTH - first,
            WIDTH,
            PART,
            WIDTH == PART * PARTS,
            ROWS,
            OUTPUTS,
            BLOCK,
            IS_PAIR,
            SLICES,
        )
    else:
        column = tl.arange(0, BLOCK)
        is_row = (row < num_rows)[:, None]
        sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        other_sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
        x_at = x_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        weight_at = weight_ptr + output[None, :] * WIDTH + column[:, None]
        other_at = weight_ptr + other_output[None, :] * WIDTH + column[:, None]
        for done in range(0, PART, BLOCK):
            start = first + done
            if WIDTH == PART * PARTS:
                x = tl.load(x_at + start, mask=is_row, other=0.0)
                weight = tl.load(weight_at + start)
            else:
                is_input = start + column < WIDTH
                x = tl.load(x_at + start, mask=is_row & is_input[None, :], other=0.0)
                weight = tl.load(weight_at + start, mask=is_input[:, None], other=0.0)
            sums = tl.dot(x, weight, sums, input_precision="ieee")
            if IS_PAIR:
                if WIDTH == PART * PARTS:
                    other_weight = tl.load(other_at + start)
                else:
                    other_weight = tl.load(other_at + start, mask=(start + column < WIDTH)[:, None], other=0.0)
                other_sums = tl.dot(x, other_weight, other_sums, input_precision="ieee")
    if BEGINS == 3:
        tl.extra.cuda.gdc_launch_dependents()
    is_last = True
    if PARTS > 1:
        SIZE: tl.constexpr = ROWS * OUTPUTS
        RUNS: tl.constexpr = 2 if IS_PAIR else 1
        cell = row[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        at = parts_ptr + (run * PARTS + part).to(tl.int64) * (RUNS * SIZE)
        tl.store(at + cell, sums)
        if IS_PAIR:
            tl.store(at + SIZE + cell, other_sums)
        tl.debug_barrier()  # the counter is moved by one thread, for all
        is_last = tl.atomic_add(counter_ptr + run, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
            other_sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
            for index in tl.static_range(PARTS):
                at = parts_ptr + (run * PARTS + index).to(tl.int64) * (RUNS * SIZE)
                sums += tl.load(at + cell, cache_modifier=".cg")
                if IS_PAIR:
                    other_sums += tl.load(at + SIZE + cell, cache_modifier=".cg")
            tl.store(counter_ptr + run, 0)
    return sums, other_sums, is_last
