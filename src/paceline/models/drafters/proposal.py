"""What a drafter hands to verification: token ids and the exact distribution they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.checkpoint.contract import DraftSampleMethod
from paceline.ops.draw_candidates import draw_candidates
from paceline.ops.noise import DRAFT, TARGET, candidate_gumbel

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
        is_coupled: draw with the noise that the target will use at the same position, so that both often pick the same
            id. Such drafts may be judged by equality alone, never by the ratio of p to q: see `ops.acceptance`.
    """

    method: DraftSampleMethod
    temperature_B: Tensor
    seed_B: Tensor
    position_B: Tensor
    step_B: Tensor
    is_coupled: bool = False

    def gumbel(self, ids_BKC: Tensor, *, first: int = 0) -> Tensor:
        """Noise for positions of the block, float32 [B, K, C], keyed by token id.

        Args:
            ids_BKC: int64 target ids.
            first: which draft the first of these K positions is, from 0.
        """
        step_B, domain = self._keys
        return candidate_gumbel(self.seed_B, step_B, self.position_B, ids_BKC, first=first, domain=domain)

    def draw(self, scores_BKC: Tensor, ids_BKC: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """Draw one of each position's candidates; ids [B, K] and the log-probabilities [B, K, C] of all.

        Args:
            scores_BKC: descending.
            ids_BKC: int64 target ids.
            first: which draft the first of these K positions is, from 0.
        """
        step_B, domain = self._keys
        return draw_candidates(
            scores_BKC,
            ids_BKC,
            temperature_B=self.temperature_B,
            seed_B=self.seed_B,
            step_B=step_B,
            position_B=self.position_B,
            first=first,
            domain=domain,
        )

    @property
    def _keys(self) -> tuple[Tensor | None, int]:
        """Steps that are mixed into the seeds, and the domain of the noise."""
        return (None, TARGET) if self.is_coupled else (self.step_B, DRAFT)
