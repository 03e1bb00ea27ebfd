"""What a drafter hands to verification: token ids and the exact distribution they were drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.checkpoint.contract import DraftSampleMethod
from paceline.ops.noise import DRAFT, gumbel_from_hash, hash32, mix_step

MAX_CANDIDATES = 32


class Proposal(NamedTuple):
    """One draft block per request. B requests, K draft tokens, C candidates (at most 32).

    Attributes:
        ids_BK: int64 target ids; -1 marks a missing draft.
        candidate_ids_BKC: int64, unique within a row, holding the drawn id; None for a one-hot proposal.
        log_q_BKC: float32 normalised log-probabilities of the candidates; every other id has probability 0.
        confidence_BK: float32 estimate that draft k is accepted if those before it are; None without such a head.
    """

    ids_BK: Tensor
    candidate_ids_BKC: Tensor | None = None
    log_q_BKC: Tensor | None = None
    confidence_BK: Tensor | None = None


@dataclass(frozen=True)
class DraftSampling:
    """How the drafts of a batch are drawn.

    Attributes:
        method: "greedy" proposes the best id, one-hot; "probabilistic" draws at the request's temperature, and rows of
            temperature 0 take the best id.
        temperature_B: float32.
        seed_B: int64.
        position_B: int64, the anchor's position; every draw is keyed by the position before its token.
        step_B: int64, how many blocks this request drafted before.
    """

    method: DraftSampleMethod
    temperature_B: Tensor
    seed_B: Tensor
    position_B: Tensor
    step_B: Tensor

    def gumbel(self, ids_BKC: Tensor, *, first: int = 0) -> Tensor:
        """Noise for positions of the block, float32 [B, K, C], keyed by token id.

        Args:
            ids_BKC: int64 target ids.
            first: which draft the first of these K positions is, from 0.
        """
        keys_B11 = mix_step(self.seed_B, self.step_B)[:, None, None]
        offsets_K = torch.arange(first, first + ids_BKC.shape[1], device=ids_BKC.device)
        positions_BK1 = (self.position_B[:, None] + offsets_K)[:, :, None]
        return gumbel_from_hash(hash32(keys_B11, positions_BK1, ids_BKC, DRAFT))

    def draw(self, logits_BKV: Tensor, to_target_ids: Callable[[Tensor], Tensor], *, first: int = 0) -> Proposal:
        """Choose each position on its own; "probabilistic" draws from the best `MAX_CANDIDATES` logits.

        Args:
            logits_BKV: any float dtype, over draft ids.
            to_target_ids: target ids of draft ids.
            first: which draft the first of these K positions is, from 0.
        """
        if self.method == "greedy":
            # on a CPU four times as fast as argmax, same ties
            return Proposal(to_target_ids(logits_BKV.max(dim=-1).indices))
        values_BKC, drafts_BKC = logits_BKV.float().topk(min(MAX_CANDIDATES, logits_BKV.shape[-1]), dim=-1)
        ids_BKC = to_target_ids(drafts_BKC)
        is_greedy_B = self.temperature_B <= 0
        divisor_B = torch.where(is_greedy_B, torch.ones_like(self.temperature_B), self.temperature_B)
        log_q_BKC = (values_BKC / divisor_B[:, None, None]).log_softmax(dim=-1)
        drawn_BK1 = (log_q_BKC + self.gumbel(ids_BKC, first=first)).argmax(dim=-1, keepdim=True)
        drawn_BK = ids_BKC.gather(-1, drawn_BK1).squeeze(-1)
        # topk lists equal logits in any order, argmax takes the lowest id, which is what the target's own argmax does.
        best_BK = to_target_ids(logits_BKV.argmax(dim=-1))
        return Proposal(torch.where(is_greedy_B[:, None], best_BK, drawn_BK), ids_BKC, log_q_BKC)
