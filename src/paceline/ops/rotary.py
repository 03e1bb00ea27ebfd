"""Rotary positions: pairs of channels turned by position * frequency. N heads, H head size, R rotated channels.

Two pairings exist and differ silently: split halves (channel i with i + R/2; "neox") and interleaved (2i with 2i + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
