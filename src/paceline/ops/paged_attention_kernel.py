"""The kernel of `paged_attention`: one program per tile of packed rows, key/value head and part of a context.

The rows of the G query heads that share a key/value head lie in one tile, so each key is read once for all of them. One
page, a block of the table, is one turn of the loop; the tail, where there is one, follows as further pages. How many of
the programs of a context have work follows from its length, read on the device: short contexts are one program's, which
writes what it found. Where several share one, each leaves its sums behind, and the last to arrive joins them, in the
order of the parts, so that a repetition gives the same bits.

B requests, T rows of each, N query heads, M key/value heads (N = M * G), H head size, J blocks of a table's row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import dependent_launch, kernel, tl, triton

_FEWEST = 16  # the smallest side of a matrix product on tensor cores
_MOST_QUERIES = 128  # packed rows of a tile
_MOST_SUMS = 128 * 128  # of a tile, in registers; a quarter of them where products are not those of tensor cores
_WANTED_PROGRAMS = 256  # two on each of 132 multiprocessors, nearly
_MOST_PARTS = 32
_MOST_JOINED = 2**11  # rows that the last to arrive reads: parts * rows of a tile
LEAST_PAGES = 4  # of a part: fewer take less time than to hand over sums
_SHARED_BYTES = 96 * 1024  # for keys and values on their way: with more, a multiprocessor has room for one program
_MOST_STAGES = 4
_NO_WINDOW = 2**30
_NUM_COUNTERS = 2**16
# Arrivals at each tile of a launch, zero between launches. Launches on a device follow each other, on one stream.
_counters: dict[torch.device, Tensor] = {}


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
    least_pages: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    IS_SHARED: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_FIRSTS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the latest rows see most, so they come first
    request, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    part = tl.program_id(2)
    start = tl.load(start_ptr + request).to(tl.int32)
    slot = tl.load(slot_ptr + request)
    first = 0
    if HAS_FIRSTS:
        first = tl.load(first_ptr + request).to(tl.int32)

    # What the tile sees: pages of the table from the first key of its first row on, and then those of the tail.
    query = tile * QUERIES + tl.arange(0, QUERIES)
    is_query = query < num_rows * GROUP
    row = query // GROUP
    lowest = tl.maximum(first, start + tile * QUERIES // GROUP - window + 1)
    if HAS_TAIL:
        end = start
    else:
        end = start + tl.minimum((tile * QUERIES + QUERIES - 1) // GROUP + 1, num_rows)
    first_page = lowest // PAGE
    num_cached = tl.maximum(tl.cdiv(end, PAGE) - first_page, 0)
    num_pages = num_cached
    if HAS_TAIL:
        num_pages += tl.cdiv(num_rows, PAGE)
    pages_per_part = tl.maximum(tl.cdiv(num_pages, tl.num_programs(2)), least_pages)
    num_active = tl.cdiv(num_pages, pages_per_part)
    if part >= num_active:
        return
    page = part * pages_per_part
    end_page = tl.minimum(page + pages_per_part, num_pages)
    end_cached = tl.minimum(tl.minimum(end_page, num_cached), num_columns - first_page)
    table_at = table_ptr + slot * num_columns + first_page
    block = tl.load(table_at + page, mask=page < end_cached, other=0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    channel = tl.arange(0, CHANNELS)
    is_channel = channel < HEAD
    q_at = q_ptr + request.to(tl.int64) * q_request_stride + head * GROUP * q_head_stride
    q_at += (row * q_row_stride + query % GROUP * q_head_stride)[:, None] + channel[None, :]
    q = tl.load(q_at, mask=is_query[:, None] & is_channel[None, :], other=0.0)
    position = start + row
    low = tl.maximum(first, position - window + 1)
    high = position
    if HAS_TAIL and not IS_CAUSAL:
        high = tl.minimum(position + window - 1, start + num_rows - 1)
    of_cell = tl.arange(0, PAGE)[:, None] * HEAD + channel[None, :]
    plane = num_blocks.to(tl.int64) * (PAGE * HEAD)
    cached_keys, cached_values = planes_ptr + head * plane, planes_ptr + (KV_HEADS + head) * plane
    tail_keys, tail_values = tail_ptr, tail_ptr
    if HAS_TAIL:
        tail_row = request * num_rows
        tail_size = tl.num_programs(1) // KV_HEADS * num_rows
        tail_keys = tail_ptr + (head * tail_size + tail_row).to(tl.int64) * HEAD
        tail_values = tail_keys + (KV_HEADS * tail_size).to(tl.int64) * HEAD

    # Scores that count for nothing lie far below this, which is finite: -inf - -inf is NaN.
    largest = tl.full([QUERIES], -1.0e29, dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    mixed = tl.zeros([QUERIES, CHANNELS], dtype=tl.float32)
    for index in range(page, end_page):
        # One turn ahead, so that where a page lies is known when it is asked for.
        next_block = tl.load(table_at + index + 1, mask=index + 1 < end_cached, other=0)
        offset = block.to(tl.int64) * (PAGE * HEAD)
        keys_at, values_at = cached_keys + offset, cached_values + offset
        at = (first_page + index) * PAGE
        end_at = end
        if HAS_TAIL:
            is_tail = index >= num_cached
            from_tail = (index - num_cached) * PAGE
            keys_at = tl.where(is_tail, tail_keys + from_tail * HEAD, keys_at)
            values_at = tl.where(is_tail, tail_values + from_tail * HEAD, values_at)
            at = tl.where(is_tail, start + from_tail, at)
            end_at = tl.where(is_tail, start + num_rows, end_at)
        key = at + tl.arange(0, PAGE)
        is_key = (key >= lowest) & (key < end_at)  # others hold anything, and 0 * NaN is NaN
        is_cell = is_key[:, None] & is_channel[None, :]
        k = tl.load(keys_at + of_cell, mask=is_cell, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        is_seen = is_key[None, :] & (key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None])
        score = tl.where(is_seen, score, -1.0e30)
        raised = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp2(score - raised[:, None])
        kept = tl.exp2(largest - raised)
        total = total * kept + tl.sum(weight, axis=1)
        v = tl.load(values_at + of_cell, mask=is_cell, other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        largest = raised
        block = next_block

    is_last = True
    is_cell = is_query[:, None] & is_channel[None, :]
    if IS_SHARED:
        group = tl.program_id(1) * tl.num_programs(0) + tile
        num_shares = (tl.num_programs(1) * tl.num_programs(0)).to(tl.int64) * tl.num_programs(2)
        if num_active > 1:
            of_row = group.to(tl.int64) * tl.num_programs(2) * QUERIES + tl.arange(0, QUERIES)
            statistics = sums_ptr + num_shares * (QUERIES * HEAD)
            totals = statistics + num_shares * QUERIES
            sums_at = sums_ptr + of_row[:, None] * HEAD + channel[None, :]
            tl.store(sums_at + part * (QUERIES * HEAD), mixed, mask=is_cell)
            tl.store(statistics + of_row + part * QUERIES, largest, mask=is_query)
            tl.store(totals + of_row + part * QUERIES, total, mask=is_query)
            tl.debug_barrier()  # all threads have stored before one of them says so
            arrived = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel")
            is_last = arrived == num_active - 1
            if is_last:
                tl.store(counter_ptr + group, 0)
                largest = tl.full([QUERIES], -1.0e29, dtype=tl.float32)
                total = tl.zeros([QUERIES], dtype=tl.float32)
                mixed = tl.zeros([QUERIES, CHANNELS], dtype=tl.float32)
                for other in tl.range(0, num_active, num_stages=3):
                    row_at = of_row + other * QUERIES
                    found = tl.load(statistics + row_at, mask=is_query, other=-1.0e29, cache_modifier=".cg")
                    found_total = tl.load(totals + row_at, mask=is_query, other=0.0, cache_modifier=".cg")
                    sums = tl.load(sums_at + other * (QUERIES * HEAD), mask=is_cell, other=0.0, cache_modifier=".cg")
                    raised = tl.maximum(largest, found)
                    kept, taken = tl.exp2(largest - raised), tl.exp2(found - raised)
                    total = total * kept + found_total * taken
                    mixed = mixed * kept[:, None] + sums * taken[:, None]
                    largest = raised
    if is_last:
        if HAS_SINK:
            sink = tl.load(sink_ptr + head * GROUP + query % GROUP).to(tl.float32) * 1.4426950408889634
            raised = tl.maximum(largest, sink)
            kept = tl.exp2(largest - raised)
            total = total * kept + tl.exp2(sink - raised)
            mixed = mixed * kept[:, None]
        y_at = (request.to(tl.int64) * num_rows + row) * (KV_HEADS * GROUP) + head * GROUP + query % GROUP
        y = (mixed / tl.where(is_query, total, 1.0)[:, None]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + y_at[:, None] * HEAD + channel[None, :], y, mask=is_cell)


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
    least_pages: int = LEAST_PAGES,
) -> Tensor:
    """Launch the kernel; grid and parts follow from shapes alone.

    Raises:
        ShapeError: blocks of a size that is no power of two from 16 on.
    """
    B, T, N, H = q_BTNH.shape
    num_kv_heads, num_blocks, page_size = planes.shape[1], planes.shape[2], planes.shape[3]
    if not is_page(page_size):
        raise ShapeError("planes", expected="blocks of 16, 32, 64, ... positions", found=planes.shape)
    group = N // num_kv_heads
    channels = max(_FEWEST, triton.next_power_of_2(H))
    queries = query_tile(T * group, channels * (4 if planes.dtype == torch.float32 else 1))
    num_tiles = triton.cdiv(T * group, queries)
    num_tiled = B * num_kv_heads * num_tiles
    if num_parts is None:
        num_parts = choose_parts(num_tiled, table.shape[1], queries, least_pages)
    device = q_BTNH.device
    q_BTNH = q_BTNH if q_BTNH.stride(3) == 1 else q_BTNH.contiguous()
    y_BTNH = torch.empty(B, T, N, H, dtype=q_BTNH.dtype, device=device)
    sums = counters = y_BTNH  # nothing reads them where nobody shares a context
    if num_parts > 1:
        assert num_tiled <= _NUM_COUNTERS, "so many tiles fill any GPU without sharing contexts"
        sums = _room_for_sums(num_tiled * num_parts * queries * (H + 2), device)
        counters = _counters_of(device)
    is_early = dependent_launch()
    with torch.cuda.device_of(q_BTNH):
        _paged_attention_kernel[num_tiles, B * num_kv_heads, num_parts](
            q_BTNH,
            planes,
            table,
            slots_B,
            starts_B,
            planes if tail is None else tail,
            starts_B if firsts_B is None else firsts_B,
            q_BTNH if sink_N is None else sink_N,
            y_BTNH,
            sums,
            counters,
            T,
            num_blocks,
            table.shape[1],
            *q_BTNH.stride()[:3],
            _NO_WINDOW if window is None else min(window, _NO_WINDOW),
            least_pages,
            scale * math.log2(math.e),
            KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD=H,
            CHANNELS=channels,
            PAGE=page_size,
            QUERIES=queries,
            IS_SHARED=num_parts > 1,
            HAS_TAIL=tail is not None,
            IS_CAUSAL=is_causal,
            HAS_FIRSTS=firsts_B is not None,
            HAS_SINK=sink_N is not None,
            USE_PDL=is_early,
            num_warps=8 if queries > 64 or channels > 128 else 4,
            num_stages=num_stages(page_size, channels, planes.element_size()),
            launch_pdl=is_early,
        )
    return y_BTNH


def is_page(block_size: int) -> bool:
    """Whether blocks of this size can be turns of the kernel's loop."""
    return block_size >= _FEWEST and block_size & (block_size - 1) == 0


def query_tile(num_query_rows: int, channels: int) -> int:
    """Packed rows of a tile: all of them where registers have room for their sums."""
    fitting = min(_MOST_QUERIES, max(_FEWEST, _MOST_SUMS // channels))
    return int(min(fitting, max(_FEWEST, triton.next_power_of_2(num_query_rows))))


def choose_parts(num_tiled: int, most_pages: int, queries: int, least_pages: int = LEAST_PAGES) -> int:
    """How many programs may share a context: the fewest, by powers of two, that fill a GPU.

    Args:
        num_tiled: programs, were none shared.
        most_pages: that a context can have.
        queries: packed rows of a tile; the last to arrive reads the sums of every part for each.
        least_pages: of a part.
    """
    parts = 1
    most = min(_MOST_PARTS, _MOST_JOINED // queries)
    while parts < most and num_tiled * parts < _WANTED_PROGRAMS and most_pages >= 2 * parts * least_pages:
        parts *= 2
    return parts


def num_stages(page_size: int, channels: int, num_bytes: int) -> int:
    """How many pages of keys and values are on their way, bounded by shared memory."""
    return max(1, min(_MOST_STAGES, _SHARED_BYTES // (2 * page_size * channels * num_bytes)))


def _room_for_sums(num_sums: int, device: torch.device) -> Tensor:
    """Float32 that hold anything: sums of tiles, and two statistics of each row."""
    return torch.empty(num_sums, dtype=torch.float32, device=device)


def _counters_of(device: torch.device) -> Tensor:
    found = _counters.get(device)
    if found is None:
        is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not is_capturing, "run a pass once before it is captured: what it counts in is not the graph's alone"
        found = _counters[device] = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
    return found
