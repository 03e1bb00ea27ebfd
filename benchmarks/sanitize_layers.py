"""Cases of `sanitize` for decoder layers: attention over blocks, and products with what stands around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.sanitize_comparing import Case, compared, dtypes, random
from torch import Tensor

from paceline.ops.add_norm import add_norm_reference, add_norm_triton
from paceline.ops.embed_rows import embed_rows_reference, embed_rows_triton
from paceline.ops.gated_product import ProductTile, gated_product_reference, gated_product_triton
from paceline.ops.heads import Cells, HeadForm
from paceline.ops.linear_gated import linear_gated_reference, linear_gated_triton
from paceline.ops.linear_residual import linear_residual_reference, linear_residual_triton
from paceline.ops.norm_taps import join_taps_reference, join_taps_triton, norm_taps_reference, norm_taps_triton
from paceline.ops.paged_attention import paged_attention_reference
from paceline.ops.paged_attention_kernel import Launch, paged_attention_triton
from paceline.ops.place_heads import place_heads_reference, place_heads_triton
from paceline.ops.project_heads import project_heads_reference, project_heads_triton
from paceline.ops.rotary import rotary_table
from paceline.ops.scale_rows import scale_rows_reference, scale_rows_triton
from paceline.ops.skinny_product import ScaledRows
from paceline.ops.skinny_tile import Tile

_EPS = 1e-5
_TILES = (Tile(32, 32, 1), Tile(32, 32, 3))
_SLICED = (Tile(32, 64, slices=4), Tile(32, 16, slices=4, is_held=True))

_SMALL = Launch(
    queries=16, keys=16, warps=4, stages=2, least_turns=1, alone_turns=1
)  # so that short contexts are shared


def layer_cases(device: torch.device) -> Iterator[Case]:
    """All cases of layers."""
    for make in (_attention, _paged, _residuals, _gates, _heads, _placed, _norms, _gated_products, _embedded):
        yield from make(device)


def _attention(device: torch.device) -> Iterator[Case]:
    """Blocks of 16 in any order, those of nobody full of NaN; one request at its beginning, one in the trash slot."""
    page, num_heads, num_kv_heads, size, rows = 16, 6, 2, 24, 3
    slots, starts = torch.tensor([2, 0, 3], device=device), torch.tensor([70, 0, 0], device=device)
    firsts = torch.tensor([9, 0, 0], device=device)
    for dtype, allowed in dtypes(device, multiplies=True):
        planes = torch.full((2, num_kv_heads, 9, page, size), torch.nan, dtype=dtype, device=device)
        table = torch.zeros(4, 6, dtype=torch.int32, device=device)
        table[2, :5] = torch.tensor([7, 2, 5, 3, 4], device=device)
        table[0, 0] = 6
        for block in (0, 2, 3, 4, 5, 6, 7):  # 0 is the trash slot's
            planes[:, :, block] = random(device, 2, num_kv_heads, page, size, dtype=dtype)
        q = random(device, 3, rows, num_heads, size, dtype=dtype)
        tail = random(device, 2, num_kv_heads, 1, 3 * rows, size, dtype=dtype)
        sink = random(device, num_heads)
        forms: dict[str, tuple[Any, ...]] = {
            "causal": (None, None, None, True, None),
            "tail and sink": (tail, None, None, False, sink),
            "window behind firsts": (tail, firsts, 21, True, None),
        }
        for name, form in forms.items():
            for parts in (1, 4):
                launch = partial(paged_attention_triton, num_parts=parts, launch=_SMALL)
                arguments = (q, planes, table, slots, starts, *form, size**-0.5)
                yield (
                    f"paged_attention, {name}, {parts} parts, {dtype}",
                    partial(compared, paged_attention_reference, launch, arguments, allowed),
                )


def _paged(device: torch.device) -> Iterator[Case]:
    for dtype, allowed in dtypes(device, multiplies=True):
        for num_parts, has_tail, window in ((1, False, None), (4, False, 20), (4, True, None)):
            num_rows, starts = 3, torch.tensor([61, 5], device=device)
            planes = torch.full((2, 2, 9, 16, 24), torch.nan, device=device, dtype=dtype)
            table = torch.zeros(3, 4, dtype=torch.int32, device=device)
            table[0], table[2, 0] = torch.tensor([4, 1, 7, 2], device=device), 5
            for block, start in ((4, 0), (1, 16), (7, 32), (2, 48), (5, 0)):
                last = 8 if block == 5 else 64
                kept = min(16, last - start - (num_rows if has_tail else 0))
                planes[:, :, block, :kept] = random(device, 2, 2, kept, 24, dtype=dtype)
            tail = random(device, 2, 2, 1, 2 * num_rows, 24, dtype=dtype) if has_tail else None
            q = random(device, 2, num_rows, 6, 24, dtype=dtype)
            sinks = random(device, 6) if has_tail else None
            slots = torch.tensor([0, 2], device=device)
            arguments = (q, planes, table, slots, starts, tail, None, window, False, sinks, 0.2)

            def launch(*arguments: Any, num_parts: int = num_parts) -> Tensor:
                return paged_attention_triton(*arguments, num_parts=num_parts, launch=_SMALL)

            yield (
                f"paged_attention, {num_parts} parts, {'tail' if has_tail else 'no tail'}, {dtype}",
                partial(compared, paged_attention_reference, launch, arguments, allowed),
            )


def _residuals(device: torch.device) -> Iterator[Case]:
    width, num_outputs, rows = 72, 70, 5
    for dtype, allowed in dtypes(device, multiplies=True):
        x, weight = random(device, rows, width, dtype=dtype), random(device, num_outputs, width) / width**0.5
        bias, residual = random(device, num_outputs, dtype=dtype), random(device, rows, num_outputs, dtype=dtype)
        squares, weight = random(device, rows, 3).square() * width / 3, weight.to(dtype)
        forms = {
            "residual": (x, None, weight, bias, residual, random(device, num_outputs), 0.0),
            "norm": (x, squares, weight, None, None, None, _EPS),
        }
        for name, form in forms.items():
            for tile in (*_TILES, *_SLICED) if name == "residual" else _TILES:
                launch = partial(_flattened, partial(linear_residual_triton, tile=tile))
                yield (
                    f"linear_residual, {name}, {tile.parts} parts, {tile.slices} slices, {dtype}",
                    partial(compared, partial(_flattened, linear_residual_reference), launch, form, allowed),
                )


def _flattened(run: Callable[..., Tensor | ScaledRows], *arguments: object) -> Tensor:
    """One tensor of all results; sums of squares come in any number of parts."""
    result = run(*arguments)
    if isinstance(result, Tensor):
        return result
    squares = result.squares_TS.sum(-1, keepdim=True).to(result.x_TD.dtype)
    return torch.cat((result.x_TD, result.scaled_TD, squares), dim=-1)


def _gates(device: torch.device) -> Iterator[Case]:
    width, inside, rows = 72, 40, 5
    for dtype, allowed in dtypes(device, multiplies=True):
        x, weight = random(device, rows, width, dtype=dtype), (random(device, 2 * inside, width) / width**0.5).to(dtype)
        bias, squares = random(device, 2 * inside, dtype=dtype), random(device, rows, 3).square() * width / 3
        for tile in (*_TILES, *_SLICED):
            both = (linear_gated_reference, partial(linear_gated_triton, tile=tile))
            yield (
                f"linear_gated, {tile.parts} parts, {tile.slices} slices, {dtype}",
                partial(compared, *both, (x, squares, weight, bias, _EPS), allowed),
            )


def _heads(device: torch.device) -> Iterator[Case]:
    width, num_heads, num_kv_heads, size, rows, page = 72, 4, 2, 20, 5, 16
    positions, cells_T = torch.tensor([3, 4, 23, 0, 7], device=device), torch.tensor([35, 36, 17, 0, 20], device=device)
    turns = rotary_table(1e-4 ** (torch.arange(size // 2, device=device) * 2 / size), 24)
    for dtype, allowed in dtypes(device, multiplies=True):
        x = random(device, rows, width, dtype=dtype)
        weight = (random(device, (num_heads + 2 * num_kv_heads) * size, width) / width**0.5).to(dtype)
        planes = torch.full((2, num_kv_heads, 3, page, size), torch.nan, dtype=dtype, device=device)
        gains: tuple[Tensor, Tensor] = (random(device, size), random(device, size))
        for is_neox, qk_gains in ((True, gains), (False, None)):
            for tile in _TILES if qk_gains else (*_TILES, *_SLICED):
                arguments = (
                    x,
                    random(device, rows, 3).square() * width / 3,
                    weight,
                    None if is_neox else random(device, weight.shape[0], dtype=dtype),
                    qk_gains,
                    turns[positions],
                    Cells(planes, cells_T),
                    HeadForm(num_heads, _EPS, is_neox),
                )
                yield (
                    f"project_heads, {'norms' if qk_gains else 'pairs'}, {tile.parts} parts, {tile.slices} slices, "
                    f"{dtype}",
                    partial(
                        compared,
                        project_heads_reference,
                        partial(project_heads_triton, tile=tile),
                        arguments,
                        2 * allowed,
                    ),
                )


def _placed(device: torch.device) -> Iterator[Case]:
    num_heads, num_kv_heads, size, rows, page = 4, 2, 20, 5, 16
    cells_T = torch.tensor([35, 36, 17, 0, 20], device=device)
    turns = rotary_table(1e-4 ** (torch.arange(size // 2, device=device) * 2 / size), rows)
    for dtype, allowed in dtypes(device):
        qkv = random(device, rows, (num_heads + 2 * num_kv_heads) * size, dtype=dtype)
        planes = torch.full((2, num_kv_heads, 3, page, size), torch.nan, dtype=dtype, device=device)
        gains: tuple[Tensor, Tensor] = (random(device, size), random(device, size))
        for is_neox, qk_gains in ((True, gains), (False, None)):
            arguments = (qkv, qk_gains, turns, Cells(planes, cells_T), HeadForm(num_heads, _EPS, is_neox))
            yield (
                f"place_heads, {'norms' if qk_gains else 'pairs'}, {dtype}",
                partial(compared, place_heads_reference, place_heads_triton, arguments, 2 * allowed),
            )


def _gated_products(device: torch.device) -> Iterator[Case]:
    for dtype, allowed in dtypes(device, multiplies=True):
        x, weight = random(device, 40, 56, dtype=dtype), random(device, 48, 56, dtype=dtype)
        arguments = (x, weight, ProductTile(64, 16, 32, 4, 3))
        both = (gated_product_reference, gated_product_triton)
        yield f"gated_product, {dtype}", partial(compared, *both, arguments, 2 * allowed)


def _norms(device: torch.device) -> Iterator[Case]:
    for dtype, allowed in dtypes(device):
        x, y, gain = random(device, 5, 37, dtype=dtype), random(device, 5, 37, dtype=dtype), random(device, 37)
        for name, added in (("sum", y), ("alone", None)):
            both = (add_norm_reference, add_norm_triton)
            yield f"add_norm, {name}, {dtype}", partial(compared, *both, (x, added, gain, _EPS), 2 * allowed)
        arguments = (x, None, gain, _EPS, True)
        yield f"add_norm, copy, {dtype}", partial(compared, add_norm_reference, add_norm_triton, arguments, 2 * allowed)
        yield f"scale_rows, {dtype}", partial(compared, scale_rows_reference, scale_rows_triton, (x, gain), allowed)
        taps = tuple(random(device, 5, 37, dtype=dtype) for _ in range(3))
        gains = random(device, 3, 37, dtype=dtype)
        both = (norm_taps_reference, norm_taps_triton)
        yield f"norm_taps, {dtype}", partial(compared, *both, (taps, gains, _EPS), 2 * allowed)
        joined = (join_taps_reference, join_taps_triton)
        yield f"norm_taps, as they are, {dtype}", partial(compared, *joined, (taps, dtype), allowed)


def _embedded(device: torch.device) -> Iterator[Case]:
    ids, positions = torch.tensor([6, 0, 6, 8], device=device), torch.tensor([0, 23, 5, 5], device=device)
    turns = rotary_table(1e-4 ** (torch.arange(5, device=device) * 2 / 10), 24)
    for dtype, allowed in dtypes(device):
        arguments = (random(device, 9, 37, dtype=dtype), ids, random(device, 37), turns, positions)
        yield f"embed_rows, {dtype}", partial(compared, embed_rows_reference, embed_rows_triton, arguments, allowed)
