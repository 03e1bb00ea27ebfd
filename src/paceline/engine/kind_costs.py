"""What steps of each kind are believed to cost: trial steps, corrected by how long real ones take.

Trial steps are greedy or sampled and do nothing else; they run alone, by the device's clock. Real steps may have rules
and longer contexts, and a host that cannot keep up. So every real step that came right behind another one is set
against its trial, and medians of the latest are held:

    cost(kind, requests, drafts) = max(trial(kind, requests, drafts) * factor(requests, drafts), host(requests))

`host` is how long the host is busy with a step, where it runs beside the device: no length makes a step shorter than
that. A size that was not run lately is given the benefit of the doubt: it costs what its trial did, or less where the
others are found to be faster. So a length that looks cheap is tried, and found out after a few steps; were it taken to
be as slow as the others, plain decoding would never be compared by a cost of its own.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from paceline.engine.step_cost import Costs
from paceline.engine.step_kind import TRIED_KINDS, StepKind, StepSize

_NUM_LATEST = 15
_ENOUGH = 7  # a median of so many is not moved by a step that was recorded, or by a pause of the host
_BOUND_BY_HOST = 0.95  # of a step's time: with so much of it busy, the host does not wait for the device
_FORGOTTEN_AFTER = 5000  # steps of the kind: whatever was true so long ago is looked at again, for a few steps


class _Cell(NamedTuple):
    """Steps that share a factor.

    Attributes:
        bucket: of requests, as a power of two: 0 is 1 request, 1 is 2, 2 is up to 4, 3 is up to 8.
        num_drafts: judged and drawn.
        writes_context: whether the drafter's context is kept.
    """

    bucket: int
    num_drafts: int
    writes_context: bool


class _Recent:
    """The median of the latest observations, once there are enough."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_NUM_LATEST)
        self.value: float | None = None
        self.last_step = 0

    def observe(self, value: float, step: int) -> None:
        """Take in one; `step` counts steps of the kind."""
        if step - self.last_step > _FORGOTTEN_AFTER:
            self._latest.clear()
        self.last_step = step
        self._latest.append(value)
        self.value = statistics.median(self._latest) if len(self._latest) >= _ENOUGH else None


class KindCosts:
    """Costs of one kind of step; has the methods of `Costs`.

    Args:
        trial: what trial steps of the kind took, or of the one that stands in for it.
    """

    def __init__(self, trial: Costs) -> None:
        self._trial = trial
        self._factors: dict[_Cell, _Recent] = {}
        self._typical_factors: dict[int, float] = {}
        self._host_ms: dict[int, _Recent] = {}
        self._num_steps = 0

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        """As for `Costs`."""
        cell = self._cell(num_requests, num_drafts)
        return max(self._trial.step_ms(num_requests, num_drafts) * self._factor(cell), self._least_ms(cell.bucket))

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        """As for `Costs`; with one factor for any number of drafts, as it is differences that are asked for."""
        return self._trial.verify_ms(num_requests, num_drafts) * self._factor(self._cell(num_requests, 0))

    def plain_ms(self, num_requests: int) -> float:
        """As for `Costs`; never more than a plain step that keeps the context, which does all of it and more."""
        cell = self._cell(num_requests, 0, writes_context=False)
        own = self._current(self._factors.get(cell))
        factor = self._factor(self._cell(num_requests, 0)) if own is None else own
        plain_ms = max(self._trial.plain_ms(num_requests) * factor, self._least_ms(cell.bucket))
        return min(plain_ms, self.step_ms(num_requests, 0))

    def observe(self, size: StepSize, step_ms: float, host_ms: float = 0.0) -> None:
        """Take in what a real step took.

        Args:
            size: of the step.
            step_ms: from the results before its own to its own, with no pass in between.
            host_ms: how long of it the host was busy beside the device; 0 where it does nothing but wait.
        """
        self._num_steps += 1
        self._typical_factors.clear()
        cell = self._cell(size.num_requests, size.num_drafts, writes_context=size.writes_context)
        if host_ms > 0:
            self._host_ms.setdefault(cell.bucket, _Recent()).observe(host_ms, self._num_steps)
        if host_ms > _BOUND_BY_HOST * step_ms:
            return  # the device was done before, nobody knows when
        if size.writes_context:
            trial_ms = self._trial.step_ms(size.num_requests, size.num_drafts)
        else:
            trial_ms = self._trial.plain_ms(size.num_requests)
        self._factors.setdefault(cell, _Recent()).observe(step_ms / trial_ms, self._num_steps)

    def _cell(self, num_requests: int, num_drafts: int, *, writes_context: bool = True) -> _Cell:
        return _Cell((num_requests - 1).bit_length(), self._trial.padded_drafts(num_drafts), writes_context)

    def _least_ms(self, bucket: int) -> float:
        return self._current(self._host_ms.get(bucket)) or 0.0

    def _factor(self, cell: _Cell) -> float:
        own = self._current(self._factors.get(cell))
        return self._typical(cell.bucket) if own is None else own

    def _typical(self, bucket: int) -> float:
        """The factor of steps of so many requests, where none is known, of all steps; but no more than 1."""
        if bucket not in self._typical_factors:  # asked for many times between two steps
            known = {cell: self._current(factor) for cell, factor in self._factors.items()}
            all_of_them = [factor for factor in known.values() if factor is not None]
            beside = [factor for cell, factor in known.items() if factor is not None and cell.bucket == bucket]
            self._typical_factors[bucket] = min(1.0, statistics.median(beside or all_of_them or [1.0]))
        return self._typical_factors[bucket]

    def _current(self, recent: _Recent | None) -> float | None:
        """What was seen, if it is enough and not from long ago."""
        if recent is None or recent.last_step < self._num_steps - _FORGOTTEN_AFTER:
            return None
        return recent.value


class CostsByKind:
    """Costs of every kind of step.

    Args:
        measure: times trial steps of a kind; called here, for each kind that has trial steps.
    """

    def __init__(self, measure: Callable[[StepKind], Costs]) -> None:
        self._trials = {kind: measure(kind) for kind in TRIED_KINDS}
        self._by_kind: dict[StepKind, KindCosts] = {}

    def of(self, kind: StepKind) -> KindCosts:
        """Costs of one kind; they change with every step that is observed."""
        if kind not in self._by_kind:
            self._by_kind[kind] = KindCosts(self._trials[kind.tried_kind])
        return self._by_kind[kind]
