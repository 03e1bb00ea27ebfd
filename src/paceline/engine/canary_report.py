"""What the canary saw, and when that is a fault.

The limits were set by what sound engines and planted faults gave with the shipped drafters on a CPU. In bf16 sound ones
had distances up to 0.03 and errors of blocks of 0.9 times those of single rows; faults that nothing else shows had
distances from 0.097, or errors of twice those. In float32 sound ones had distances of 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Of blocks. Rounding may drop a candidate of a walk, and the rest of the block with it: so it went with 3 of 15 blocks
# of a sound random drafter in bf16 on a GPU. In 16 bits the distance is what finds faults.
_LEAST_EQUAL_SHARE, _LEAST_EQUAL_SHARE_16_BIT = 0.9, 0.75
_MOST_DISTANCE, _MOST_DISTANCE_16_BIT = 0.01, 0.08
_MOST_ERROR = 1.75  # log-probabilities of blocks over those of single rows
_ERROR_OF_NOTHING = 2e-3  # nats; products of reduced precision on a GPU


@dataclass(frozen=True)
class CanaryReport:
    """What the canary saw.

    Attributes:
        num_steps: steps of the oracle run.
        num_drafts: oracle drafts judged.
        refusals: what was refused, in words; near-ties are not among them.
        num_near_ties: refusals where the two tokens' logits differ by rounding alone.
        num_compared: the drafter's own blocks, made from the cache and computed again without; 0 without a drafter.
        num_equal: of them, equal up to near-ties, see `canary_drafts.py`.
        draft_distance: mean distance of what the drafter thought of its candidates, between 0 and 1.
        num_hit_tokens: prompt tokens that the prefix cache gave to a prompt that was served before, at least; None
            where no hit was tried, as there is no drafter or no prefix cache.
        num_compared_warm: blocks behind that hit, compared likewise.
        num_equal_warm: of them, equal.
        draft_distance_warm: mean distance behind that hit.
        logprob_error: mean absolute difference between the log-probabilities of the oracle's tokens and those that one
            pass over the finished texts gives.
        plain_logprob_error: the same of plain decoding, which says how much of that is rounding.
        has_16_bits: whether states are rounded to 16 bits.
        origin: where the models came from.
    """

    num_steps: int
    num_drafts: int
    refusals: tuple[str, ...]
    num_near_ties: int
    num_compared: int
    num_equal: int
    num_hit_tokens: int | None = None
    num_compared_warm: int = 0
    num_equal_warm: int = 0
    draft_distance: float = 0.0
    draft_distance_warm: float = 0.0
    logprob_error: float = 0.0
    plain_logprob_error: float = 0.0
    has_16_bits: bool = False
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        """Whether nothing was refused and the drafter was served what it was trained for, cold and behind a hit."""
        return not self.faults()

    def faults(self) -> tuple[str, ...]:
        """What is wrong, in words; nothing where it has passed."""
        found = list(self.refusals)
        if self.logprob_error > _MOST_ERROR * self.plain_logprob_error + _ERROR_OF_NOTHING:
            found.append(
                f"log-probabilities of blocks are off by {self.logprob_error:.4f} on average, those of single rows by "
                f"{self.plain_logprob_error:.4f}: rows or positions of a block are wrong"
            )
        if self._differs(self.num_equal, self.num_compared, self.draft_distance):
            found.append(
                f"{self.num_equal} of {self.num_compared} served blocks are those that the drafter makes of the whole "
                f"text, and its probabilities are {self.draft_distance:.3f} apart: its context is stale, shifted or "
                "incomplete"
            )
        if self.num_hit_tokens == 0:
            found.append("a prompt that was served before found nothing of itself in the prefix cache")
        if self._differs(self.num_equal_warm, self.num_compared_warm, self.draft_distance_warm):
            found.append(
                f"behind a prefix hit of {self.num_hit_tokens} tokens {self.num_equal_warm} of "
                f"{self.num_compared_warm} served blocks are those that the drafter makes of the whole text, and its "
                f"probabilities are {self.draft_distance_warm:.3f} apart: the hit does not bring its context back"
            )
        return tuple(found)

    def _differs(self, num_equal: int, num_compared: int, distance: float) -> bool:
        if self.has_16_bits:
            return num_equal < _LEAST_EQUAL_SHARE_16_BIT * num_compared or distance > _MOST_DISTANCE_16_BIT
        return num_equal < _LEAST_EQUAL_SHARE * num_compared or distance > _MOST_DISTANCE

    def summary(self) -> str:
        """What was compared, in a line."""
        near = f", {self.num_near_ties} of them near-ties" if self.num_near_ties else ""
        warm = ""
        if self.num_hit_tokens is not None:
            warm = f"; {self.num_equal_warm} of {self.num_compared_warm} behind a hit of {self.num_hit_tokens} tokens"
        return (
            f"{self.num_drafts} known drafts judged, {len(self.refusals) + self.num_near_ties} refused{near}; "
            f"{self.num_equal} of {self.num_compared} own blocks equal{warm}"
        )
