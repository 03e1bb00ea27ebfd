"""How likely a draft is kept, learned while serving from one number per row that does not depend on the row's draft.

    confidence_j = sigmoid(slope * f_j + intercept_j)

`f_j` is the log-odds of row j's most likely token under the drafter, or what a confidence head says, as log-odds. Both
are functions of the drafts before j. (The probability of the token that was really drawn would not be, and deciding by
it would change the output: see `draft_budget.py`.) The slope is shared by all positions; every 100 steps one damped
Newton step of logistic regression moves both from the sums gathered since the last.

B requests, K drafts, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.drafters.proposal import Proposal

FEATURE_LIMIT = 40.0
STEPS_PER_UPDATE = 100
_RIDGE = 1e-3
_DAMPING = 50  # observations at which a step goes half its way


class NewtonSums(NamedTuple):
    """Sums over observations y of features f, with weights w = c(1 - c). All float64 [K].

    Attributes:
        A_K: of w f^2.
        B_K: of w f.
        C_K: of w.
        slope_gradient_K: of (y - c) f.
        intercept_gradient_K: of y - c.
        num_K: observations.
    """

    A_K: Tensor
    B_K: Tensor
    C_K: Tensor
    slope_gradient_K: Tensor
    intercept_gradient_K: Tensor
    num_K: Tensor


def largest_log_odds(log_q_BKC: Tensor) -> Tensor:
    """Log-odds of each row's most likely candidate, float32 [B, K] within +-40.

    Args:
        log_q_BKC: float, log-probabilities up to a constant; every other id has probability 0.
    """
    best = log_q_BKC.max(dim=-1, keepdim=True)
    others_BK = log_q_BKC.scatter(-1, best.indices, -torch.inf).logsumexp(dim=-1)
    odds_BK = (best.values.squeeze(-1) - others_BK).float()
    return odds_BK.nan_to_num(nan=-FEATURE_LIMIT).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)


def draft_features(proposal: Proposal) -> Tensor | None:
    """What a proposal tells of each row's chances, float32 [B, K] as log-odds within +-40.

    Returns:
        From the confidence head where there is one, else from q; None for one-hot drafts without such a head.
    """
    if proposal.confidence_BK is not None:
        odds_BK = torch.logit(proposal.confidence_BK.float())
        return odds_BK.nan_to_num(nan=-FEATURE_LIMIT).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)
    return None if proposal.log_q_BKC is None else largest_log_odds(proposal.log_q_BKC)


def confidence(features_BK: Tensor, slope: Tensor, intercept_K: Tensor) -> Tensor:
    """Chance that each draft is kept if those before it are, float64 [B, K]; fewer drafts than K are the first ones."""
    return torch.sigmoid(slope * features_BK.double() + intercept_K[: features_BK.shape[1]])


def newton_sums(
    features_BK: Tensor, num_judged_B: Tensor, num_accepted_B: Tensor, slope: Tensor, intercept_K: Tensor
) -> NewtonSums:
    """What one step of B requests adds: each block tells of its kept drafts and of the first refused one.

    Args:
        features_BK: of the drafts that were judged.
        num_judged_B: int64; 0 leaves a request out.
        num_accepted_B: int64.
        slope: float64 scalar.
        intercept_K: float64.
    """
    position_K = torch.arange(features_BK.shape[1], device=features_BK.device)
    accepted_B1 = num_accepted_B.unsqueeze(1)
    is_seen_BK = (position_K <= accepted_B1) & (position_K < num_judged_B.unsqueeze(1))
    # Selected, not multiplied: a row that was never drafted may hold anything.
    f_BK = torch.where(is_seen_BK, features_BK.double(), 0.0)
    c_BK = confidence(f_BK, slope, intercept_K)
    weight_BK = torch.where(is_seen_BK, c_BK * (1 - c_BK), 0.0)
    missed_BK = torch.where(is_seen_BK, (position_K < accepted_B1).double() - c_BK, 0.0)
    parts = (weight_BK * f_BK**2, weight_BK * f_BK, weight_BK, missed_BK * f_BK, missed_BK, is_seen_BK.double())
    return NewtonSums(*(part.sum(dim=0) for part in parts))


def newton_step(sums: NewtonSums, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Changes of slope and intercepts: one Newton step with ridge 1e-3, shortened where there is little data.

    The matrix is an arrowhead (the slope couples with every intercept, these with nothing else), so it is solved
    position by position. A slope that would turn negative or undefined stays as it is.

    Returns:
        Change of the slope, float64 scalar, and of the intercepts, float64 [K].
    """
    C_K = sums.C_K + _RIDGE
    gradient = sums.slope_gradient_K.sum() - (sums.B_K * sums.intercept_gradient_K / C_K).sum()
    curvature = sums.A_K.sum() + _RIDGE - (sums.B_K**2 / C_K).sum()
    total = sums.num_K.sum()
    slope_change = gradient / curvature * total / (total + _DAMPING)
    is_sound = torch.isfinite(slope_change) & (slope + slope_change >= 0)
    slope_change = torch.where(is_sound, slope_change, 0.0)
    shortening_K = sums.num_K / (sums.num_K + _DAMPING)
    intercept_change_K = (sums.intercept_gradient_K - sums.B_K * slope_change) / C_K * shortening_K
    return slope_change, torch.where(torch.isfinite(intercept_change_K), intercept_change_K, 0.0)


class AcceptanceEstimator:
    """The two kinds of coefficients and the sums towards their next change. No value is read on the host.

    Args:
        num_draft_tokens: K.
        has_confidence_head: features are a trained head's log-odds, which are taken at their word at first.
        device: of the features.
    """

    def __init__(self, num_draft_tokens: int, *, has_confidence_head: bool, device: torch.device) -> None:
        start = (1.0, 0.0) if has_confidence_head else (0.5, -0.2)
        self.slope = torch.tensor(start[0], dtype=torch.float64, device=device)
        self.intercept_K = torch.full((num_draft_tokens,), start[1], dtype=torch.float64, device=device)
        self._num_steps = 0
        self._sums_6K = torch.zeros(6, num_draft_tokens, dtype=torch.float64, device=device)

    def confidence(self, features_BK: Tensor) -> Tensor:
        """Chance that each draft is kept if those before it are, float64 [B, K]."""
        return confidence(features_BK, self.slope, self.intercept_K)

    def observe(self, features_BK: Tensor, num_judged_B: Tensor, num_accepted_B: Tensor) -> None:
        """Take in one step; has to come before the next block's features replace these. It may sit in a recording.

        Args:
            features_BK: float, at most K columns.
            num_judged_B: int64; 0 leaves a request out.
            num_accepted_B: int64.
        """
        sums = newton_sums(features_BK, num_judged_B, num_accepted_B, self.slope, self.intercept_K)
        self._sums_6K[:, : features_BK.shape[1]] += torch.stack(tuple(sums))

    def advance(self) -> None:
        """Count one more step, outside of any recording, and learn from all that were observed if it is time.

        What recorded steps read stays where it is.
        """
        self._num_steps += 1
        if self._num_steps % STEPS_PER_UPDATE == 0:
            slope_change, intercept_change_K = newton_step(NewtonSums(*self._sums_6K), self.slope)
            self.slope += slope_change
            self.intercept_K += intercept_change_K
            self._sums_6K.zero_()
