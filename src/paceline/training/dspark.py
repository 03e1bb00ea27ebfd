"""What DSpark's heads add to the objective: codes of the tokens that really came before, and a foreseen acceptance.

In serving the walk draws a token before it scores the next row. In training the tokens before all rows are known, so
every projection takes all rows at once; only the state of a recurrent head is carried from row to row.

B conversations, A blocks, K drafts, D width, R rank. Rows of a batch: N.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.models.drafters.heads import ConfidenceHead, MarkovHead


def markov_codes(head: MarkovHead, previous_ids_BAK: Tensor, hidden_BAKD: Tensor) -> Tensor:
    """What `markov_w2` is multiplied with for the bias of every draft; the same as `MarkovHead.bias` row by row.

    Args:
        head: of any kind.
        previous_ids_BAK: int64, the token before each draft's label, the anchor first.
        hidden_BAKD: states after the final norm.
    Returns:
        [B, A, K, R].
    """
    embedding_BAKR: Tensor = head.markov_w1(previous_ids_BAK)
    if head.gate_proj is not None:
        gate_BAKR = torch.sigmoid(head.gate_proj(torch.cat((hidden_BAKD, embedding_BAKR), dim=-1)))
        return gate_BAKR * embedding_BAKR
    if head.joint_proj is None:
        return embedding_BAKR
    rank = embedding_BAKR.shape[-1]
    of_state, of_rest = head.joint_proj.weight.split((rank, head.joint_proj.weight.shape[1] - rank), dim=1)
    rest = functional.linear(torch.cat((embedding_BAKR, hidden_BAKD), dim=-1), of_rest, head.joint_proj.bias)
    state_BAR = torch.zeros_like(embedding_BAKR[:, :, 0])
    codes = []
    for k in range(hidden_BAKD.shape[2]):
        kept_BAR, new_BAR, out_BAR = (functional.linear(state_BAR, of_state) + rest[:, :, k]).chunk(3, dim=-1)
        kept_BAR = torch.sigmoid(kept_BAR)
        state_BAR = kept_BAR * state_BAR + (1 - kept_BAR) * torch.tanh(new_BAR)
        codes.append(torch.tanh(out_BAR))
    return torch.stack(codes, dim=2)


def confidence_loss(
    head: ConfidenceHead,
    hidden_ND: Tensor,
    embedding_NR: Tensor | None,
    acceptance_N: Tensor,
    weights_N: Tensor,
) -> Tensor:
    """Weighted sum of the binary cross-entropy between the head's estimate and what sampling would accept.

    The head alone learns from it: its inputs are detached, since a network that makes its own acceptance foreseeable
    drafts worse than one that is left alone. The target of the estimate is a number, not a path for a gradient.

    Args:
        head: reads the previous token's embedding or not.
        hidden_ND: states after the final norm.
        embedding_NR: `markov_w1` of the tokens before the labels.
        acceptance_N: float32, sum min(p, q) at temperature 1, bias included in q.
        weights_N: float32.
    """
    read_NR = None if embedding_NR is None or not head.reads_markov else embedding_NR.detach()
    logits_N = head.logits(hidden_ND.detach(), read_NR)
    return functional.binary_cross_entropy_with_logits(
        logits_N, acceptance_N.detach(), weight=weights_N, reduction="sum"
    )
