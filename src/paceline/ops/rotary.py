"""Rotary positions: pairs of channels turned by position * frequency. N heads, H head size, R rotated channels.

Two pairings exist and differ silently: split halves (channel i with i + R/2; "neox") and interleaved (2i with 2i + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.native.rows import can_look_up_turns
from paceline.ops.native.rows import turns as native_turns


def rotary_table(frequencies_R2: Tensor, num_positions: int, *, scale: float = 1.0) -> Tensor:
    """Cosines and sines of every position.

    Args:
        frequencies_R2: float32 [R/2], radians per position.
        num_positions: rows of the table.
        scale: attention factor of YaRN, multiplied into both.
    Returns:
        float32 [num_positions, 2, R/2]; index 0 cosines, 1 sines.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies_R2.device)
    angles = torch.outer(positions, frequencies_R2)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * scale


def apply_rotary(x_NH: Tensor, table_2: Tensor, *, is_neox_style: bool = True) -> Tensor:
    """Turn each head of x by its row of the table.

    Args:
        x_NH: [..., N, H]; the first R channels of each head are turned, the rest pass through.
        table_2: [..., 2, R/2], rows of `rotary_table` gathered at the positions of x's leading dimensions.
        is_neox_style: split halves if true, interleaved pairs if false.
    Returns:
        Same shape and dtype as x; computed in float32.
    """
    half = table_2.shape[-1]
    cosine, sine = table_2.unsqueeze(-3).unbind(-2)
    turned, passed = x_NH[..., : 2 * half], x_NH[..., 2 * half :]
    if is_neox_style:
        first, second = turned[..., :half], turned[..., half:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    pair = (first * cosine - second * sine, second * cosine + first * sine)
    y = torch.cat(pair, dim=-1) if is_neox_style else torch.stack(pair, dim=-1).flatten(-2)
    y = y.to(x_NH.dtype)
    return torch.cat((y, passed), dim=-1) if passed.shape[-1] else y


def expand_rotary(table_2: Tensor, dtype: torch.dtype, *, is_neox_style: bool = True) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every channel, once per forward pass, for `turn_heads`.

    Args:
        table_2: [..., 2, R/2], rows of `rotary_table`.
        dtype: of the heads that will be turned.
        is_neox_style: the pairing.
    Returns:
        Two of [..., 1, R]: y = x * cosine + partner(x) * sine, where partner swaps the channels of each pair.
    """
    cosine, sine = table_2.to(dtype).unbind(-2)
    if is_neox_style:
        rows = torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)
    else:
        rows = cosine.repeat_interleave(2, dim=-1), torch.stack((-sine, sine), dim=-1).flatten(-2)
    return rows[0].unsqueeze(-2), rows[1].unsqueeze(-2)


def rotary_turns(
    table_P2R: Tensor, positions: Tensor, dtype: torch.dtype, *, is_neox_style: bool = True
) -> tuple[Tensor, Tensor]:
    """`expand_rotary` of the table's rows at some positions.

    Args:
        table_P2R: from `rotary_table`.
        positions: int64 [...].
        dtype: as for `expand_rotary`.
        is_neox_style: the pairing.
    """
    if is_neox_style and can_look_up_turns(table_P2R, positions, dtype):
        return native_turns(table_P2R, positions)
    return expand_rotary(table_P2R[positions], dtype, is_neox_style=is_neox_style)


def turn_heads(x_NH: Tensor, rows: tuple[Tensor, Tensor], *, is_neox_style: bool = True) -> Tensor:
    """`apply_rotary` with rows from `expand_rotary`: three operations instead of ten, in x's dtype."""
    cosine, sine = rows
    rotated = cosine.shape[-1]
    turned = x_NH if x_NH.shape[-1] == rotated else x_NH[..., :rotated]
    if is_neox_style:
        partner = turned.roll(rotated // 2, dims=-1)
    else:
        partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    y = torch.addcmul(turned * cosine, partner, sine)
    return y if turned is x_NH else torch.cat((y, x_NH[..., rotated:]), dim=-1)
