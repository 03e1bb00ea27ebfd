"""Every acceptance number of the project, defined here and nowhere else.

Over the N steps that verified at least one draft (d >= 1), with a = drafts kept and delivered in a step:

    acceptance length          1 + sum(a) / N           committed tokens per step, bonus included; a ratio of sums,
                                                        never a mean of per-request ratios
    draft acceptance rate      sum(a) / sum(d)          bonus excluded, never above 1
    per position j (from 0)    #{a > j} / #{d > j}      unconditional; at fixed depth 1 + their sum is the
                                                        acceptance length
    conditional                #{a > j} / #{a >= j, d > j}
    histogram                  steps that kept exactly 0, 1, 2, ... drafts
    verified length            1 + sum(v) / N           v = kept by verification, before stops and budget
    delivered per step         tokens delivered / N     below the acceptance length by the bonus tokens that a stop
                                                        or the budget cut off

vLLM and SGLang use the same words for the first two; vLLM divides per-position counts by N even where depths differ.
`AcceptanceSummary` counts steps, `DraftTotals` adds up what somebody else has counted, such as a server.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from paceline.trace.step import StepRecord

ACCEPTANCE_LENGTH_MEANS = "committed tokens per step: 1 + accepted drafts / steps, bonus included"
DRAFT_ACCEPTANCE_RATE_MEANS = "accepted / proposed drafts, bonus excluded"


@dataclass(frozen=True)
class AcceptanceSummary:
    """Acceptance over any set of steps.

    Ratios are NaN when no step verified a draft; entries of `conditional` are NaN where no step got that far.

    Attributes:
        num_steps: N, steps with at least one draft.
        num_draft_tokens: drafts verified, sum(d).
        num_accepted: drafts delivered, sum(a).
        num_verified_accepted: drafts kept by verification, before stops and budget.
        num_delivered: tokens delivered by these steps, bonus tokens included.
        acceptance_length: 1 + num_accepted / num_steps.
        verified_acceptance_length: 1 + num_verified_accepted / num_steps.
        delivered_per_step: num_delivered / num_steps.
        draft_acceptance_rate: num_accepted / num_draft_tokens.
        per_position: share of steps with a draft at position j that kept it.
        conditional: the same among steps that kept all drafts before j.
        histogram: histogram[i] steps kept exactly i drafts; its length is the greatest depth + 1.
    """

    num_steps: int
    num_draft_tokens: int
    num_accepted: int
    num_verified_accepted: int
    num_delivered: int
    acceptance_length: float
    verified_acceptance_length: float
    delivered_per_step: float
    draft_acceptance_rate: float
    per_position: tuple[float, ...]
    conditional: tuple[float, ...]
    histogram: tuple[int, ...]

    @classmethod
    def from_steps(cls, records: Iterable[StepRecord]) -> AcceptanceSummary:
        """Count over records, of one request or many; steps without drafts are left out."""
        return cls.from_counts(
            (record.num_draft_tokens, record.num_accepted, record.num_verified_accepted, len(record.emitted_ids))
            for record in records
        )

    @classmethod
    def from_counts(cls, counts: Iterable[tuple[int, int, int, int]]) -> AcceptanceSummary:
        """Count over (drafts, accepted, accepted before stops, tokens delivered) of each step.

        For walks that make no records, such as simulated acceptance in training.
        """
        steps = [step for step in counts if step[0] >= 1]
        num_steps = len(steps)
        depth = max((step[0] for step in steps), default=0)
        num_draft_tokens = sum(step[0] for step in steps)
        num_accepted = sum(step[1] for step in steps)
        num_verified_accepted = sum(step[2] for step in steps)
        num_delivered = sum(step[3] for step in steps)
        kept, had_draft, reached = count_positions([(drafts, accepted) for drafts, accepted, _, _ in steps])
        return cls(
            num_steps=num_steps,
            num_draft_tokens=num_draft_tokens,
            num_accepted=num_accepted,
            num_verified_accepted=num_verified_accepted,
            num_delivered=num_delivered,
            acceptance_length=1.0 + _ratio(num_accepted, num_steps),
            verified_acceptance_length=1.0 + _ratio(num_verified_accepted, num_steps),
            delivered_per_step=_ratio(num_delivered, num_steps),
            draft_acceptance_rate=_ratio(num_accepted, num_draft_tokens),
            per_position=tuple(map(_ratio, kept, had_draft)),
            conditional=tuple(map(_ratio, kept, reached)),
            histogram=tuple(sum(step[1] == i for step in steps) for i in range(depth + 1)) if steps else (),
        )

    def to_dict(self) -> dict[str, object]:
        """Give plain JSON values; NaN becomes None."""
        return {name: _plain(value) for name, value in asdict(self).items()}


class PositionCounts(NamedTuple):
    """Steps at each position j, from 0 to the greatest depth.

    Attributes:
        kept: that kept the draft there, #{a > j}.
        had_draft: that had one, #{d > j}.
        reached: that had one and kept all before it, #{a >= j, d > j}.
    """

    kept: tuple[int, ...]
    had_draft: tuple[int, ...]
    reached: tuple[int, ...]


def count_positions(steps: Sequence[tuple[int, int]]) -> PositionCounts:
    """Count what `per_position` and `conditional` are ratios of.

    Args:
        steps: drafts and accepted drafts of each.
    """
    depth = max((drafts for drafts, _ in steps), default=0)
    return PositionCounts(
        tuple(sum(accepted > j for _, accepted in steps) for j in range(depth)),
        tuple(sum(drafts > j for drafts, _ in steps) for j in range(depth)),
        tuple(sum(accepted >= j and drafts > j for drafts, accepted in steps) for j in range(depth)),
    )


@dataclass(frozen=True)
class DraftTotals:
    """Counts over steps with drafts, as answers, counters of a server and traces alike can give them.

    Attributes:
        num_steps: N.
        num_draft_tokens: sum(d).
        num_accepted: sum(a).
        kept: kept[j] steps kept the draft at position j.
        drafted: drafted[j] steps had a draft there; None where nobody tells, and then N stands in for each of them.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    kept: tuple[int, ...] = ()
    drafted: tuple[int, ...] | None = ()

    @classmethod
    def from_steps(cls, steps: Iterable[tuple[int, int]]) -> DraftTotals:
        """Count over (drafts, accepted) of each step; steps without drafts are left out."""
        found = [step for step in steps if step[0] >= 1]
        positions = count_positions(found)
        return cls(
            num_steps=len(found),
            num_draft_tokens=sum(drafts for drafts, _ in found),
            num_accepted=sum(accepted for _, accepted in found),
            kept=positions.kept,
            drafted=positions.had_draft,
        )

    @classmethod
    def from_histogram(cls, histogram: Sequence[int], *, num_draft_tokens: int) -> DraftTotals:
        """Count from a histogram alone: histogram[i] steps kept exactly i drafts."""
        return cls(
            num_steps=sum(histogram),
            num_draft_tokens=num_draft_tokens,
            num_accepted=sum(depth * count for depth, count in enumerate(histogram)),
            kept=tuple(sum(histogram[j + 1 :]) for j in range(len(histogram) - 1)),
            drafted=None,
        )

    def __add__(self, other: DraftTotals) -> DraftTotals:
        drafted = None
        if self.drafted is not None and other.drafted is not None:
            drafted = _added(self.drafted, other.drafted)
        return DraftTotals(
            self.num_steps + other.num_steps,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted + other.num_accepted,
            _added(self.kept, other.kept),
            drafted,
        )

    @property
    def acceptance_length(self) -> float:
        """As of a summary; NaN without a step."""
        return 1.0 + _ratio(self.num_accepted, self.num_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """As of a summary; NaN without a draft."""
        return _ratio(self.num_accepted, self.num_draft_tokens)

    @property
    def per_position(self) -> tuple[float, ...]:
        """As of a summary where `drafted` is known; else shares of all steps, as vLLM has them."""
        had_draft = self.drafted if self.drafted is not None else (self.num_steps,) * len(self.kept)
        return tuple(map(_ratio, self.kept, had_draft))

    def to_dict(self) -> dict[str, object]:
        """Give counts and rates as plain JSON values; NaN becomes None."""
        rates = {name: getattr(self, name) for name in ("acceptance_length", "draft_acceptance_rate", "per_position")}
        return {name: _plain(value) for name, value in (asdict(self) | rates).items()}


def _added(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in itertools.zip_longest(first, second, fillvalue=0))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else math.nan


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
