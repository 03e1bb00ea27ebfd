"""How likely a draft is kept, learned while serving from one number per row that does not depend on the row's draft.

    confidence_j = sigmoid(slope * f_j + intercept_j)

`f_j` is the log-odds of row j's most likely token under the drafter, or what a confidence head says, as log-odds
(`ops/draft_chances.py`). Both are functions of the drafts before j. (The probability of the token that was really drawn
would not be, and deciding by it would change the output: see `draft_budget.py`.) The slope is shared by all positions;
every 100 steps one damped Newton step of logistic regression moves both from the sums gathered since the last.

B requests, K drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.draft_chances import Coefficients, chances
from paceline.ops.observe_drafts import NUM_SUMS, NewtonSums

STEPS_PER_UPDATE = 100
_RIDGE = 1e-3
_DAMPING = 50  # observations at which a step goes half its way


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

    Attributes:
        sums_6K: float64, the parts of `NewtonSums` since the last change; `observe_drafts` adds to them, which may sit
            in a recording.
    """

    def __init__(self, num_draft_tokens: int, *, has_confidence_head: bool, device: torch.device) -> None:
        start = (1.0, 0.0) if has_confidence_head else (0.5, -0.2)
        self.slope = torch.tensor(start[0], dtype=torch.float64, device=device)
        self.intercept_K = torch.full((num_draft_tokens,), start[1], dtype=torch.float64, device=device)
        self.sums_6K = torch.zeros(NUM_SUMS, num_draft_tokens, dtype=torch.float64, device=device)
        self._num_steps = 0

    @property
    def coefficients(self) -> Coefficients:
        """As they are now; they stay where they are."""
        return Coefficients(self.slope, self.intercept_K)

    def confidence(self, features_BK: Tensor) -> Tensor:
        """Chance that each draft is kept if those before it are, float64 [B, K]."""
        return chances(features_BK, self.slope, self.intercept_K)

    def advance(self) -> None:
        """Count one more step, outside of any recording, and learn from all that were observed if it is time.

        What recorded steps read stays where it is.
        """
        self._num_steps += 1
        if self._num_steps % STEPS_PER_UPDATE == 0:
            slope_change, intercept_change_K = newton_step(NewtonSums(*self.sums_6K), self.slope)
            self.slope += slope_change
            self.intercept_K += intercept_change_K
            self.sums_6K.zero_()
