"""Cross-entropy through a frozen output head without keeping the logits: loss and gradient in one pass over chunks.

For a row h with teacher state g and label y, with q = softmax(W h) and p = softmax(W g):
loss = kl * sum p log(p / q) + ce * (-log q_y), and d loss / d (W h) = (kl + ce) q - kl p - ce onehot(y).
The head is frozen, so each chunk's gradient with respect to h is complete as soon as its logits exist, and they can go.

R rows, D width, V vocabulary, C candidates.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.ops.top_k_tokens import top_k_tokens


def linear_cross_entropy_reference(
    hidden_RD: Tensor,
    teacher_RD: Tensor | None,
    labels_R: Tensor,
    weights_R: Tensor,
    head_VD: Tensor,
    *,
    kl: float,
    ce: float,
) -> Tensor:
    """The definition: the weighted sum of both terms over all rows, float32, logits and all."""
    log_q = (hidden_RD.float() @ head_VD.float().T).log_softmax(-1)
    loss = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
    if kl:
        assert teacher_RD is not None, "the KL term needs the teacher's states"
        log_p = (teacher_RD.float() @ head_VD.float().T).log_softmax(-1)
        loss = loss + kl * (weights_R * (log_p.exp() * (log_p - log_q)).sum(-1)).sum()
    if ce:
        loss = loss + ce * (weights_R * -log_q.gather(1, labels_R[:, None]).squeeze(1)).sum()
    return loss


def _chunk_loss_and_gradient(
    logits_RV: Tensor, teacher_RV: Tensor | None, labels_R: Tensor, weights_R: Tensor, kl: float, ce: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss, its gradient with respect to the logits, and which rows' best id is the label."""
    log_q = logits_RV.float().log_softmax(-1)
    correct = logits_RV.argmax(-1) == labels_R
    loss = torch.zeros((), dtype=torch.float32, device=logits_RV.device)
    gradient = (kl + ce) * log_q.exp()
    if teacher_RV is not None:
        log_p = teacher_RV.float().log_softmax(-1)
        p = log_p.exp()
        loss = loss + kl * (weights_R * (p * (log_p - log_q)).sum(-1)).sum()
        gradient = gradient - kl * p
    if ce:
        loss = loss + ce * (weights_R * -log_q.gather(1, labels_R[:, None]).squeeze(1)).sum()
        gradient = gradient.scatter_add(1, labels_R[:, None], torch.full_like(weights_R[:, None], -ce))
    # In the head's dtype: the next product reads it in that form, and half as many bytes cross memory.
    return loss, (gradient * weights_R[:, None]).to(logits_RV.dtype), correct


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        teacher_RD: Tensor | None,
        labels_R: Tensor,
        weights_R: Tensor,
        head_VD: Tensor,
        kl: float,
        ce: float,
        chunk_rows: int,
        num_candidates: int,
        chunk_function: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        gradients, corrects = [], []
        candidates = [labels_R.new_empty(0 if num_candidates else len(labels_R), num_candidates)]
        for start in range(0, hidden_RD.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            teacher_RV = teacher_RD[rows] @ head_VD.T if teacher_RD is not None and kl else None
            logits_RV = hidden_RD[rows] @ head_VD.T
            loss, gradient_RV, correct = chunk_function(logits_RV, teacher_RV, labels_R[rows], weights_R[rows], kl, ce)
            if num_candidates:
                candidates.append(top_k_tokens(logits_RV, num_candidates)[1])
            total = total + loss
            gradients.append(gradient_RV @ head_VD)
            corrects.append(correct)
        ctx.save_for_backward(torch.cat(gradients) if gradients else torch.zeros_like(hidden_RD))
        correct_R = torch.cat(corrects) if corrects else labels_R.bool()
        candidates_RC = torch.cat(candidates)
        ctx.mark_non_differentiable(correct_R, candidates_RC)
        return total, correct_R, candidates_RC

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_RD,) = ctx.saved_tensors
        return gradient_RD * gradients[0].to(gradient_RD.dtype), *[None] * 9


def linear_cross_entropy(
    hidden_RD: Tensor,
    teacher_RD: Tensor | None,
    labels_R: Tensor,
    weights_R: Tensor,
    head_VD: Tensor,
    *,
    kl: float,
    ce: float,
    chunk_rows: int = 4096,
    num_candidates: int = 0,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of KL to a teacher and cross-entropy to labels, in chunks that never coexist.

    Args:
        hidden_RD: the student's states, in the head's dtype; the only argument that receives a gradient.
        teacher_RD: the target's own states before the head; needed if `kl` is not 0.
        labels_R: int64.
        weights_R: float32, position weights.
        head_VD: frozen head.
        kl: weight of the KL term.
        ce: weight of the cross-entropy term.
        chunk_rows: rows whose logits exist at the same time; memory is about chunk_rows * V * 16 bytes.
        num_candidates: C; how many of the student's best ids to return.
        compiled: fuse the work between the matrix products with torch.compile (GPU).
    Returns:
        The weighted sum (not mean), float32; bool [R], whether the student's best id is the label; and int64 [R, C],
        the student's best ids, descending.
    """
    assert teacher_RD is not None or not kl, "the KL term needs the teacher's states"
    if not compiled:
        rows = (hidden_RD, teacher_RD, labels_R, weights_R, head_VD)
        return _apply(*rows, kl, ce, chunk_rows, num_candidates, _chunk_loss_and_gradient)
    # One shape for the compiler: rows of weight 0 fill the last chunk, instead of a compilation for each remainder.
    missing = -hidden_RD.shape[0] % chunk_rows
    total, correct_R, candidates_RC = _apply(
        functional.pad(hidden_RD, (0, 0, 0, missing)),
        None if teacher_RD is None else functional.pad(teacher_RD, (0, 0, 0, missing)),
        functional.pad(labels_R, (0, missing)),
        functional.pad(weights_R, (0, missing)),
        head_VD,
        kl,
        ce,
        chunk_rows,
        num_candidates,
        _compiled_chunk(),
    )
    return total, correct_R[: labels_R.shape[0]], candidates_RC[: labels_R.shape[0]]


def _apply(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    apply: Any = _LinearCrossEntropy.apply
    result: tuple[Tensor, Tensor, Tensor] = apply(*arguments)
    return result


@functools.cache
def _compiled_chunk() -> Any:
    return torch.compile(_chunk_loss_and_gradient, dynamic=False)
