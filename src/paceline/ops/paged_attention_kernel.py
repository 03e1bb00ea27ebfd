"""The kernel of `paged_attention`: one program per tile of packed rows, key/value head and part of a context.

The rows of the G query heads that share a key/value head lie in one tile, so each key is read once for all of them. A
turn of the loop takes some tens of keys, each from where the table says, or from the tail. How many of the programs of
a context have work follows from its length, read on the device: short contexts are one program's, which writes what it
found. Where several share one, each leaves its sums behind, and the last to arrive joins them, always in the same
order, so that a repetition gives the same bits.

B requests, T rows of each, N query heads, M key/value heads (N = M * G), H head size, J blocks of a table's row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import dependent_launch, kernel, next_begins, tl, triton

_FEWEST = 16  # the smallest side of a matrix product on tensor cores
_MOST_QUERIES = 128  # packed rows of a tile
_MOST_SUMS = 128 * 128  # of a tile, in registers; a quarter of them where products are not those of tensor cores
_MULTIPROCESSORS = 132
_MANY = 256  # programs, none of which shares a context
_MOST_PARTS = 32
_MOST_JOINED = 2**17  # sums that the last to arrive reads
_MOST_KEYS, _TURN_BYTES = 128, 2**14  # of keys in a turn, and as much of values
_STAGES = 3  # turns on their way: with more, a multiprocessor has shared memory for one program only
_SHARED_BYTES = 96 * 1024
_MOST_JOIN_STAGES = 8  # parts whose sums are on their way
_MOST_EARLY = 1024  # channels of a row: a launch of more, begun early, takes the memory from the one ahead
_NO_WINDOW = 2**30
_NUM_ARRIVALS = 2**16


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched for a shape.

    Attributes:
        queries: packed rows of a tile.
        keys: of a turn.
        warps: of a program.
        stages: turns whose keys and values are on their way.
        least_turns: of a part.
        alone_turns: contexts of up to so many are not shared: handing sums over takes longer.
        wanted: programs that fill the GPU.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    least_turns: int = 1
    alone_turns: int = 3
    wanted: int = 256


@kernel
def _paged_attention_kernel(
    q_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    start_ptr: tl.tensor,
    tail_ptr: tl.tensor,
    first_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    num_columns: tl.tensor,
    q_request_stride: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    window: tl.tensor,
    least_turns: tl.tensor,
    alone_turns: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    JOIN_STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_FIRSTS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BEGINS: tl.constexpr,
) -> None:
    if BEGINS == 1:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the latest rows see most, so they come first
    request, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    part = tl.program_id(2)
    start = tl.load(start_ptr + request).to(tl.int32)
    table_at = table_ptr + tl.load(slot_ptr + request) * num_columns
    first = 0
    if HAS_FIRSTS:
        first = tl.load(first_ptr + request).to(tl.int32)

    # What the tile sees: from the first key of its first row on to the last of its last row.
    first_row, last_row = tile * QUERIES // GROUP, (tile * QUERIES + QUERIES - 1) // GROUP
    lowest = tl.maximum(first, start + first_row - window + 1)
    end = start + num_rows
    if not HAS_TAIL:
        end = tl.minimum(end, start + last_row + 1)
    key, num_turns, num_active = lowest + tl.arange(0, KEYS), tl.cdiv(end - lowest, KEYS), 1
    if IS_SHARED:
        turns_per_part = num_turns
        if num_turns > alone_turns:
            turns_per_part = tl.maximum(tl.cdiv(num_turns, tl.num_programs(2)), least_turns)
        num_active = tl.cdiv(num_turns, turns_per_part)
        if part >= num_active:
            return
        key += part * turns_per_part * KEYS
        num_turns = tl.minimum((part + 1) * turns_per_part, num_turns) - part * turns_per_part
    end_cached = tl.minimum(num_columns * PAGE, end)
    if HAS_TAIL:
        end_cached = tl.minimum(end_cached, start)
    block = tl.load(table_at + key // PAGE, mask=key < end_cached, other=0)
    plane = num_blocks.to(tl.int64) * (PAGE * HEAD)
    cached_keys, cached_values = planes_ptr + head * plane, planes_ptr + (KV_HEADS + head) * plane
    # Keys of earlier passes have been there for long. Those of this one, like the queries, are the kernel ahead's.
    for turn in tl.static_range(FETCHED):
        old_key = key + turn * KEYS
        is_old = (old_key < tl.minimum(end_cached, start)) & (turn < num_turns)
        old_block = tl.load(table_at + old_key // PAGE, mask=is_old, other=0)
        offset = (old_block.to(tl.int64) * PAGE + old_key % PAGE) * HEAD
        for at in tl.static_range(0, HEAD, 64):
            _fetch_ahead(cached_keys + offset + at, is_old)
            _fetch_ahead(cached_values + offset + at, is_old)
    if BEGINS > 0:
        tl.extra.cuda.gdc_wait()
        if BEGINS == 2:
            tl.extra.cuda.gdc_launch_dependents()

    channel = tl.arange(0, CHANNELS)
    is_channel = channel < HEAD
    query = tile * QUERIES + tl.arange(0, QUERIES)
    is_query = query < num_rows * GROUP
    row = query // GROUP
    q_at = q_ptr + request.to(tl.int64) * q_request_stride + head * GROUP * q_head_stride
    q_at += (row * q_row_stride + query % GROUP * q_head_stride)[:, None] + channel[None, :]
    q = tl.load(q_at, mask=is_query[:, None] & is_channel[None, :], other=0.0)
    position = start + row
    low = tl.maximum(first, position - window + 1)
    high = position
    if HAS_TAIL and not IS_CAUSAL:
        high = tl.minimum(position + window - 1, end - 1)
    tail_keys, tail_values = tail_ptr, tail_ptr
    if HAS_TAIL:
        tail_size = tl.num_programs(1) // KV_HEADS * num_rows
        tail_keys += (head * tail_size + request * num_rows - start).to(tl.int64) * HEAD
        tail_values = tail_keys + (KV_HEADS * tail_size).to(tl.int64) * HEAD

    # Scores that count for nothing lie far below this, which is finite: -inf - -inf is NaN.
    largest = tl.full([QUERIES], -1.0e29, dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    mixed = tl.zeros([QUERIES, CHANNELS], dtype=tl.float32)
    for _ in range(0, num_turns):
        # One turn ahead, so that where a key lies is known when it is asked for.
        next_key = key + KEYS
        next_block = tl.load(table_at + next_key // PAGE, mask=next_key < end_cached, other=0)
        offset = (block.to(tl.int64) * PAGE + key % PAGE) * HEAD
        keys_at, values_at = cached_keys + offset, cached_values + offset
        if HAS_TAIL:
            keys_at = tl.where(key < start, keys_at, tail_keys + key.to(tl.int64) * HEAD)
            values_at = tl.where(key < start, values_at, tail_values + key.to(tl.int64) * HEAD)
        is_key = key < end  # others hold anything, and 0 * NaN is NaN
        is_cell = is_key[:, None] & is_channel[None, :]
        k = tl.load(keys_at[:, None] + channel[None, :], mask=is_cell, other=0.0)
        v = tl.load(values_at[:, None] + channel[None, :], mask=is_cell, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where((key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None]), score, -1.0e30)
        raised = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp2(score - raised[:, None])
        kept = tl.exp2(largest - raised)
        total = total * kept + tl.sum(weight, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        largest, key, block = raised, next_key, next_block
    if BEGINS == 3:
        tl.extra.cuda.gdc_launch_dependents()

    is_last = True
    is_cell = is_query[:, None] & is_channel[None, :]
    if IS_SHARED:
        group = tl.program_id(1) * tl.num_programs(0) + tile
        num_shared = (tl.num_programs(1) * tl.num_programs(0)).to(tl.int64) * tl.num_programs(2)
        if num_active > 1:
            totals_ptr = sums_ptr + num_shared * (QUERIES * HEAD)
            largest_ptr = totals_ptr + num_shared * QUERIES
            first_cell = group.to(tl.int64) * tl.num_programs(2) * QUERIES + tl.arange(0, QUERIES)
            sums_at = sums_ptr + first_cell[:, None] * HEAD + channel[None, :]
            tl.store(sums_at + part * (QUERIES * HEAD), mixed, mask=is_cell)
            tl.store(totals_ptr + first_cell + part * QUERIES, total, mask=is_query)
            tl.store(largest_ptr + first_cell + part * QUERIES, largest, mask=is_query)
            tl.debug_barrier()  # all threads have stored before one of them says so
            arrived = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel")
            is_last = arrived == num_active - 1
            if is_last:
                tl.store(counter_ptr + group, 0)
                largest = tl.full([QUERIES], -1.0e29, dtype=tl.float32)
                total = tl.zeros([QUERIES], dtype=tl.float32)
                joined = tl.zeros([QUERIES, CHANNELS], dtype=tl.float32)
                for other in tl.range(0, num_active, num_stages=JOIN_STAGES):
                    cell = first_cell + other * QUERIES
                    found = tl.load(largest_ptr + cell, mask=is_query, other=-1.0e29, cache_modifier=".cg")
                    found_total = tl.load(totals_ptr + cell, mask=is_query, other=0.0, cache_modifier=".cg")
                    sums = tl.load(sums_at + other * (QUERIES * HEAD), mask=is_cell, other=0.0, cache_modifier=".cg")
                    raised = tl.maximum(largest, found)
                    kept, taken = tl.exp2(largest - raised), tl.exp2(found - raised)
                    total = total * kept + found_total * taken
                    joined = joined * kept[:, None] + sums * taken[:, None]
                    largest = raised
                mixed = joined
    if is_last:
        if HAS_SINK:
            sink = tl.load(sink_ptr + head * GROUP + query % GROUP).to(tl.float32) * 1.4426950408889634
            raised = tl.maximum(largest, sink)
            kept = tl.exp2(largest - raised)
            total = total * kept + tl.exp2(sink - raised)
            mixed = mixed * kept[:, None]
        y = (mixed / tl.where(is_query, total, 1.0)[:, None]).to(y_ptr.dtype.element_ty)
        y_at = (request.to(tl.int64) * num_rows + row) * (KV_HEADS * GROUP) + head * GROUP + query % GROUP
        tl.store(y_ptr + y_at[:, None] * HEAD + channel[None, :], y, mask=is_cell)


@kernel
def _fetch_ahead(pointers: tl.tensor, is_wanted: tl.tensor) -> None:
    """Bring lines of memory into the L2 cache, and wait for nothing."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), is_wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def paged_attention_triton(
    q_BTNH: Tensor,
    planes: Tensor,
    table: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    tail: Tensor | None,
    firsts_B: Tensor | None,
    window: int | None,
    is_causal: bool,
    sink_N: Tensor | None,
    scale: float,
    num_parts: int | None = None,
    launch: Launch | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Launch the kernel; grid and parts follow from shapes alone.

    Raises:
        ShapeError: blocks of a size that is no power of two from 16 on.
    """
    B, T, N, H = q_BTNH.shape
    num_kv_heads, num_blocks, page_size = planes.shape[1], planes.shape[2], planes.shape[3]
    if not is_page(page_size):
        raise ShapeError("planes", expected="blocks of 16, 32, 64, ... positions", found=planes.shape)
    assert planes.is_contiguous() and table.is_contiguous() and (tail is None or tail.is_contiguous()), "as caches are"
    group = N // num_kv_heads
    if launch is None:
        launch = choose_launch(T * group, B * num_kv_heads, H, planes.dtype)
    num_tiles = triton.cdiv(T * group, launch.queries)
    num_tiled = B * num_kv_heads * num_tiles
    if num_parts is None:
        num_parts = choose_parts(num_tiled, table.shape[1] * page_size, min(T * group, launch.queries) * H, launch)
    channels = channels_of(H)
    device = q_BTNH.device
    q_BTNH = q_BTNH if q_BTNH.stride(3) == 1 else q_BTNH.contiguous()
    y_BTNH = torch.empty(B, T, N, H, dtype=q_BTNH.dtype, device=device)
    sums = counters = y_BTNH  # nothing reads them where nobody shares a context
    if num_parts > 1:
        assert num_tiled <= _NUM_ARRIVALS, "so many tiles fill any GPU without sharing contexts"
        sums = _room_for_sums(num_tiled * num_parts * launch.queries * (H + 2), device)
        counters = new_arrivals(device) if arrivals is None else arrivals
    is_alone = N * H <= _MOST_EARLY and num_tiled <= _MULTIPROCESSORS
    is_early = dependent_launch(B * T) and is_alone
    with torch.cuda.device_of(q_BTNH):
        _paged_attention_kernel[num_tiles, B * num_kv_heads, num_parts](
            q_BTNH,
            planes,
            table,
            slots_B.contiguous(),
            starts_B.contiguous(),
            planes if tail is None else tail,
            starts_B if firsts_B is None else firsts_B.contiguous(),
            q_BTNH if sink_N is None else sink_N.contiguous(),
            y_BTNH,
            sums,
            counters,
            T,
            num_blocks,
            table.shape[1],
            *q_BTNH.stride()[:3],
            _NO_WINDOW if window is None else min(window, _NO_WINDOW),
            launch.least_turns,
            launch.alone_turns,
            scale * math.log2(math.e),
            KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD=H,
            CHANNELS=channels,
            PAGE=page_size,
            QUERIES=launch.queries,
            KEYS=launch.keys,
            IS_SHARED=num_parts > 1,
            JOIN_STAGES=max(2, min(_MOST_JOIN_STAGES, _SHARED_BYTES // (4 * launch.queries * channels))),
            FETCHED=launch.stages if is_early else 0,  # where it waits for nobody, this takes longer than it saves
            HAS_TAIL=tail is not None,
            IS_CAUSAL=is_causal,
            HAS_FIRSTS=firsts_B is not None,
            HAS_SINK=sink_N is not None,
            BEGINS=next_begins(is_small=True) if is_early else 0,
            num_warps=launch.warps,
            num_stages=launch.stages,
            launch_pdl=is_early,
        )
    return y_BTNH


def is_page(block_size: int) -> bool:
    """Whether blocks of this size can be read by the kernel."""
    return block_size >= _FEWEST and block_size & (block_size - 1) == 0


def channels_of(head_size: int) -> int:
    """Channels of a tile."""
    return max(_FEWEST, int(triton.next_power_of_2(head_size)))


def choose_launch(num_query_rows: int, num_heads: int, head_size: int, dtype: torch.dtype) -> Launch:
    """What fits a shape.

    With few requests a launch takes as long as one program takes for its part, and many are idle: tiles of few rows,
    each of which reads the keys for itself. With many requests memory is what everybody waits for.

    Args:
        num_query_rows: T * G.
        num_heads: B * M, of keys.
        head_size: H.
        dtype: of keys and values.
    """
    channels = channels_of(head_size)
    most_sums = _MOST_SUMS if dtype.itemsize < 4 else _MOST_SUMS // 4
    fitting = min(_MOST_QUERIES, max(_FEWEST, most_sums // channels))
    largest = min(fitting, max(_FEWEST, int(triton.next_power_of_2(num_query_rows))))
    num_tiled = num_heads * triton.cdiv(num_query_rows, _FEWEST)
    queries = _FEWEST if num_tiled <= _MULTIPROCESSORS else largest
    of_key = channels * dtype.itemsize
    keys = min(_MOST_KEYS, max(_FEWEST, _TURN_BYTES // of_key))
    if queries == 64 and keys == 64 and num_heads * triton.cdiv(num_query_rows, queries) >= _MANY:
        # With half the keys a turn a multiprocessor holds three programs, not two, and waits less for memory.
        return Launch(queries, 32, 4, _STAGES, 8, 16, _MULTIPROCESSORS)
    if queries > _FEWEST:
        return Launch(queries, keys, 8 if queries > 64 or channels > 128 else 4, _STAGES, 4, 8, _MULTIPROCESSORS)
    if keys == _MOST_KEYS:
        return Launch(queries, keys, 8, _STAGES)
    if (
        num_tiled <= _MULTIPROCESSORS // 3
    ):  # nobody waits for memory: turns of more keys, with nothing on its way behind
        return Launch(queries, 2 * keys, 8, 2)
    return Launch(queries, keys, 4, _STAGES, 2, 6)


def choose_parts(num_tiled: int, most_keys: int, num_sums: int, launch: Launch) -> int:
    """How many programs may share a context: the fewest, by powers of two, that fill a GPU.

    Args:
        num_tiled: programs, were none shared.
        most_keys: that a context can have.
        num_sums: of a tile; the last to arrive reads those of every part.
        launch: of the shape.
    """
    parts = 1
    most = min(_MOST_PARTS, _MOST_JOINED // num_sums)
    alone = launch.alone_turns * launch.keys
    while 2 * parts <= most and num_tiled * parts < launch.wanted and most_keys > parts * alone:
        parts *= 2
    return parts


def _room_for_sums(num_sums: int, device: torch.device) -> Tensor:
    """Float32 that hold anything: sums of tiles, and two statistics of each row."""
    return torch.empty(num_sums, dtype=torch.float32, device=device)


def new_arrivals(device: torch.device) -> Tensor:
    """int32 zeros, one for each tile of a launch. Every launch leaves zeros; one at the same time needs its own."""
    return torch.zeros(_NUM_ARRIVALS, dtype=torch.int32, device=device)
