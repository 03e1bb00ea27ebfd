"""Many ratios of sums over the same prompts, with intervals from the same resamples.

The unit is the prompt: steps and tokens of one prompt are not independent, so whole prompts are drawn.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from paceline.evaluation.statistics import bootstrap_ratios


@dataclass(frozen=True)
class Rate:
    """One ratio of sums.

    Attributes:
        label: of what.
        total: the numerator.
        of: the denominator.
        value: total / of; None where `of` is 0.
        low: lower end of its 95 % interval; None where fewer than two prompts have anything of it.
        high: upper end.
    """

    label: str
    total: float
    of: float
    value: float | None
    low: float | None = None
    high: float | None = None


class RateTable:
    """Sums of numerators and denominators per prompt; a ratio is found by its group and label.

    Args:
        num_units: prompts.
    """

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._sums: dict[tuple[str, Hashable], list[list[float]]] = {}
        self._rates: dict[tuple[str, Hashable], Rate] | None = None

    def add(self, unit: int, group: str, label: Hashable, total: float, of: float = 1.0) -> None:
        """Add to one prompt's sums.

        Args:
            unit: the prompt, from 0.
            group: name of a list of ratios.
            label: of the ratio in it.
            total: added to the numerator.
            of: added to the denominator.
        """
        sums = self._sums.get((group, label))
        if sums is None:
            sums = self._sums[(group, label)] = [[0.0] * self._num_units, [0.0] * self._num_units]
        sums[0][unit] += total
        sums[1][unit] += of

    def labels(self, group: str) -> list[Hashable]:
        """Labels of a group, in the order in which they came first."""
        return [label for name, label in self._sums if name == group]

    def rates(self, group: str, labels: Sequence[Hashable] | None = None) -> list[Rate]:
        """The ratios of a group.

        Args:
            group: as added to.
            labels: which, in which order; None takes all as they came.
        """
        if self._rates is None:
            self._rates = self._computed()
        wanted = self.labels(group) if labels is None else [label for label in labels if (group, label) in self._sums]
        return [self._rates[(group, label)] for label in wanted]

    def _computed(self) -> dict[tuple[str, Hashable], Rate]:
        keys = list(self._sums)
        intervals: Sequence[object] = [None] * len(keys)
        found = {}
        if self._num_units > 1 and keys:
            columns = [self._sums[key] for key in keys]
            tops = list(zip(*(column[0] for column in columns), strict=True))
            bottoms = list(zip(*(column[1] for column in columns), strict=True))
            intervals = bootstrap_ratios(tops, bottoms)
        for key, interval in zip(keys, intervals, strict=True):
            total, of = (sum(part) for part in self._sums[key])
            low, high = getattr(interval, "low", None), getattr(interval, "high", None)
            if sum(weight > 0 for weight in self._sums[key][1]) < 2:
                low = high = None
            found[key] = Rate(str(key[1]), total, of, total / of if of else None, low, high)
        return found
