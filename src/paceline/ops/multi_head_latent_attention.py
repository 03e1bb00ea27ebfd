"""Multi-head latent attention over one cached row per token, [c | k_r], that serves all heads.

    explicit   k = [W_uk c | k_r], v = W_uv c per head;    softmax(s q . k) v        cheaper over a whole sequence
    absorbed   q' = [W_uk^T q_n | q_r];    W_uv (softmax(s q' . [c | k_r]) c)        cheaper over a cache

Both are the same function and round differently. s = (P + R')^-1/2 counts both parts of an explicit query, with
rotation or without: here nothing is turned. `paged_latent_attention` is the middle of the absorbed form for the rows of
a step, over rows in blocks.

Source: DeepSeek-V2 (arXiv 2405.04434, 2.1); Kimi-Linear uses it without positions, spec 3.4. B requests, T query rows,
N heads, S cached rows, P own and R' shared channels of a query (Q = P + R'), R latent channels, X = R + R' of a cached
row, V value channels, J blocks of a request's table.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.attention import attention_row_invariant
from paceline.ops.elementwise import widen
from paceline.ops.linear import linear_row_invariant

Arithmetic = Literal[
    "plain", "packed", "native", "quantized", "int8", "row_invariant", "fused"
]  # as `ops/linear.py`; nothing here can be packed


def split_expansion(weight_OR: Tensor, *, num_heads: int, nope_size: int) -> tuple[Tensor, Tensor]:
    """`kv_b_proj` as each head's key and value matrices, [N, P, R] and [N, V, R]: views.

    Args:
        weight_OR: [N * (P + V), R]; a head's key rows, then its value rows.
        num_heads: N.
        nope_size: P.
    """
    heads_NOR = weight_OR.unflatten(0, (num_heads, -1))
    return heads_NOR[:, :nope_size], heads_NOR[:, nope_size:]


def absorb_queries(q_BTNQ: Tensor, key_NPR: Tensor, *, mode: Arithmetic = "plain") -> Tensor:
    """Turn queries for explicit keys into queries for cached rows, [B, T, N, X].

    Args:
        q_BTNQ: a head's own channels, then those that meet the shared key.
        key_NPR: each head's key matrix.
        mode: arithmetic of the products.
    """
    own_size = key_NPR.shape[1]
    own_BTNR = _per_head(q_BTNQ[..., :own_size], key_NPR.transpose(1, 2), mode)
    return torch.cat((own_BTNR, q_BTNQ[..., own_size:]), dim=-1)


def expand_values(mixed_BTNR: Tensor, value_NVR: Tensor, *, mode: Arithmetic = "plain") -> Tensor:
    """Turn mixtures of latents into mixtures of values, [B, T, N, V]."""
    return _per_head(mixed_BTNR, value_NVR, mode)


def explicit_latent_attention_reference(
    q_BTNQ: Tensor, latents_BSX: Tensor, key_NPR: Tensor, value_NVR: Tensor, visible: Tensor
) -> Tensor:
    """The definition, in float32 throughout, rounded once."""
    latent_size = key_NPR.shape[2]
    latents, shared = widen(latents_BSX[..., :latent_size]), widen(latents_BSX[..., latent_size:])
    k_BNSP = torch.einsum("bsr,npr->bnsp", latents, widen(key_NPR))
    v_BNSV = torch.einsum("bsr,nvr->bnsv", latents, widen(value_NVR))
    k_BNSQ = torch.cat((k_BNSP, shared.unsqueeze(1).expand(-1, k_BNSP.shape[1], -1, -1)), dim=-1)
    scores_BNTS = torch.einsum("btnq,bnsq->bnts", widen(q_BTNQ), k_BNSQ) * q_BTNQ.shape[-1] ** -0.5
    weights_BNTS = scores_BNTS.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bnts,bnsv->btnv", weights_BNTS, v_BNSV).to(q_BTNQ.dtype)


def explicit_latent_attention(
    q_BTNQ: Tensor, latents_BSX: Tensor, key_NPR: Tensor, value_NVR: Tensor, *, visible: Tensor | None
) -> Tensor:
    """Attention with keys and values of every head, through torch's fused kernels.

    Args:
        q_BTNQ: queries, any float dtype.
        latents_BSX: rows of the same dtype, normed latents first.
        key_NPR: each head's key matrix.
        value_NVR: each head's value matrix.
        visible: bool, broadcastable to [B, 1, T, S]. None: the queries are those of the last T rows, and each sees the
            rows up to its own.
    Returns:
        [B, T, N, V] in the queries' dtype. Differentiable.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    _check_widths(q_BTNQ, latents_BSX, key_NPR.shape[1] + latents_BSX.shape[2] - key_NPR.shape[2])
    latent_size = key_NPR.shape[2]
    latents_BSR, shared_BSX = latents_BSX[..., :latent_size], latents_BSX[..., latent_size:]
    k_BNSP = torch.einsum("bsr,npr->bnsp", latents_BSR, key_NPR)
    v_BNSV = torch.einsum("bsr,nvr->bnsv", latents_BSR, value_NVR)
    k_BNSQ = torch.cat((k_BNSP, shared_BSX.unsqueeze(1).expand(-1, k_BNSP.shape[1], -1, -1)), dim=-1)
    num_rows, num_keys = q_BTNQ.shape[1], latents_BSX.shape[1]
    is_whole = visible is None and num_rows == num_keys
    mask = None if is_whole else _last_rows(num_rows, num_keys, q_BTNQ.device) if visible is None else visible
    # Fused kernels want values as wide as keys; channels of zeros make no difference.
    query_size, value_size = q_BTNQ.shape[3], value_NVR.shape[1]
    width = max(query_size, value_size)
    q_BNTW, k_BNSW, v_BNSW = (
        functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
        for x in (q_BTNQ.transpose(1, 2), k_BNSQ, v_BNSV)
    )
    mixed_BNTW = functional.scaled_dot_product_attention(
        q_BNTW, k_BNSW, v_BNSW, attn_mask=mask, is_causal=is_whole, scale=query_size**-0.5
    )
    return mixed_BNTW[..., :value_size].transpose(1, 2)


def absorbed_latent_attention_reference(
    q_BTNX: Tensor, latents_BSX: Tensor, visible: Tensor, value_size: int, scale: float
) -> Tensor:
    """The definition, in float32."""
    latents_BSX = widen(latents_BSX)
    scores_BNTS = torch.einsum("btnx,bsx->bnts", widen(q_BTNX), latents_BSX) * scale
    weights_BNTS = scores_BNTS.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bnts,bsr->btnr", weights_BNTS, latents_BSX[..., :value_size]).to(q_BTNX.dtype)


def absorbed_latent_attention(
    q_BTNX: Tensor,
    latents_BSX: Tensor,
    *,
    visible: Tensor | None,
    value_size: int,
    scale: float,
    mode: Arithmetic = "plain",
) -> Tensor:
    """Attention over cached rows as they are; `expand_values` turns the result into values.

    Args:
        q_BTNX: queries from `absorb_queries`, not scaled.
        latents_BSX: rows in the same dtype; a view of a cache is fine.
        visible: as for `explicit_latent_attention`.
        value_size: R; the mixture is of the first R channels.
        scale: of the scores: (P + R')^-1/2.
        mode: "row_invariant" gives a row bits that depend on the rows it sees alone, and reads nothing else.
    Returns:
        [B, T, N, R] in the queries' dtype.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    _check_widths(q_BTNX, latents_BSX, latents_BSX.shape[2])
    num_requests, num_rows, num_heads, width = q_BTNX.shape
    num_keys = latents_BSX.shape[1]
    if visible is None:
        visible = _last_rows(num_rows, num_keys, q_BTNX.device)
    if mode == "row_invariant":
        # That form divides by the root of the rows' width, which is not the width of an explicit query.
        q_BNTX = (q_BTNX * (scale * math.sqrt(width))).transpose(1, 2)
        visible_BTS = visible.expand(num_requests, 1, num_rows, num_keys).squeeze(1)
        mixed = [
            attention_row_invariant(q_BNTX[b], latents_BSX[b, None], latents_BSX[b, None], visible_BTS[b])
            for b in range(num_requests)
        ]
        return torch.stack(mixed).transpose(1, 2)[..., :value_size]
    # All heads read the same rows, so they are query rows of one head: one pass over the rows. Values keep their width,
    # which fused kernels want equal to that of the keys.
    q_B1RX = q_BTNX.reshape(num_requests, 1, num_rows * num_heads, width)
    if visible.shape[-2] != 1:
        visible = visible.repeat_interleave(num_heads, dim=-2)
    rows_B1SX = latents_BSX.unsqueeze(1)
    mixed_B1RX = functional.scaled_dot_product_attention(q_B1RX, rows_B1SX, rows_B1SX, attn_mask=visible, scale=scale)
    return mixed_B1RX.view(num_requests, num_rows, num_heads, width)[..., :value_size]


def _last_rows(num_rows: int, num_keys: int, device: torch.device) -> Tensor:
    """[T, S]: each of the last T rows sees the rows up to its own."""
    return torch.ones(num_rows, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_rows)


def _per_head(x_BTNI: Tensor, weight_NOI: Tensor, mode: Arithmetic) -> Tensor:
    if mode == "row_invariant":
        heads = zip(x_BTNI.unbind(-2), weight_NOI.unbind(0), strict=True)
        return torch.stack([linear_row_invariant(x, weight, None) for x, weight in heads], dim=-2)
    return torch.einsum("btni,noi->btno", x_BTNI, weight_NOI)


def _check_widths(q_BTNX: Tensor, latents_BSX: Tensor, width: int) -> None:
    if q_BTNX.dim() != 4 or q_BTNX.shape[3] != width:
        raise ShapeError("q", expected=f"[B, T, N, {width}]", found=q_BTNX.shape)
    if latents_BSX.dim() != 3 or latents_BSX.shape[0] != q_BTNX.shape[0]:
        raise ShapeError("latents", expected=f"[{q_BTNX.shape[0]}, S, X]", found=latents_BSX.shape)
