"""Scaled dot-product attention with grouped heads, for one request or a padded batch.

B requests, T query rows, S keys, N query heads, M key/value heads (N = M * G), H head size. Keys and values are laid
out head-major, [.., M, S, H], because that is how a cache stores them: a request's context is a view, never a copy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

QUERY_TILE = 8  # query rows per call in row-invariant arithmetic
KEY_TILE = 64  # its numbers of keys are multiples of this
_ALIGNED_WIDTH = 16  # its head sizes are multiples of this: odd strides change the order of summation
_ALIGNED_KEYS = 16  # torch copies a bias whose rows do not begin at multiples of this


def attention_reference(
    q_BNTH: Tensor, k_BMSH: Tensor, v_BMSH: Tensor, visible: Tensor | None, sink_N: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v in float32; `visible` is bool, broadcastable to [B, N, T, S]. Returns [B, N, T, H].

    A sink is one more key per head, of that score and with the value 0: it takes weight and gives nothing.
    """
    group = q_BNTH.shape[1] // k_BMSH.shape[1]
    k = k_BMSH.float().repeat_interleave(group, dim=1)
    v = v_BMSH.float().repeat_interleave(group, dim=1)
    scores = q_BNTH.float() @ k.transpose(-1, -2) * q_BNTH.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sink_N is not None:
        sinks = sink_N.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    mixed: Tensor = scores.softmax(-1)[..., : v.shape[-2]] @ v
    return mixed.to(q_BNTH.dtype)


def attention(
    q_BNTH: Tensor,
    k_BMSH: Tensor,
    v_BMSH: Tensor,
    *,
    visible: Tensor | None = None,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Attention through torch's fused kernels; with a sink, which those do not know, through the reference.

    Args:
        q_BNTH: queries, any float dtype.
        k_BMSH: keys; M divides N.
        v_BMSH: values.
        visible: bool, broadcastable to [B, 1, T, S]; true where a query row may see a key. None shows everything.
        sink_N: one logit per query head that joins the softmax's denominator.
    Returns:
        [B, N, T, H] in q's dtype.
    """
    if sink_N is not None:
        return attention_reference(q_BNTH, k_BMSH, v_BMSH, visible, sink_N)
    B, N, T, H = q_BNTH.shape
    M, S = k_BMSH.shape[1], k_BMSH.shape[2]
    if M == N:
        return functional.scaled_dot_product_attention(q_BNTH, k_BMSH, v_BMSH, attn_mask=visible)
    # The G heads that share keys become extra query rows: one pass over the keys instead of G, on every back end.
    q = q_BNTH.reshape(B, M, (N // M) * T, H)
    if visible is not None and visible.shape[-2] != 1:
        visible = visible.expand(*visible.shape[:-2], T, S).repeat(*([1] * (visible.dim() - 2)), N // M, 1)
    return functional.scaled_dot_product_attention(q, k_BMSH, v_BMSH, attn_mask=visible).reshape(B, N, T, H)


def bias_of(visible_BTS: Tensor, num_copies: int, dtype: torch.dtype) -> Tensor:
    """A mask in the form that fused kernels read, for `attention_with_bias` of every layer of a pass.

    From a bool mask torch makes the same numbers anew at each call, in some five operations.

    Args:
        visible_BTS: bool, true where a query row may see a key; each row sees at least one.
        num_copies: G, query heads that share keys.
        dtype: of the queries.
    Returns:
        [B, 1, G * T, S], 0 or -inf.
    """
    rows_BRS = visible_BTS.repeat(1, num_copies, 1)
    B, R, S = rows_BRS.shape
    padded = torch.zeros(B, 1, R, S + -S % _ALIGNED_KEYS, dtype=dtype, device=visible_BTS.device)
    return padded[..., :S].masked_fill_(~rows_BRS.unsqueeze(1), -torch.inf)


def attention_with_bias(q_BNTH: Tensor, k_BMSH: Tensor, v_BMSH: Tensor, bias_B1RS: Tensor) -> Tensor:
    """`attention` with a mask from `bias_of`, to the same bits.

    Args:
        q_BNTH: queries, in the bias's dtype.
        k_BMSH: keys; N = M * G.
        v_BMSH: values.
        bias_B1RS: for R = G * T rows.
    Returns:
        [B, N, T, H].
    """
    B, _, _, H = q_BNTH.shape
    q_BMRH = q_BNTH.reshape(B, k_BMSH.shape[1], -1, H)
    mixed = functional.scaled_dot_product_attention(q_BMRH, k_BMSH, v_BMSH, attn_mask=bias_B1RS)
    return mixed.reshape(q_BNTH.shape)  # some fused kernels give heads and rows in the other order


def causal_attention(q_BNTH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor) -> Tensor:
    """Attention of whole sequences where row t sees keys 0..t; right padding is invisible to every real row."""
    return functional.scaled_dot_product_attention(q_BNTH, k_BMTH, v_BMTH, is_causal=True, enable_gqa=True)


class RowTile(NamedTuple):
    """Query rows that go through one call of row-invariant attention.

    Attributes:
        first: of these rows.
        end: behind the last.
        num_keys: that they look at, a multiple of `KEY_TILE`.
        bias_RS: 0 or -inf for each of G * `QUERY_TILE` rows.
    """

    first: int
    end: int
    num_keys: int
    bias_RS: Tensor


class RowTiles(NamedTuple):
    """A mask as `attention_of_tiles` takes it.

    Attributes:
        visible_TS: bool, as it was given.
        tiles: of all rows, in order.
    """

    visible_TS: Tensor
    tiles: tuple[RowTile, ...]


def row_tiles(visible_TS: Tensor, num_copies: int, dtype: torch.dtype) -> RowTiles:
    """Cut query rows into tiles, once for every layer of a pass.

    Args:
        visible_TS: bool; each row sees at least one key.
        num_copies: G, query heads that share keys.
        dtype: of the queries.
    """
    T, S = visible_TS.shape
    padded_TS = functional.pad(visible_TS, (0, -S % KEY_TILE))
    last_T = (padded_TS * torch.arange(1, padded_TS.shape[1] + 1, device=padded_TS.device)).amax(dim=1).tolist()
    tiles_T = [-(-int(last) // KEY_TILE) for last in last_T]
    tiles = []
    first = 0
    while first < T:
        end = first + 1
        while end < min(T, first + QUERY_TILE) and tiles_T[end] == tiles_T[first]:
            end += 1
        num_keys = tiles_T[first] * KEY_TILE
        visible = functional.pad(padded_TS[first:end, :num_keys], (0, 0, 0, QUERY_TILE - (end - first)))
        visible[end - first :, 0] = True  # rows that fill the tile must see something, or their softmax is NaN
        # From a bool mask torch would make the same numbers at each call.
        bias_RS = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        tiles.append(RowTile(first, end, num_keys, bias_RS.repeat(num_copies, 1)))
        first = end
    return RowTiles(visible_TS, tuple(tiles))


def attention_row_invariant(q_NTH: Tensor, k_MSH: Tensor, v_MSH: Tensor, visible_TS: Tensor) -> Tensor:
    """Attention of one request in which a row's bits depend on what the row sees alone: not on T, S or its neighbours.

    Args:
        q_NTH: queries of one request.
        k_MSH: keys.
        v_MSH: values.
        visible_TS: bool; each row sees at least one key.
    Returns:
        [N, T, H] in q's dtype.
    """
    tiles = row_tiles(visible_TS, q_NTH.shape[0] // k_MSH.shape[0], q_NTH.dtype)
    return attention_of_tiles(q_NTH, k_MSH, v_MSH, tiles)


def attention_of_tiles(q_NTH: Tensor, k_MSH: Tensor, v_MSH: Tensor, rows: RowTiles) -> Tensor:
    """`attention_row_invariant` for a mask that was cut already.

    The kernel always sees one of few shapes: tiles of exactly `QUERY_TILE` query rows over a multiple of `KEY_TILE`
    keys that follows from the last key a row sees. Rows whose multiples differ go into different tiles. Keys that a
    row cannot see add an exact zero.

    Args:
        q_NTH: queries of one request.
        k_MSH: keys.
        v_MSH: values.
        rows: from `row_tiles`, for this T, S and N / M.
    Returns:
        [N, T, H] in q's dtype.
    """
    N, T, H = q_NTH.shape
    M, S, _ = k_MSH.shape
    assert rows.visible_TS.shape == (T, S), "a mask is cut for its own rows and keys"
    unsound_S = _unsound_keys(k_MSH, v_MSH)
    if unsound_S is not None:
        k_MSH, v_MSH = (each.masked_fill(unsound_S[:, None], 0.0) for each in (k_MSH, v_MSH))
    odd = -H % _ALIGNED_WIDTH
    k_MSH, v_MSH = (torch.constant_pad_nd(each, (0, odd, 0, -S % KEY_TILE)) for each in (k_MSH, v_MSH))
    mixed = []
    for first, end, num_keys, bias_RS in rows.tiles:
        q = torch.constant_pad_nd(q_NTH[:, first:end], (0, odd, 0, QUERY_TILE - (end - first)))
        y = functional.scaled_dot_product_attention(
            q.reshape(1, M, -1, H + odd),
            k_MSH[None, :, :num_keys],
            v_MSH[None, :, :num_keys],
            attn_mask=bias_RS,
            scale=H**-0.5,
        )
        mixed.append(y.reshape(N, QUERY_TILE, H + odd)[:, : end - first, :H])
    y_NTH = torch.cat(mixed, dim=1)
    if unsound_S is None:
        return y_NTH
    return y_NTH.masked_fill((rows.visible_TS & unsound_S).any(dim=1)[:, None], float("nan"))


def _unsound_keys(k_MSH: Tensor, v_MSH: Tensor) -> Tensor | None:
    """Keys with NaN or infinity, bool [S]; None where there are none.

    A key that a row cannot see may be anything, and 0 * NaN is NaN: zeros take the place of all such keys, and rows
    that do see one become NaN at the end.
    """
    if math.isfinite((k_MSH.sum() + v_MSH.sum()).item()):  # one bad number spoils it; one that overflows is looked into
        return None
    return ~(torch.isfinite(k_MSH).all(-1).all(0) & torch.isfinite(v_MSH).all(-1).all(0))
