"""What may decide how many drafts are verified, and the rules that keep to it.

Where drafts are drawn from a distribution q and judged by ratio, the output stays the target's own exactly if

    "draft i is verified" is a function of the past, of the drafts before i, and of independent chance.

A rule that looks at draft i itself, at its probability, rank or text, or at anything after it, changes the output. So
every rule here walks a block from its front and stops: what it reads about draft i must have been computed from the
drafts before i alone, as DSpark's confidence head and the largest probability of row i are.

B requests, K drafts. Positions count from 0.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError


class DraftSchedule:
    """Drafts per request by the number of requests in a step: the more of them, the fewer drafts pay.

    Args:
        ranges: (first, last, drafts), the first two inclusive; the first range begins at 1, none overlap. Numbers of
            requests between ranges, and behind the last, keep what the range before them says.
        num_draft_tokens: K; no range gives more.

    Raises:
        ConfigError: the ranges are not of that form.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, int]], num_draft_tokens: int) -> None:
        if not ranges or ranges[0][0] != 1:
            begin = ranges[0][0] if ranges else "nothing"
            raise ConfigError(f"a draft schedule has to begin at 1 request; this one begins at {begin}")
        for first, last, num_drafts in ranges:
            if last < first or num_drafts < 0:
                raise ConfigError(f"range {(first, last, num_drafts)} of a draft schedule ends early or drafts below 0")
        for before, after in itertools.pairwise(ranges):
            if after[0] <= before[1]:
                raise ConfigError(f"ranges {before} and {after} of a draft schedule overlap or are out of order")
        self._by_size = [0] * (ranges[-1][1] + 1)
        for first, _, num_drafts in ranges:
            for size in range(first, len(self._by_size)):
                self._by_size[size] = min(num_drafts, num_draft_tokens)

    def num_drafts(self, num_requests: int) -> int:
        """Drafts per request in a step of that many requests, at least one."""
        return self._by_size[min(num_requests, len(self._by_size) - 1)]


@dataclass(frozen=True)
class Budget:
    """Drafts of a whole step, and why.

    Attributes:
        num_drafts: n*, over all requests.
        ratios: expected tokens per ms for 0, 1, 2, ... drafts; n* is the first of the largest.
    """

    num_drafts: int
    ratios: tuple[float, ...]


def best_budget(
    survivals: Sequence[Sequence[float]], cost_ms: Callable[[int], float], *, max_drafts: int | None = None
) -> Budget:
    """Choose how many drafts a step verifies in all, where requests may verify different numbers.

    Args:
        survivals: per request and draft, the chance that it and all before it are kept; has to come from an earlier
            step, since the whole block's confidences would tell about drafts of this one.
        cost_ms: of a step with n drafts.
        max_drafts: no more than these.
    """
    ordered = sorted(itertools.chain.from_iterable(survivals), reverse=True)[:max_drafts]
    expected = itertools.accumulate(ordered, initial=float(len(survivals)))
    ratios = tuple(tokens / cost_ms(num_drafts) for num_drafts, tokens in enumerate(expected))
    return Budget(ratios.index(max(ratios)), ratios)


def split_budget(survivals: Sequence[Sequence[float]], num_drafts: int) -> list[int]:
    """Give a step's drafts to the requests where they survive best.

    Survival never rises along a block, so each request gets a prefix, and whether it gets draft i depends on its
    confidences up to i alone. Equal ones go to the earlier position, then to the earlier request.

    Args:
        survivals: per request and draft.
        num_drafts: to give away.
    Returns:
        Drafts per request; their sum is smaller only if there are not as many.
    """
    counts = [0] * len(survivals)
    waiting = [(-chances[0], 0, request) for request, chances in enumerate(survivals) if chances]
    heapq.heapify(waiting)
    while waiting and num_drafts > 0:
        _, position, request = heapq.heappop(waiting)
        num_drafts -= 1
        counts[request] = position + 1
        if position + 1 < len(survivals[request]):
            heapq.heappush(waiting, (-survivals[request][position + 1], position + 1, request))
    return counts


def expected_acceptance(rates: Sequence[float]) -> float:
    """Expected number of kept drafts in a block, from each draft's chance of being kept if those before it are."""
    return sum(itertools.accumulate(rates, lambda survival, rate: survival * rate))
