"""What a drafter hands to verification: token ids and the exact distribution they were drawn from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Proposal(NamedTuple):
    """One draft block per request. B requests, K draft tokens, C candidates (at most 32).

    Attributes:
        ids_BK: int64; -1 marks a missing draft.
        candidate_ids_BKC: int64, unique within a row, holding the drawn id; None for a one-hot proposal.
        log_q_BKC: float32 normalised log-probabilities of the candidates; every other id has probability 0.
    """

    ids_BK: Tensor
    candidate_ids_BKC: Tensor | None = None
    log_q_BKC: Tensor | None = None
