"""Where two greedy texts part: was it a near-tie, which rounding may decide either way, or a fault?

Both tokens must lie within 4 units in the last place of bf16 below the largest logit, taken from a float32 pass over
one sequence: tolerance = 4 * 2^(floor(log2 |z_max|) - 7), which is 0.25 for 8 <= |z_max| < 16. Only the first
difference counts; the texts after it have other prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.evaluation.lossless import compare_ids

NextLogits = Callable[[Sequence[int]], Tensor]

_NUM_FRACTION_BITS = 7  # of bf16


@dataclass(frozen=True)
class Divergence:
    """The first difference of two texts.

    Attributes:
        position: index of the first differing token.
        gap: how far the lower of the two tokens lies below the largest logit; None where one text had ended.
        tolerance: largest gap that counts as a near-tie.
    """

    position: int
    gap: float | None
    tolerance: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone may have caused it."""
        return self.gap is not None and self.gap <= self.tolerance


def find_divergence(
    prompt_ids: Sequence[int], ours: Sequence[int], reference: Sequence[int], next_logits: NextLogits
) -> Divergence | None:
    """Compare two texts of the same prompt and judge their first difference; None if they are identical.

    Args:
        prompt_ids: in front of both.
        ours: ids of the run under test.
        reference: ids that should have come out.
        next_logits: float32 logits after a sequence of ids; called only where the texts differ.
    """
    comparison = compare_ids(ours, reference)
    if comparison.first_divergence is None:
        return None
    position = comparison.first_divergence
    logits_V = next_logits([*prompt_ids, *reference[:position]])
    tolerance = near_tie_tolerance(float(logits_V.max()))
    if comparison.ours is None or comparison.reference is None:
        return Divergence(position, None, tolerance)
    lower = min(float(logits_V[comparison.ours]), float(logits_V[comparison.reference]))
    return Divergence(position, float(logits_V.max()) - lower, tolerance)


def near_tie_tolerance(largest_logit: float) -> float:
    """Four units in the last place of bf16 at the size of the largest logit."""
    if largest_logit == 0:
        return 0.0
    return 4 * 2.0 ** (math.floor(math.log2(abs(largest_logit))) - _NUM_FRACTION_BITS)
