"""What a step costs: measured on the machine and the models at hand, never guessed.

A step verifies T rows per request and drafts T - 1 tokens for the next; both parts depend on how many requests there
are. A few sizes are timed, the rest is interpolated. `kind_costs.py` keeps these costs apart by kind of step, and
corrects them by what real steps take.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

NUM_REPEATS = 3


class Costs(Protocol):
    """What steps of one kind cost."""

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        """A step that verifies and draws `num_drafts` per request; 0 is a plain step that keeps the context current."""
        ...

    def padded_drafts(self, num_drafts: int) -> int:
        """Drafts that such a step really has rows for."""
        ...

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        """The part of it that can still be saved once the drafts are there."""
        ...

    def plain_ms(self, num_requests: int) -> float:
        """A step as an engine without a drafter runs it: nothing is drafted and no context is kept."""
        ...


class CostCurve:
    """Cost by size, never falling: linear between the sizes that were measured, and on from the last two.

    Args:
        measured: ms by size.
        captured: sizes that a step is padded to, as with CUDA graphs: up to the largest of them, a size costs what the
            next captured one does.
    """

    def __init__(self, measured: Mapping[int, float], captured: Sequence[int] = ()) -> None:
        self._sizes = sorted(measured)
        # A larger step that was timed as cheaper is noise, and would make the choice jump.
        self._costs = list(itertools.accumulate((measured[size] for size in self._sizes), max))
        self._captured = sorted(captured)

    def ms(self, size: int) -> float:
        """Cost of a size; below the smallest measured one, the cost of that."""
        padded = bisect_left(self._captured, size)
        if padded < len(self._captured):
            size = self._captured[padded]
        sizes, costs = self._sizes, self._costs
        if size <= sizes[0] or len(sizes) == 1:
            return costs[0]
        upper = min(bisect_left(sizes, size), len(sizes) - 1)
        slope = (costs[upper] - costs[upper - 1]) / (sizes[upper] - sizes[upper - 1])
        return costs[upper - 1] + slope * (size - sizes[upper - 1])


class StepCostTable:
    """Cost by the number of requests and of rows per request; it falls in neither direction.

    Args:
        measured: ms by (requests, rows); all combinations of the sizes that occur.
        is_padded: a step of a size in between costs what the next measured one does, in both directions.

    Attributes:
        row_counts: that were measured, the fewest first.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float], *, is_padded: bool = False) -> None:
        self.row_counts = sorted({num_rows for _, num_rows in measured})
        self._batch_sizes = sorted({num_requests for num_requests, _ in measured})
        self._is_padded = is_padded
        self._curves = {
            num_requests: self._curve({rows: ms for (batch, rows), ms in measured.items() if batch == num_requests})
            for num_requests in self._batch_sizes
        }
        self._known: dict[tuple[int, int], float] = {}  # asked for many times in every step

    def cost_ms(self, num_requests: int, num_rows: int) -> float:
        """Cost in ms, interpolated; beyond what was measured it goes on as between the last two sizes."""
        if (num_requests, num_rows) not in self._known:
            by_batch = {batch: curve.ms(num_rows) for batch, curve in self._curves.items()}
            self._known[num_requests, num_rows] = self._curve(by_batch).ms(num_requests)
        return self._known[num_requests, num_rows]

    def _curve(self, measured: Mapping[int, float]) -> CostCurve:
        return CostCurve(measured, captured=tuple(measured) if self._is_padded else ())


@dataclass(frozen=True)
class StepCosts:
    """Both parts of a step, where these are run one after the other.

    Attributes:
        verify: target pass, verification and the drafter's context, by (requests, rows).
        draft: drawing the next block, by (requests, drafts).
        plain: a step without context, by (requests, 1); None where it costs what one with context does.
    """

    verify: StepCostTable
    draft: StepCostTable
    plain: StepCostTable | None = None

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        """As for `Costs`."""
        draft_ms = self.draft.cost_ms(num_requests, num_drafts) if num_drafts > 0 else 0.0
        return self.verify.cost_ms(num_requests, num_drafts + 1) + draft_ms

    def padded_drafts(self, num_drafts: int) -> int:
        """As for `Costs`: as many as it is asked for."""
        return num_drafts

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        """As for `Costs`."""
        return self.verify.cost_ms(num_requests, num_drafts + 1)

    def plain_ms(self, num_requests: int) -> float:
        """As for `Costs`."""
        return (self.plain or self.verify).cost_ms(num_requests, 1)


@dataclass(frozen=True)
class WholeStepCosts:
    """Steps that are one piece, as recorded ones are: one that judges T - 1 drafts draws as many.

    Attributes:
        steps: by (requests, rows T).
        plain: a step without context, by (requests, 1).
    """

    steps: StepCostTable
    plain: StepCostTable

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        """As for `Costs`."""
        return self.steps.cost_ms(num_requests, num_drafts + 1)

    def padded_drafts(self, num_drafts: int) -> int:
        """As for `Costs`: those of the next size that was measured."""
        sizes = self.steps.row_counts
        return sizes[min(bisect_left(sizes, num_drafts + 1), len(sizes) - 1)] - 1

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        """The same for any number: a step's rows are settled before its drafts are there, so none can be saved."""
        return self.step_ms(num_requests, 0)

    def plain_ms(self, num_requests: int) -> float:
        """As for `Costs`."""
        return self.plain.cost_ms(num_requests, 1)


def measure_step_costs(
    run_step: Callable[[int, int], float | None],
    batch_sizes: Sequence[int],
    row_counts: Sequence[int],
    *,
    budget_s: float = 1.0,
    num_warm_ups: int = 1,
    is_padded: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCostTable:
    """Time some sizes: runs to warm up, then the shortest of three.

    Args:
        run_step: runs (requests, rows) and returns when it is done, device included; the milliseconds that it took, or
            None for what the clock says.
        batch_sizes: requests, some of those that will occur.
        row_counts: rows or drafts per request.
        budget_s: once this much time is spent, sizes are run once and no more; warming up does not count where it takes
            more than one run, as where steps are compiled and recorded.
        num_warm_ups: runs before anything counts.
        is_padded: as for `StepCostTable`.
        clock: seconds.
    """
    sizes = list(itertools.product(batch_sizes, row_counts))
    for num_requests, num_rows in sizes * (num_warm_ups - 1):
        run_step(num_requests, num_rows)
    begun_s = clock()
    measured: dict[tuple[int, int], float] = {}
    for num_requests, num_rows in sizes:
        times_ms: list[float] = []
        for _ in range(1 + NUM_REPEATS):
            started_s = clock()
            told_ms = run_step(num_requests, num_rows)
            ended_s = clock()
            times_ms.append((ended_s - started_s) * 1e3 if told_ms is None else told_ms)
            if ended_s - begun_s > budget_s:
                break
        measured[num_requests, num_rows] = min(times_ms[1:] or times_ms)  # what disturbs a step only adds to it
    return StepCostTable(measured, is_padded=is_padded)


def sizes_to_measure(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    powers = itertools.takewhile(lambda size: size < largest, (2**exponent for exponent in itertools.count()))
    return [*powers, largest]
