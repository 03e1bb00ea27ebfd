"""Scaled dot-product attention with grouped heads, for one request or a padded batch.

B requests, T query rows, S keys, N query heads, M key/value heads (N = M * G), H head size. Keys and values are laid
out head-major, [.., M, S, H], because that is how a cache stores them: a request's context is a view, never a copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

KEY_TILE = 32  # keys summed together in row-invariant arithmetic


def attention_reference(q_BNTH: Tensor, k_BMSH: Tensor, v_BMSH: Tensor, visible: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(H)) v in float32; `visible` is bool, broadcastable to [B, N, T, S]. Returns [B, N, T, H]."""
    group = q_BNTH.shape[1] // k_BMSH.shape[1]
    k = k_BMSH.float().repeat_interleave(group, dim=1)
    v = v_BMSH.float().repeat_interleave(group, dim=1)
    scores = q_BNTH.float() @ k.transpose(-1, -2) * q_BNTH.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    mixed: Tensor = scores.softmax(-1) @ v
    return mixed.to(q_BNTH.dtype)


def attention(q_BNTH: Tensor, k_BMSH: Tensor, v_BMSH: Tensor, *, visible: Tensor | None = None) -> Tensor:
    """Attention through torch's fused kernels.

    Args:
        q_BNTH: queries, any float dtype.
        k_BMSH: keys; M divides N.
        v_BMSH: values.
        visible: bool, broadcastable to [B, 1, T, S]; true where a query row may see a key. None shows everything.
    Returns:
        [B, N, T, H] in q's dtype.
    """
    B, N, T, H = q_BNTH.shape
    M, S = k_BMSH.shape[1], k_BMSH.shape[2]
    if M == N:
        return functional.scaled_dot_product_attention(q_BNTH, k_BMSH, v_BMSH, attn_mask=visible)
    # The G heads that share keys become extra query rows: one pass over the keys instead of G, on every back end.
    q = q_BNTH.reshape(B, M, (N // M) * T, H)
    if visible is not None and visible.shape[-2] != 1:
        visible = visible.expand(*visible.shape[:-2], T, S).repeat(*([1] * (visible.dim() - 2)), N // M, 1)
    return functional.scaled_dot_product_attention(q, k_BMSH, v_BMSH, attn_mask=visible).reshape(B, N, T, H)


def causal_attention(q_BNTH: Tensor, k_BMTH: Tensor, v_BMTH: Tensor) -> Tensor:
    """Attention of whole sequences where row t sees keys 0..t; right padding is invisible to every real row."""
    return functional.scaled_dot_product_attention(q_BNTH, k_BMTH, v_BMTH, is_causal=True, enable_gqa=True)


def attention_row_invariant(q_NTH: Tensor, k_MSH: Tensor, v_MSH: Tensor, visible_TS: Tensor) -> Tensor:
    """Attention of one request where a row's bits do not depend on T, on S beyond what it sees, or on its neighbours.

    Every sum runs over a fixed number of elements of the innermost dimension (H, then `KEY_TILE` keys), and tiles are
    added one after another; keys that a row cannot see add an exact zero.

    Args:
        q_NTH: queries of one request.
        k_MSH: keys.
        v_MSH: values.
        visible_TS: bool; each row sees at least one key.
    Returns:
        [N, T, H] in q's dtype.
    """
    rows = [
        _row_invariant_tile(q, k_MSH, v_MSH, visible)
        for q, visible in zip(q_NTH.split(8, dim=1), visible_TS.split(8), strict=True)
    ]
    return torch.cat(rows, dim=1)


def _row_invariant_tile(q_NTH: Tensor, k_MSH: Tensor, v_MSH: Tensor, visible_TS: Tensor) -> Tensor:
    N, T, H = q_NTH.shape
    M, S, _ = k_MSH.shape
    missing = -S % KEY_TILE
    k = functional.pad(k_MSH.float(), (0, 0, 0, missing))
    v = functional.pad(v_MSH.float(), (0, 0, 0, missing)).transpose(1, 2).contiguous()
    visible = functional.pad(visible_TS, (0, missing))
    q = q_NTH.float().reshape(M, N // M, T, 1, H)
    scores = (q * k[:, None, None]).sum(-1) * H**-0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = weights.masked_fill(~visible, 0.0).reshape(M, N // M, T, -1, KEY_TILE)
    tiles_v = v.reshape(M, H, -1, KEY_TILE)
    tiles_visible = visible.reshape(T, -1, KEY_TILE)
    total = torch.zeros(M, N // M, T, dtype=torch.float32, device=q.device)
    mixed = torch.zeros(M, N // M, T, H, dtype=torch.float32, device=q.device)
    for tile in range(weights.shape[3]):
        weight = weights[:, :, :, tile]
        total = total + weight.sum(-1)
        product = weight[:, :, :, None, :] * tiles_v[:, None, None, :, tile]
        # 0 * NaN is NaN: what lies in slots that no row may see must not matter.
        mixed = mixed + product.masked_fill(~tiles_visible[:, tile, None], 0.0).sum(-1)
    return (mixed / total.unsqueeze(-1)).reshape(N, T, H).to(q_NTH.dtype)
