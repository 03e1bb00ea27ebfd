"""What a pass brings to the gated delta rule, and the rule itself, for one row and for all of them in chunks.

    q = q' / sqrt(|q'|^2 + 1e-6) / sqrt(K)      k = k' / sqrt(|k'|^2 + 1e-6)      beta = sigmoid(b)
    g = -exp(A) * softplus(f + bias)            or, with a lower bound: lower_bound * sigmoid(exp(A) * (f + bias))

    S <- exp(g) * S                             each key channel decays, first of all
    u  = beta * (v - S^T k)                     the correction, against the decayed state
    S <- S + k u^T
    o  = S^T q                                  the updated state is read

All in float32. (u, k, exp g) is a row's record: enough to take the step again without q, the gates or the correction.
The chunked form solves one triangular system for the corrections of a chunk.

Source: Kimi-Linear (KDA); spec 3.3, steps 3 to 6. B requests, T rows, N heads, K key and V value channels; M chunks of
C rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.elementwise import sigmoid, softplus, widen

NORM_EPS = 1e-6  # inside the root of the norms of q and k
CHUNK = 16  # rows; unbounded gates take CHUNK weights per row and channel
MOST_DECAY = 10.0  # per row, as |g|: up to here a chunk's weights are products of factors that float32 holds


class DeltaGate(NamedTuple):
    """The parameters of the decay, float32; a lower bound (below 0) chooses the bounded form."""

    a_log_N: Tensor
    dt_bias_NK: Tensor
    lower_bound: float | None


class DeltaInputs(NamedTuple):
    """One layer's projections of the rows of a pass, in the model's dtype; parts of wider tensors are fine.

    q, k and v come out of the short convolution, not normed; f and b are the logits of the decay and of beta.
    """

    q_BTNK: Tensor
    k_BTNK: Tensor
    v_BTNV: Tensor
    f_BTNK: Tensor
    b_BTN: Tensor


class DeltaRows(NamedTuple):
    """The same rows as the rule reads them, float32: normed, with g, the logarithm of the decay, and beta."""

    q_BTNK: Tensor
    k_BTNK: Tensor
    v_BTNV: Tensor
    g_BTNK: Tensor
    beta_BTN: Tensor


def delta_rows(inputs: DeltaInputs, gate: DeltaGate) -> DeltaRows:
    """Norm queries and keys, and turn logits into gates."""
    f_BTNK = widen(inputs.f_BTNK) + gate.dt_bias_NK
    rate_N1 = gate.a_log_N.exp().unsqueeze(-1)
    if gate.lower_bound is None:
        g_BTNK = -rate_N1 * softplus(f_BTNK)
    else:
        g_BTNK = gate.lower_bound * sigmoid(rate_N1 * f_BTNK)
    q_BTNK = _unit(inputs.q_BTNK) * inputs.q_BTNK.shape[-1] ** -0.5
    return DeltaRows(q_BTNK, _unit(inputs.k_BTNK), widen(inputs.v_BTNV), g_BTNK, sigmoid(inputs.b_BTN))


def without_padding(rows: DeltaRows, lengths_B: Tensor) -> DeltaRows:
    """Rows past each request's length as rows that change nothing: no decay, no key, nothing to correct."""
    is_padding_BT = torch.arange(rows.q_BTNK.shape[1], device=lengths_B.device) >= lengths_B.unsqueeze(1)
    # No product with 0: padding may hold anything, NaN included.
    q, k, v, g = (values.masked_fill(is_padding_BT[..., None, None], 0.0) for values in rows[:4])
    return DeltaRows(q, k, v, g, rows.beta_BTN.masked_fill(is_padding_BT.unsqueeze(-1), 0.0))


def step_row(rows: DeltaRows, t: int, state_BNKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One row of each request: outputs and corrections, [B, N, V], and the new state.

    Products and sums stand in place of matrix products: a row's bits must not depend on how many requests there are.
    """
    q_BNK1, k_BNK1, decay_BNK1 = (
        rows.q_BTNK[:, t, :, :, None],
        rows.k_BTNK[:, t, :, :, None],
        rows.g_BTNK[:, t].exp()[..., None],
    )
    state_BNKV = state_BNKV * decay_BNK1
    correction_BNV = rows.beta_BTN[:, t].unsqueeze(-1) * (rows.v_BTNV[:, t] - (state_BNKV * k_BNK1).sum(-2))
    state_BNKV = state_BNKV + k_BNK1 * correction_BNV.unsqueeze(-2)
    return (state_BNKV * q_BNK1).sum(-2), correction_BNV, state_BNKV


def step_chunks(rows: DeltaRows, state_BNKV: Tensor, lower_bound: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """All rows, in chunks: outputs and corrections, [B, T, N, V], and the state behind the last row.

    With G the sums of g within a chunk, E = exp(G), weights exp(G_i - G_j) between rows i >= j, and W and U the
    solutions of one system per chunk, only this is left to do in their order:

        u = U - W S        o = (E * Q) S + weights_qk u        S <- exp(G_last) S + (exp(G_last - G) * K)^T u

    Args:
        rows: of the pass.
        state_BNKV: before it.
        lower_bound: of g; sums of bounded gates can be told apart into factors of a row each.
    """
    num_rows = rows.q_BTNK.shape[1]
    padding = -num_rows % CHUNK
    q, k, v, g = (_chunks(values, padding) for values in rows[:4])  # [B, N, M, C, ..]
    beta = _chunks(rows.beta_BTN.unsqueeze(-1), padding)
    sums = g.cumsum(3)
    of_keys, of_queries = _weights(q, k, sums, is_bounded=lower_bound is not None and lower_bound >= -MOST_DECAY)
    decayed = sums.exp()
    # The solver takes the diagonal to be one and reads only what lies below it.
    wanted = beta * torch.cat((v, decayed * k), dim=-1)
    solved = torch.linalg.solve_triangular(beta * of_keys, wanted, upper=False, unitriangular=True)
    from_values, from_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    read = decayed * q
    left = ((sums[:, :, :, -1:] - sums).exp() * k).transpose(3, 4)
    outputs, corrections = [], []
    for chunk in range(q.shape[2]):
        correction = from_values[:, :, chunk] - from_state[:, :, chunk] @ state_BNKV
        outputs.append(read[:, :, chunk] @ state_BNKV + of_queries[:, :, chunk] @ correction)
        state_BNKV = decayed[:, :, chunk, -1].unsqueeze(-1) * state_BNKV + left[:, :, chunk] @ correction
        corrections.append(correction)
    o_BTNV, correction_BTNV = (
        torch.cat(parts, dim=2)[:, :, :num_rows].transpose(1, 2) for parts in (outputs, corrections)
    )
    return o_BTNV, correction_BTNV, state_BNKV


def _chunks(values_BTNX: Tensor, padding: int) -> Tensor:
    """[B, N, M, C, X]; rows that fill the last chunk are zeros, which change nothing."""
    if padding:
        values_BTNX = functional.pad(values_BTNX, (0, 0, 0, 0, 0, padding))
    chunks: Tensor = values_BTNX.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)
    return chunks


def _weights(q: Tensor, k: Tensor, sums: Tensor, *, is_bounded: bool) -> tuple[Tensor, Tensor]:
    """Sums over channels of k_i k_j exp(G_i - G_j) and of q_i k_j exp(G_i - G_j), [.., C, C].

    Above the diagonal, the first may hold anything finite and the second is zero.
    """
    if is_bounded:
        # Both factors stay within float32 when differences are taken to the middle row: exp(10 * 8) and its inverse.
        shifted = sums - sums[:, :, :, CHUNK // 2 : CHUNK // 2 + 1]
        later, earlier = shifted.exp(), (k * (-shifted).exp()).transpose(3, 4)
        return (later * k) @ earlier, ((later * q) @ earlier).tril()
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    # Masked before `exp`: above the diagonal it would overflow.
    between = (sums.unsqueeze(4) - sums.unsqueeze(3)).masked_fill(is_later.unsqueeze(-1), -torch.inf).exp()
    both = (between * k.unsqueeze(3)) @ torch.stack((k, q), dim=-1)
    of_keys, of_queries = both.unbind(-1)
    return of_keys, of_queries


def _unit(x: Tensor) -> Tensor:
    wide = widen(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
