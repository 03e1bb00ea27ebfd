"""The selector's loss: scores between neighbouring candidates, with the true predecessor in every row at once.

In serving the walk feeds each choice into the next row. In training the predecessor is the token that really came
before the label, so all rows are scored in parallel. The candidates are the drafter's own best ids of the moment; a
label that is not among them takes the place of the weakest, so that every row has a right answer.

R rows, C candidates, D width, V vocabulary, S codebook rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.models.drafters.dflash2 import CandidateSelector


@dataclass(frozen=True)
class SelectorRows:
    """What the rows that count bring along.

    Attributes:
        hidden_RD: states after the drafter's final norm; receive a gradient.
        teacher_RD: the target's states that predict the same tokens; needed for the KL and L1 terms.
        labels_R: int64.
        predecessors_R: int64, the token before each label; the anchor for the first row of a block.
        candidates_RC: int64, best ids of the drafter's own logits.
        weights_R: float32 position weights.
        teacher_log_sum_R: float32, log sum exp of the teacher's logits over all ids; needed for the L1 term.
    """

    hidden_RD: Tensor
    teacher_RD: Tensor | None
    labels_R: Tensor
    predecessors_R: Tensor
    candidates_RC: Tensor
    weights_R: Tensor
    teacher_log_sum_R: Tensor | None = None


def with_labels(candidates_RC: Tensor, labels_R: Tensor) -> Tensor:
    """Put each label into its row: where it is missing, the last and weakest candidate makes room."""
    is_missing_R = (candidates_RC != labels_R[:, None]).all(dim=1)
    weakest_R = torch.where(is_missing_R, labels_R, candidates_RC[:, -1])
    return torch.cat((candidates_RC[:, :-1], weakest_R[:, None]), dim=1)


def selector_loss(
    selector: CandidateSelector, rows: SelectorRows, head_VD: Tensor, *, kl: float, ce: float, l1: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the C-way losses.

    Args:
        selector: both codebooks and the projection, trained.
        rows: see above.
        head_VD: the frozen head.
        kl: weight of KL(target || selector), both over the candidates alone.
        ce: weight of cross-entropy to the label.
        l1: weight of sum |p - q| with the target's p over the whole vocabulary: what the selector does not offer has
            q = 0. But for labels that were put in, it is twice the share of drafts that sampling refuses.
    Returns:
        The sum, float32, differentiable; and bool [R], whether the drafter's own candidates hold the label and score it
        best.
    """
    candidates_RC = with_labels(rows.candidates_RC, rows.labels_R)
    head_RCD = head_VD[candidates_RC]
    unary_RC = (head_RCD @ rows.hidden_RD.unsqueeze(-1)).squeeze(-1).float()
    wanted_RS = functional.embedding(rows.predecessors_R, selector.predecessor_codebook)
    wanted_RS = wanted_RS * selector.hidden_projection(rows.hidden_RD)
    offered_RCS = functional.embedding(candidates_RC, selector.successor_codebook)
    log_q_RC = (unary_RC + (offered_RCS @ wanted_RS.unsqueeze(-1)).squeeze(-1).float()).log_softmax(-1)
    is_label_RC = candidates_RC == rows.labels_R[:, None]
    loss = torch.zeros((), dtype=torch.float32, device=log_q_RC.device)
    if ce:
        loss = loss - ce * (rows.weights_R * log_q_RC[is_label_RC]).sum()
    if kl or l1:
        assert rows.teacher_RD is not None, "the KL and L1 terms need the teacher's states"
        teacher_RC = (head_RCD @ rows.teacher_RD.unsqueeze(-1)).squeeze(-1).float()
        if kl:
            log_p_RC = teacher_RC.log_softmax(-1)
            loss = loss + kl * (rows.weights_R * (log_p_RC.exp() * (log_p_RC - log_q_RC)).sum(-1)).sum()
        if l1:
            assert rows.teacher_log_sum_R is not None, "the L1 term needs the teacher's sum over all ids"
            p_RC = (teacher_RC - rows.teacher_log_sum_R.unsqueeze(1)).exp()
            distance_R = (p_RC - log_q_RC.exp()).abs().sum(-1) + (1.0 - p_RC.sum(-1)).clamp(min=0.0)
            loss = loss + l1 * (rows.weights_R * distance_R).sum()
    # Serving never gets a label put among its candidates, so a row that needed it is not right, however it scores.
    is_offered_R = (rows.candidates_RC == rows.labels_R[:, None]).any(dim=1)
    is_right_R = is_offered_R & is_label_RC.gather(1, log_q_RC.argmax(-1, keepdim=True)).squeeze(1)
    return loss, is_right_R
