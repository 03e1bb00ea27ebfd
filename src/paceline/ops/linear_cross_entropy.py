"""Losses through an output head without keeping the logits: value and gradient in one pass over chunks of rows.

For a row h with teacher state g and label y, with z = W h + M c, q = softmax(z) and p = softmax(W' g):
loss = kl * sum p log(p / q) + ce * (-log q_y) + l1 * sum |p - q|, and
d loss / d z = (kl + ce) q - kl p - ce onehot(y) + l1 q (s - sum q s), with s = sign(q - p).
Each chunk's gradients are complete as soon as its logits exist, and the logits can go. `M c` is a low-rank bias, such
as a Markov head's; W' is W unless the student scores other ids, or with other weights, than the teacher.

R rows, D width, V vocabulary, K rank of the bias, C candidates.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.top_k_tokens import group_maxima, top_k_tokens


class LowRankBias(NamedTuple):
    """A trained bias on the logits, table @ code; both receive a gradient."""

    code_RK: Tensor  # in the head's dtype
    table_VK: Tensor


class RowLosses(NamedTuple):
    """What a pass over the rows gives."""

    loss: Tensor  # float32 scalar, differentiable: the weighted sum
    correct_R: Tensor  # bool, whether the student's best id is the label
    candidates_RC: Tensor  # int64, the student's best ids, descending
    acceptance_R: Tensor  # float32 sum of min(p, q) at temperature 1; empty unless asked for
    teacher_log_sum_R: Tensor  # float32 log sum exp(W' g); empty unless candidates and the L1 term are asked for


def linear_cross_entropy_reference(
    hidden_RD: Tensor,
    teacher_RD: Tensor | None,
    labels_R: Tensor,
    weights_R: Tensor,
    head_VD: Tensor,
    *,
    kl: float,
    ce: float,
    l1: float = 0.0,
    bias: LowRankBias | None = None,
    teacher_head_VD: Tensor | None = None,
) -> Tensor:
    """The definition: the weighted sum of the terms over all rows, float32, logits and all."""
    logits = hidden_RD.float() @ head_VD.float().T
    if bias is not None:
        logits = logits + bias.code_RK.float() @ bias.table_VK.float().T
    log_q = logits.log_softmax(-1)
    loss = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
    if kl or l1:
        assert teacher_RD is not None, "the KL and L1 terms need the teacher's states"
        log_p = (teacher_RD.float() @ (head_VD if teacher_head_VD is None else teacher_head_VD).float().T).log_softmax(
            -1
        )
        loss = loss + kl * (weights_R * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()
        loss = loss + l1 * (weights_R * (log_p.exp() - log_q.exp()).abs().sum(-1)).sum()
    if ce:
        loss = loss + ce * (weights_R * -log_q.gather(1, labels_R[:, None]).squeeze(1)).sum()
    return loss


class _Terms(NamedTuple):
    """Weights of the terms, and whether somebody wants sum min(p, q), or the best ids."""

    kl: float
    ce: float
    l1: float
    wants_acceptance: bool
    wants_candidates: bool


def _chunk_loss_and_gradient(
    logits_RV: Tensor,
    teacher_RV: Tensor | None,
    labels_R: Tensor,
    weights_R: Tensor,
    kl: float,
    ce: float,
    l1: float,
    wants_acceptance: bool,
    wants_candidates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weighted loss and its gradient with respect to the logits; figures of the rows; group maxima.

    The figures: which best ids are right, sum min(p, q), log sum exp of the teacher's logits.
    """
    log_q = logits_RV.float().log_softmax(-1)
    correct = logits_RV.argmax(-1) == labels_R
    loss = torch.zeros((), dtype=torch.float32, device=logits_RV.device)
    acceptance, teacher_log_sum = weights_R.new_zeros(0), weights_R.new_zeros(0)
    q = log_q.exp()
    gradient = (kl + ce) * q
    if teacher_RV is not None:
        log_p = teacher_RV.float().log_softmax(-1)
        p = log_p.exp()
        if kl:
            loss = loss + kl * (weights_R * (p * (log_p - log_q)).sum(-1)).sum()
            gradient = gradient - kl * p
        if l1 or wants_acceptance:
            difference = q - p
            distance = difference.abs().sum(-1)
            acceptance = (1 - distance / 2).clamp(0.0, 1.0)
            if l1:
                loss = loss + l1 * (weights_R * distance).sum()
                sign = difference.sign()
                gradient = gradient + l1 * q * (sign - (q * sign).sum(-1, keepdim=True))
                if wants_candidates:
                    teacher_log_sum = teacher_RV.float().logsumexp(-1)
    if ce:
        loss = loss + ce * (weights_R * -log_q.gather(1, labels_R[:, None]).squeeze(1)).sum()
        gradient = gradient.scatter_add(1, labels_R[:, None], torch.full_like(weights_R[:, None], -ce))
    maxima_RG = group_maxima(logits_RV) if wants_candidates else logits_RV.new_empty(0)
    # In the head's dtype: the next product reads it in that form, and half as many bytes cross memory.
    gradient = (gradient * weights_R[:, None]).to(logits_RV.dtype)
    return loss, gradient, correct, acceptance, teacher_log_sum, maxima_RG


class _Options(NamedTuple):
    """How to go through the rows."""

    terms: _Terms
    chunk_rows: int
    num_candidates: int
    chunk_function: Any


class _LinearCrossEntropy(torch.autograd.Function):
    """Inputs: hidden, teacher, labels, weights, head, teacher's head, code, table, options."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        teacher_RD: Tensor | None,
        labels_R: Tensor,
        weights_R: Tensor,
        head_VD: Tensor,
        teacher_head_VD: Tensor | None,
        code_RK: Tensor | None,
        table_VK: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        # The bias is a few more columns of the head: one product gives both, summed in float32.
        states_RE, columns_VE, width = hidden_RD, head_VD, hidden_RD.shape[1]
        if code_RK is not None and table_VK is not None:
            states_RE = torch.cat((hidden_RD, code_RK), dim=1)
            columns_VE = torch.cat((head_VD, table_VK.to(head_VD.dtype)), dim=1)
        trained = slice(0 if ctx.needs_input_grad[4] else width, columns_VE.shape[1])
        on_columns_VE = columns_VE.new_zeros(columns_VE[:, trained].shape, dtype=torch.float32)
        teachers_VD = head_VD if teacher_head_VD is None else teacher_head_VD
        num_candidates = options.num_candidates
        total = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        on_states, corrects, acceptances = [states_RE[:0]], [labels_R[:0].bool()], [weights_R[:0]]
        log_sums = [weights_R[:0]]
        candidates = [labels_R.new_empty(0 if num_candidates else len(labels_R), num_candidates)]
        for start in range(0, hidden_RD.shape[0], options.chunk_rows):
            rows = slice(start, start + options.chunk_rows)
            teacher_RV = teacher_RD[rows] @ teachers_VD.T if teacher_RD is not None else None
            logits_RV = states_RE[rows] @ columns_VE.T
            loss, gradient_RV, correct_R, acceptance_R, log_sum_R, maxima_RG = options.chunk_function(
                logits_RV, teacher_RV, labels_R[rows], weights_R[rows], *options.terms
            )
            if num_candidates:
                candidates.append(top_k_tokens(logits_RV, num_candidates, maxima_RG=maxima_RG)[1])
            total = total + loss
            on_states.append(gradient_RV @ columns_VE)
            if on_columns_VE.shape[1]:
                on_columns_VE += gradient_RV.T @ states_RE[rows, trained]
            corrects.append(correct_R)
            acceptances.append(acceptance_R)
            log_sums.append(log_sum_R)
        ctx.save_for_backward(torch.cat(on_states), on_columns_VE)
        ctx.width, ctx.head_dtype = width, head_VD.dtype
        ctx.table_dtype = None if table_VK is None else table_VK.dtype
        correct_R, candidates_RC, acceptance_R = torch.cat(corrects), torch.cat(candidates), torch.cat(acceptances)
        log_sum_R = torch.cat(log_sums)
        ctx.mark_non_differentiable(correct_R, candidates_RC, acceptance_R, log_sum_R)
        return total, correct_R, candidates_RC, acceptance_R, log_sum_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        on_states_RE, on_columns_VE = ctx.saved_tensors
        width, scale = ctx.width, gradients[0]
        on_states_RE = on_states_RE * scale.to(on_states_RE.dtype)
        on_head_VD = on_code_RK = on_table_VK = None
        if ctx.needs_input_grad[4]:
            on_head_VD = (on_columns_VE[:, :width] * scale).to(ctx.head_dtype)
        if ctx.table_dtype is not None:
            on_code_RK = on_states_RE[:, width:]
            rank = on_code_RK.shape[1]
            on_table_VK = (on_columns_VE[:, on_columns_VE.shape[1] - rank :] * scale).to(ctx.table_dtype)
        return on_states_RE[:, :width], None, None, None, on_head_VD, None, on_code_RK, on_table_VK, None


def linear_cross_entropy(
    hidden_RD: Tensor,
    teacher_RD: Tensor | None,
    labels_R: Tensor,
    weights_R: Tensor,
    head_VD: Tensor,
    *,
    kl: float,
    ce: float,
    l1: float = 0.0,
    bias: LowRankBias | None = None,
    teacher_head_VD: Tensor | None = None,
    chunk_rows: int = 4096,
    num_candidates: int = 0,
    wants_acceptance: bool = False,
    compiled: bool = False,
) -> RowLosses:
    """Weighted sum of KL and L1 to a teacher and cross-entropy to labels, in chunks that never coexist.

    Args:
        hidden_RD: the student's states, in the head's dtype; receive a gradient.
        teacher_RD: the target's own states before the head; needed for `kl`, `l1` and `wants_acceptance`.
        labels_R: int64.
        weights_R: float32, position weights.
        head_VD: the student's head; receives a gradient if it requires one.
        kl: weight of the KL term.
        ce: weight of the cross-entropy term.
        l1: weight of the L1 distance, which is twice the total variation.
        bias: added to the student's logits, never to the teacher's.
        teacher_head_VD: scores the same ids as `head_VD` for the teacher; None where the two share one head.
        chunk_rows: rows whose logits exist at the same time; memory is about chunk_rows * V * 16 bytes.
        num_candidates: C; how many of the student's best ids to return.
        wants_acceptance: return sum min(p, q) of every row.
        compiled: fuse the work between the matrix products with torch.compile (GPU).
    Returns:
        The weighted sum (not mean) and the figures of the rows.
    """
    assert teacher_RD is not None or not (kl or l1 or wants_acceptance), "terms that compare need the teacher's states"
    terms = _Terms(kl, ce, l1, wants_acceptance, num_candidates > 0)
    if not (kl or l1 or wants_acceptance):
        teacher_RD = None
    code_RK, table_VK = (None, None) if bias is None else bias
    if not compiled:
        options = _Options(terms, chunk_rows, num_candidates, _chunk_loss_and_gradient)
        return _apply(hidden_RD, teacher_RD, labels_R, weights_R, head_VD, teacher_head_VD, code_RK, table_VK, options)
    # One shape for the compiler: rows of weight 0 fill the last chunk, instead of a compilation for each remainder.
    num_rows = labels_R.shape[0]
    missing = -num_rows % chunk_rows
    found = _apply(
        functional.pad(hidden_RD, (0, 0, 0, missing)),
        None if teacher_RD is None else functional.pad(teacher_RD, (0, 0, 0, missing)),
        functional.pad(labels_R, (0, missing)),
        functional.pad(weights_R, (0, missing)),
        head_VD,
        teacher_head_VD,
        None if code_RK is None else functional.pad(code_RK, (0, 0, 0, missing)),
        table_VK,
        _Options(terms, chunk_rows, num_candidates, _compiled_chunk()),
    )
    return RowLosses(found.loss, *(figure[:num_rows] for figure in found[1:]))


def _apply(*arguments: Any) -> RowLosses:
    apply: Any = _LinearCrossEntropy.apply
    return RowLosses(*apply(*arguments))


@functools.cache
def _compiled_chunk() -> Any:
    return torch.compile(_chunk_loss_and_gradient, dynamic=False)
