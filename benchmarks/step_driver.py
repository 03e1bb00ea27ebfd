"""Bare decode steps: the same batch stepped again and again, without requests, results or a host that waits.

An engine's wall time holds prompt passes, bookkeeping and waiting for results. What a step itself costs the device
shows between events around its launch, while the step before is still being worked on: an engine runs ahead by one
step. Where the host is slower than the device, as in eager mode, the figure is the host's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from paceline.engine.engine import Engine
    from paceline.engine.step import StepBatch

_QUEUE_DEPTH = 2  # steps that the device has in hand, the one that is launched among them
_STEPS_ON = 8  # after so many, requests are set back, so that all steps have the same context


@dataclass(frozen=True)
class StepTimes:
    """What a series of steps took, in milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> StepTimes:
        """Summarise."""
        p10, p90 = np.quantile(milliseconds, [0.1, 0.9])
        return cls(statistics.median(milliseconds), float(p10), float(p90))


def time_steps(
    engine: Engine,
    *,
    batch: int,
    context: int,
    num_warm_up: int,
    num_timed: int,
    temperature: float = 0.0,
    num_drafts: int | None = None,
) -> StepTimes:
    """Step slots 0 to `batch` - 1 of an idle engine and time every step on its device.

    Args:
        engine: without requests; its blocks and slots are borrowed and given back.
        batch: requests.
        context: positions that each has, within a few. The caches hold whatever lies there.
        num_warm_up: steps before those that count.
        num_timed: steps that count.
        temperature: of all requests.
        num_drafts: judged and drawn in each step, as "adaptive" chooses them; None for as many as the drafter makes.
    """
    import torch

    assert not engine.has_unfinished(), "requests would be overwritten"
    parts = engine._loop.parts
    state, tables = parts.state, parts.tables
    num_steps = num_warm_up + num_timed
    count = parts.num_draft_tokens if num_drafts is None else num_drafts
    rows = count + 1
    each = tables.max_blocks
    assert 1 + batch * each <= tables.num_blocks, "the caches hold a full context of every slot"
    for slot in range(batch):
        tables.assign(slot, range(1 + slot * each, 1 + (slot + 1) * each))
        _admit(engine, slot, context, temperature)
    state.flush()
    tables.flush()
    make_batch = _batches(engine, batch, temperature, count)
    first = max(1, context - _STEPS_ON // 2)
    bound = min(first + _STEPS_ON * rows, each * tables.block_size - rows)
    clock = _DeviceClock(state.device)
    try:
        with torch.inference_mode():
            for index in range(num_steps):
                if index % _STEPS_ON == 0:
                    _set_back(engine, batch, first)
                step = make_batch(bound)
                clock.wait_for_all_but(_QUEUE_DEPTH - 1)
                clock.begin()
                engine._loop.run_step(step)
                clock.end()
            return StepTimes.of(clock.milliseconds()[num_warm_up:])
    finally:
        for slot in range(batch):
            tables.clear(slot)
            state.restore(slot, length=0, anchor=0, step=0)
        tables.flush()
        state.flush()


def _admit(engine: Engine, slot: int, context: int, temperature: float) -> None:
    from paceline.engine.request import SamplingParameters

    parts = engine._loop.parts
    parts.state.admit(slot, SamplingParameters(temperature=temperature), seed=slot)
    parts.state.restore(slot, length=context, anchor=10 + slot, step=0)
    if parts.recurrent is not None:
        parts.recurrent.begin(slot)


def _set_back(engine: Engine, batch: int, length: int) -> None:
    """Let requests stand where they stood, on the device, which is not waited for."""
    parts = engine._loop.parts
    parts.state.lengths[:batch].fill_(length)
    if parts.recurrent is not None:
        parts.recurrent.ends_S[:batch].fill_(length)


def _batches(engine: Engine, batch: int, temperature: float, num_drafts: int) -> Callable[[int], StepBatch]:
    """Puts steps together as the engine's loop does; asked with a bound of the requests' positions."""
    import torch

    from paceline.engine.draft_stopper import DraftPlan
    from paceline.engine.proposal import Rows
    from paceline.engine.request import SamplingParameters
    from paceline.engine.sampling_flags import SamplingFlags
    from paceline.engine.step import StepBatch

    has_drafter = engine._loop.parts.num_draft_tokens > 0
    slots = list(range(batch))
    flags = SamplingFlags.of([SamplingParameters(temperature=temperature)] * batch)
    plan = DraftPlan((num_drafts,) * batch, teaches=(True,) * batch)

    def make(bound: int) -> StepBatch:
        bounds = [bound] * batch
        rows = Rows(slots, torch.tensor(slots), bounds, torch.tensor(bounds), num_drafts + 1)
        return StepBatch(rows=rows, flags=flags, writes_context=has_drafter, plan=plan)

    return make


class _DeviceClock:
    """Times spans on the device's own clock where it is a GPU, else on the host's.

    Args:
        device: where the work is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_ms: list[float] = []
        self._began_s = 0.0

    def begin(self) -> None:
        """What is queued from now on counts."""
        if self._is_gpu:
            import torch

            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)
        self._began_s = time.perf_counter()

    def end(self) -> None:
        """Up to here."""
        if self._is_gpu:
            self._events[-1][1].record()
        else:
            self._host_ms.append((time.perf_counter() - self._began_s) * 1e3)

    def wait_for_all_but(self, count: int) -> None:
        """Until at most so many spans are still being worked on."""
        if self._is_gpu and len(self._events) > count:
            self._events[-1 - count][1].synchronize()

    def milliseconds(self) -> list[float]:
        """Each span, in order."""
        self.wait_for_all_but(0)
        if not self._is_gpu:
            return self._host_ms
        return [began.elapsed_time(ended) for began, ended in self._events]
