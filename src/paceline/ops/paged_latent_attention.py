"""Absorbed latent attention of a step's rows over cached rows in blocks: the middle of
`multi_head_latent_attention.absorbed_latent_attention`, found through a table.

    mixed[b, t, n] = sum over s <= starts[b] + t of softmax_s(scale q[b, t, n] . row(b, s)) row(b, s)[: R]
    row(b, s)      = planes[table[slots[b], s // block_size], s % block_size]

The kernel packs all heads and rows of a request into tiles that read each cached row once, and splits long contexts
among programs. A second launch joins the parts: with 512 channels they are too many sums for the last program to
arrive, which would read them alone. What a table names past the last row of the step is never used, so free blocks may
hold NaN.

B requests, T rows, N heads, X channels of a cached row, R of them values, J blocks of a table, S slots, P parts of a
context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.elementwise import widen

_KEY_TILE = 64  # cached rows per step of a program's loop
_QUERY_TILE = 32  # rows of queries per program: with 512 latent channels, 64 KB of sums
_FEWEST = 16  # the smallest side of a matrix product on tensor cores
_WANTED_PROGRAMS = 264  # two waves on a GPU of 132 multiprocessors
_MOST_PARTS = 16


def paged_latent_attention_reference(
    q_BTNX: Tensor,
    planes: Tensor,
    table_SJ: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    value_size: int,
    scale: float,
) -> Tensor:
    """The definition: gathers the longest context of the batch, in float32."""
    num_rows, block_size = q_BTNX.shape[1], planes.shape[1]
    device = q_BTNX.device
    ends_BT = starts_B.unsqueeze(1) + torch.arange(1, num_rows + 1, device=device)
    position_S = torch.arange(int(ends_BT.max()), device=device)
    rows_BS = table_SJ[slots_B][:, position_S // block_size].long() * block_size + position_S % block_size
    is_used_BS = position_S < ends_BT[:, -1:]
    # Not only masked in the scores: 0 * NaN is NaN in the sum of values.
    latents_BSX = widen(planes.flatten(0, 2)[rows_BS]).masked_fill(~is_used_BS.unsqueeze(-1), 0.0)
    scores_BNTS = torch.einsum("btnx,bsx->bnts", widen(q_BTNX), latents_BSX) * scale
    is_visible_BTS = position_S < ends_BT.unsqueeze(-1)
    weights_BNTS = scores_BNTS.masked_fill(~is_visible_BTS.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("bnts,bsr->btnr", weights_BNTS, latents_BSX[..., :value_size]).to(q_BTNX.dtype)


@kernel
def _paged_latent_attention_kernel(
    q_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    start_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    total_ptr: tl.tensor,
    num_query_rows: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    value_size: tl.tensor,
    width: tl.tensor,
    block_size: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    PARTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    is_query = query < num_query_rows
    latent_at, shared_at = tl.arange(0, LATENT), tl.arange(0, SHARED)
    is_latent, is_shared = latent_at < value_size, shared_at < width - value_size
    q_at = q_ptr + (request * num_query_rows + query[:, None]) * width
    q = tl.load(q_at + latent_at[None, :], mask=is_query[:, None] & is_latent[None, :], other=0.0)
    start = tl.load(start_ptr + request)
    table_at = table_ptr + tl.load(slot_ptr + request) * table_stride
    last = start + query // num_heads  # the last position that a row sees
    num_keys = start + num_rows
    num_tiles = tl.cdiv(num_keys, KEYS)
    tiles_per_part = tl.cdiv(num_tiles, PARTS)
    first_tile = part * tiles_per_part
    end_tile = tl.minimum(first_tile + tiles_per_part, num_tiles)
    # Below every score, and finite: a part without keys is left with it, and -inf - -inf is NaN.
    largest = tl.full([QUERIES], -1.0e30, dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    mixed = tl.zeros([QUERIES, LATENT], dtype=tl.float32)
    for tile in range(first_tile, end_tile):
        position = tile * KEYS + tl.arange(0, KEYS)
        is_used = position < num_keys
        block = tl.load(table_at + position // block_size, mask=is_used, other=0).to(tl.int64)
        row_at = planes_ptr + (block * block_size + position % block_size)[:, None] * width
        latent = tl.load(row_at + latent_at[None, :], mask=is_used[:, None] & is_latent[None, :], other=0.0)
        score = tl.dot(q, tl.trans(latent), input_precision="ieee")
        if HAS_SHARED:
            shared_q = tl.load(
                q_at + value_size + shared_at[None, :], mask=is_query[:, None] & is_shared[None, :], other=0.0
            )
            shared = tl.load(
                row_at + value_size + shared_at[None, :], mask=is_used[:, None] & is_shared[None, :], other=0.0
            )
            score += tl.dot(shared_q, tl.trans(shared), input_precision="ieee")
        is_visible = is_used[None, :] & (position[None, :] <= last[:, None])
        score = tl.where(is_visible, score * scale, -1.0e30)
        raised = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.where(is_visible, tl.exp(score - raised[:, None]), 0.0)
        kept = tl.exp(largest - raised)
        total = total * kept + tl.sum(weight, axis=1)
        mixed = mixed * kept[:, None] + tl.dot(weight.to(latent.dtype), latent, input_precision="ieee")
        largest = raised
    out = (request * PARTS + part) * num_query_rows + query
    is_cell = is_query[:, None] & is_latent[None, :]
    out_at = mixed_ptr + out[:, None] * value_size + latent_at[None, :]
    if PARTS == 1:
        tl.store(out_at, (mixed / total[:, None]).to(mixed_ptr.dtype.element_ty), mask=is_cell)
    else:
        tl.store(out_at, mixed, mask=is_cell)
        tl.store(largest_ptr + out, largest, mask=is_query)
        tl.store(total_ptr + out, total, mask=is_query)


@kernel
def _join_parts_kernel(
    part_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    total_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    num_query_rows: tl.tensor,
    value_size: tl.tensor,
    PARTS: tl.constexpr,
    LATENT: tl.constexpr,
) -> None:
    request, query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    latent_at = tl.arange(0, LATENT)
    is_latent = latent_at < value_size
    part = (request * PARTS + tl.arange(0, PARTS)) * num_query_rows + query
    largest = tl.load(largest_ptr + part)
    factor = tl.exp(largest - tl.max(largest, axis=0))
    total = tl.sum(tl.load(total_ptr + part) * factor, axis=0)
    cell = part[:, None] * value_size + latent_at[None, :]
    mixed = tl.load(part_ptr + cell, mask=is_latent[None, :], other=0.0)
    mixed = tl.sum(mixed * factor[:, None], axis=0) / total
    out_at = mixed_ptr + (request * num_query_rows + query) * value_size + latent_at
    tl.store(out_at, mixed.to(mixed_ptr.dtype.element_ty), mask=is_latent)


def _choose_parts(num_programs: int, most_tiles: int) -> int:
    """How many programs share a context: a power of two that fills a GPU and leaves each at least two tiles."""
    parts = 1
    while parts < _MOST_PARTS and num_programs * parts < _WANTED_PROGRAMS and most_tiles >= 4 * parts:
        parts *= 2
    return parts


def paged_latent_attention_triton(
    q_BTNX: Tensor,
    planes: Tensor,
    table_SJ: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    value_size: int,
    scale: float,
    num_parts: int | None = None,
) -> Tensor:
    """Launch one program per request, tile of queries and part of the context; the parts follow from shapes alone."""
    num_requests, num_rows, num_heads, width = q_BTNX.shape
    num_query_rows = num_rows * num_heads
    queries = _QUERY_TILE if num_query_rows > _FEWEST else _FEWEST
    num_tiles = triton.cdiv(num_query_rows, queries)
    if num_parts is None:
        most_keys = table_SJ.shape[1] * planes.shape[1]
        num_parts = _choose_parts(num_requests * num_tiles, most_keys // _KEY_TILE)
    latent = max(_FEWEST, triton.next_power_of_2(value_size))
    shape = (num_requests, num_parts, num_query_rows)
    device = q_BTNX.device
    mixed_BTNR = torch.empty(*q_BTNX.shape[:3], value_size, dtype=q_BTNX.dtype, device=device)
    parts, statistics = mixed_BTNR, (mixed_BTNR, mixed_BTNR)
    if num_parts > 1:
        parts = torch.empty(*shape, value_size, dtype=torch.float32, device=device)
        largest, total = torch.empty(2, *shape, dtype=torch.float32, device=device)
        statistics = (largest, total)
    with torch.cuda.device_of(q_BTNX):
        _paged_latent_attention_kernel[num_requests, num_tiles, num_parts](
            q_BTNX.contiguous(),
            planes,
            table_SJ,
            slots_B.contiguous(),
            starts_B.contiguous(),
            parts,
            *statistics,
            num_query_rows,
            num_rows,
            num_heads,
            value_size,
            width,
            planes.shape[1],
            table_SJ.stride(0),
            scale,
            PARTS=num_parts,
            HAS_SHARED=width > value_size,
            LATENT=latent,
            SHARED=max(_FEWEST, triton.next_power_of_2(max(1, width - value_size))),
            QUERIES=queries,
            KEYS=_KEY_TILE,
            num_warps=8 if latent > 128 else 4,
            num_stages=1 if latent > 256 else 2,
        )
        if num_parts > 1:
            _join_parts_kernel[num_requests, num_query_rows](
                parts, *statistics, mixed_BTNR, num_query_rows, value_size, PARTS=num_parts, LATENT=latent
            )
    return mixed_BTNR


def paged_latent_attention(
    q_BTNX: Tensor,
    planes: Tensor,
    table_SJ: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    *,
    value_size: int,
    scale: float,
) -> Tensor:
    """Attend over paged rows; row t of a request sees its positions 0 to start + t.

    Args:
        q_BTNX: queries from `absorb_queries`, not scaled.
        planes: [num_blocks, block_size, 1, X] in the same dtype, contiguous; the rows of the step are written already.
        table_SJ: int32, which block holds which positions of a slot.
        slots_B: int64, rows of the table.
        starts_B: int64, how many positions came before the step.
        value_size: R.
        scale: of the scores: (P + R')^-1/2 of the explicit queries.
    Returns:
        [B, T, N, R] in the queries' dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    num_requests, width = q_BTNX.shape[0], q_BTNX.shape[3]
    if planes.dim() != 4 or planes.shape[2:] != (1, width):
        raise ShapeError("planes", expected=f"[num_blocks, block_size, 1, {width}]", found=planes.shape)
    if table_SJ.dim() != 2:
        raise ShapeError("table", expected="[S, J]", found=table_SJ.shape)
    for name, numbers in (("slots", slots_B), ("starts", starts_B)):
        if numbers.shape != (num_requests,):
            raise ShapeError(name, expected=[num_requests], found=numbers.shape)
    if not 0 < value_size <= width:
        raise ShapeError("planes", expected=f"rows of at least {value_size} channels, and no fewer", found=planes.shape)
    if q_BTNX.numel() == 0:
        return q_BTNX[..., :value_size].clone()
    run = choose("paged_latent_attention", q_BTNX, paged_latent_attention_reference, paged_latent_attention_triton)
    return run(q_BTNX, planes, table_SJ, slots_B, starts_B, value_size, scale)
