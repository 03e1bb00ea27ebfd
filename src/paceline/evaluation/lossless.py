"""Is the output the target's own? Compares the ids of two runs and finds where they part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Two token lists, compared up to their first difference; what follows it has another prefix and says nothing.

    Args:
        first_divergence: index of the first differing token, or the length of the shorter list when it is a prefix of
            the other; None when the lists are identical.
        ours: our token there, None past the end.
        reference: the reference's token there, None past the end.
        num_compared: tokens of the longer list.
    """

    first_divergence: int | None
    ours: int | None
    reference: int | None
    num_compared: int

    @property
    def is_identical(self) -> bool:
        """Whether both lists hold the same ids and end at the same place."""
        return self.first_divergence is None

    def describe(self) -> str:
        """One line: `yes`, or `no` and where."""
        if self.first_divergence is None:
            return "yes"
        ours = "the end" if self.ours is None else f"token {self.ours}"
        reference = "the end" if self.reference is None else f"token {self.reference}"
        return f"no, from token {self.first_divergence} on ({ours} instead of {reference})"


def compare_ids(ours: Sequence[int], reference: Sequence[int]) -> Comparison:
    """Find the first place where two token lists differ.

    Args:
        ours: ids of the run under test.
        reference: ids of plain decoding of the same prompt.
    """
    shorter, longer = sorted((len(ours), len(reference)))
    for index in range(shorter):
        if ours[index] != reference[index]:
            return Comparison(index, ours[index], reference[index], longer)
    if shorter == longer:
        return Comparison(None, None, None, longer)
    return Comparison(
        shorter,
        ours[shorter] if len(ours) > shorter else None,
        reference[shorter] if len(reference) > shorter else None,
        longer,
    )


def num_identical(comparisons: Iterable[Comparison]) -> int:
    """How many of the pairs are identical."""
    return sum(comparison.is_identical for comparison in comparisons)
