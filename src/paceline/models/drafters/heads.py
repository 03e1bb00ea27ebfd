"""DSpark's small heads: a logit bias from the token that was just drawn, and an estimate of each row's acceptance.

    vanilla   bias_k = W2 w1[prev_k]
    gated     bias_k = W2 (sigmoid(Wg [h_k; w1[prev_k]] + bg) * w1[prev_k])
    rnn       [a; b; e] = Wj [s_k; w1[prev_k]; h_k] + bj,   bias_k = W2 tanh(e),
              s_k+1 = sigmoid(a) * s_k + (1 - sigmoid(a)) * tanh(b),   s_0 = 0 in every block

`w1` has a row for every target id, `W2` one for every draft id. B requests, K draft tokens, D width, R rank, V draft
vocabulary, C some of its ids.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import MarkovSettings
from paceline.models.embedding import empty_embedding
from paceline.models.layers import Linear


class MarkovHead(nn.Module):
    """Bias on the logits of one row, given the token before it.

    Args:
        settings: kind and rank.
        hidden_size: D.
        target_vocab_size: rows of `markov_w1`.
        draft_vocab_size: rows of `markov_w2`.
    """

    def __init__(
        self, settings: MarkovSettings, *, hidden_size: int, target_vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        rank = settings.rank
        self.markov_w1 = empty_embedding(target_vocab_size, rank)
        self.markov_w2 = Linear(rank, draft_vocab_size)
        is_gated, is_recurrent = settings.kind == "gated", settings.kind == "rnn"
        self.gate_proj = Linear(hidden_size + rank, rank, bias=True) if is_gated else None
        self.joint_proj = Linear(2 * rank + hidden_size, 3 * rank, bias=True) if is_recurrent else None

    def bias(
        self,
        previous_ids_B: Tensor,
        hidden_BD: Tensor,
        state_BR: Tensor | None = None,
        draft_ids_BC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Bias of one row; any number of leading dimensions may take the place of B.

        Args:
            previous_ids_B: int64 target ids of the tokens before the row.
            hidden_BD: the row after the final norm.
            state_BR: what the call for the row before returned; None at a block's first row.
            draft_ids_BC: int64 draft ids whose bias alone is wanted; None for all of them.
        Returns:
            float32 [B, V], or [B, C]; and the state for the next row, None where the head has no memory.
        """
        code_BR, state_BR = self._code(self.markov_w1(previous_ids_B), hidden_BD, state_BR)
        if draft_ids_BC is None:
            everywhere: Tensor = self.markov_w2(code_BR)
            return everywhere.float(), state_BR
        rows_BCR = self.markov_w2.weight[draft_ids_BC].float()
        return (rows_BCR * code_BR.float().unsqueeze(-2)).sum(dim=-1), state_BR

    def _code(self, embedding_BR: Tensor, hidden_BD: Tensor, state_BR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What W2 is multiplied with."""
        if self.gate_proj is not None:
            gate_BR = torch.sigmoid(self.gate_proj(torch.cat((hidden_BD, embedding_BR), dim=-1)))
            return gate_BR * embedding_BR, None
        if self.joint_proj is None:
            return embedding_BR, None
        state_BR = torch.zeros_like(embedding_BR) if state_BR is None else state_BR
        joint = self.joint_proj(torch.cat((state_BR, embedding_BR, hidden_BD), dim=-1))
        kept_BR, new_BR, out_BR = joint.chunk(3, dim=-1)
        kept_BR = torch.sigmoid(kept_BR)
        return torch.tanh(out_BR), kept_BR * state_BR + (1 - kept_BR) * torch.tanh(new_BR)


class ConfidenceHead(nn.Module):
    """Estimate that a row's draft is accepted if those before it are, in float32.

    It may read the token before the row but never the row's own draft: only so may it decide how many drafts are
    verified without biasing the output.

    Args:
        hidden_size: D.
        markov_rank: R of the previous token's Markov embedding; 0 where the head reads hidden rows alone.
    """

    def __init__(self, hidden_size: int, markov_rank: int = 0) -> None:
        super().__init__()
        self.proj = Linear(hidden_size + markov_rank, 1, bias=True)
        self.reads_markov = markov_rank > 0

    def logits(self, hidden_BKD: Tensor, embedding_BKR: Tensor | None = None) -> Tensor:
        """Log-odds of acceptance, float32 [B, K].

        Args:
            hidden_BKD: rows after the final norm.
            embedding_BKR: `markov_w1` of the tokens before them, for a head that reads it.
        """
        rows = [hidden_BKD.float()]
        if self.reads_markov:
            assert embedding_BKR is not None, "this head was trained on the previous token's embedding"
            rows.append(embedding_BKR.float())
        assert self.proj.bias is not None, "made with a bias"
        weighted = torch.cat(rows, dim=-1) * self.proj.weight[0].float()
        return weighted.sum(dim=-1) + self.proj.bias.float()

    def forward(self, hidden_BKD: Tensor, embedding_BKR: Tensor | None = None) -> Tensor:
        """Probability of acceptance, float32 [B, K]; arguments as for `logits`."""
        return torch.sigmoid(self.logits(hidden_BKD, embedding_BKR))


def kept_by_confidence(confidence_BK: Tensor, threshold: float) -> Tensor:
    """Count the drafts worth verifying: those before the first whose own confidence is below a threshold.

    Args:
        confidence_BK: float probabilities from `ConfidenceHead`.
        threshold: in [0, 1]; 0 keeps all.
    Returns:
        int64 [B] in [0, K]; 0 verifies the anchor alone.
    """
    return (~(confidence_BK < threshold)).long().cumprod(dim=-1).sum(dim=-1)
