"""Attention of requests over exactly their own keys: what the forms that go one by one share.

B requests, T rows of each, S keys, N query heads, M key/value heads (N = M * G), H head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.attention import RowTiles, attention_of_tiles, bias_of, row_tiles


def visible_keys(position_T: Tensor, key_S: Tensor, window: int | None, *, is_causal: bool) -> Tensor:
    """Who sees whom, on absolute positions: bool [..., T, S]; broadcasts over leading dimensions.

    Args:
        position_T: int64, of the rows.
        key_S: int64, of the keys.
        window: a row sees keys that are less than this far away, itself included; None is all.
        is_causal: no row sees a later key.
    """
    distance = position_T.unsqueeze(-1) - key_S
    visible = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if window is None else visible & (distance.abs() < window)


class Masks:
    """The masks of a pass, each made once.

    Args:
        num_rows: T.
        num_kv_heads: M.
        is_bool: bool [T, S], as the reference takes them; else from `bias_of`.
    """

    def __init__(self, num_rows: int, num_kv_heads: int, *, is_bool: bool) -> None:
        self._num_rows, self._num_kv_heads, self._is_bool = num_rows, num_kv_heads, is_bool
        self._made: dict[Hashable, Tensor] = {}
        self._tiles: dict[Hashable, RowTiles] = {}

    def of(self, start: int, first: int, window: int | None, q_BTNH: Tensor, *, is_causal: bool) -> Tensor | None:
        """The mask of T rows from position `start` on over keys from `first` up to the last row; None hides nothing."""
        end = start + self._num_rows
        if window is not None and window >= end - first:
            window = None
        if window is None and (self._num_rows == 1 or not is_causal):
            return None
        key = (start, first, window, is_causal)
        mask = self._made.get(key)
        if mask is None:
            key_S = torch.arange(first, end, device=q_BTNH.device)
            mask = visible_keys(key_S[start - first :], key_S, window, is_causal=is_causal)
            if not self._is_bool:
                mask = bias_of(mask.unsqueeze(0), q_BTNH.shape[2] // self._num_kv_heads, q_BTNH.dtype)
            self._made[key] = mask
        return mask

    def tiles_of(self, start: int, first: int, window: int | None, q_BTNH: Tensor, *, is_causal: bool) -> RowTiles:
        """The same for row-invariant attention."""
        key = (start, first, window, is_causal)
        tiles = self._tiles.get(key)
        if tiles is None:
            key_S = torch.arange(first, start + self._num_rows, device=q_BTNH.device)
            visible_TS = visible_keys(key_S[start - first :], key_S, window, is_causal=is_causal)
            tiles = row_tiles(visible_TS, q_BTNH.shape[2] // self._num_kv_heads, q_BTNH.dtype)
            self._tiles[key] = tiles
        return tiles


def attend_each(
    q_BTNH: Tensor, contexts: Iterable[tuple[Tensor, Tensor]], biases: Sequence[Tensor | None], num_kv_heads: int
) -> Tensor:
    """Attention of several requests, each over keys of its own. A decode step calls it once per layer.

    Args:
        q_BTNH: queries.
        contexts: of each request, keys and values [1, M, S, H]; best made as they are taken, since copies for all
            requests at once are memory that the next layer has to ask for again.
        biases: of each request, from `Masks.of`; None shows everything.
        num_kv_heads: M.

    Returns:
        [B, T, N, H].
    """
    B, T, N, H = q_BTNH.shape
    # Heads that share keys are rows of one query; with T = 1 they lie together as they are.
    q_BMRH = (q_BTNH if T == 1 else q_BTNH.transpose(1, 2)).reshape(B, num_kv_heads, -1, H)
    queries = (q_BMRH,) if B == 1 else q_BMRH.split(1)
    mixed = [
        functional.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
        for q, (keys, values), bias in zip(queries, contexts, biases, strict=True)
    ]
    y_BMRH = mixed[0] if B == 1 else torch.cat(mixed)
    return y_BMRH.view(B, T, N, H) if T == 1 else y_BMRH.view(B, N, T, H).transpose(1, 2)


def attend_row_invariant(q_BTNH: Tensor, contexts: Iterable[tuple[Tensor, Tensor]], rows: Sequence[RowTiles]) -> Tensor:
    """`attend_each` in which a row's bits depend on what it sees alone.

    Args:
        q_BTNH: queries.
        contexts: of each request, keys and values [1, M, S, H].
        rows: of each request, from `Masks.tiles_of`.

    Returns:
        [B, T, N, H].
    """
    mixed = [
        attention_of_tiles(q_NTH, k_1MSH[0], v_1MSH[0], tiles)
        for q_NTH, (k_1MSH, v_1MSH), tiles in zip(q_BTNH.transpose(1, 2).unbind(), contexts, rows, strict=True)
    ]
    return torch.stack(mixed).transpose(1, 2)
