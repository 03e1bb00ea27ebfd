"""What "adaptive" promises, on a made-up device: drafting where it pays, and plain decoding is never left behind.

The device is like a GPU: steps are padded to 1, 2, 4 or 8 rows, the host runs one step ahead and is busy for a while
with each, and now and then something takes five times as long. Times are those of a small model's sampled steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from paceline.engine.draft_length import DraftLengthController, JudgedBlock
from paceline.engine.kind_costs import CostsByKind, KindCosts
from paceline.engine.step_cost import StepCostTable, WholeStepCosts
from paceline.engine.step_kind import SAMPLED_STEP, StepAhead, StepKind, StepSize, TextKind

ROWS = (1, 2, 4, 8)
TEXT = TextKind(is_sampled=True)
HICCUP_SHARE, HICCUP = 0.01, 5.0


@dataclass(frozen=True)
class Device:
    """By requests: ms of a plain step without context, of steps of 1, 2, 4, 8 rows, greedy and sampled, of the host."""

    plain_ms: float
    greedy_ms: tuple[float, ...]
    sampled_ms: tuple[float, ...]
    host_ms: float

    def trial(self, num_requests: int, *, is_sampled: bool) -> WholeStepCosts:
        whole = self.sampled_ms if is_sampled else self.greedy_ms
        steps = {(num_requests, rows): ms for rows, ms in zip(ROWS, whole, strict=True)}
        return WholeStepCosts(StepCostTable(steps, is_padded=True), StepCostTable({(num_requests, 1): self.plain_ms}))


DEVICES = {
    1: Device(0.53, (0.57, 0.70, 0.72, 0.75), (0.57, 0.74, 0.78, 0.83), 0.25),
    8: Device(0.60, (0.66, 0.80, 0.90, 1.05), (0.66, 1.00, 1.15, 1.35), 0.30),
    32: Device(0.92, (1.00, 1.15, 1.25, 1.40), (1.00, 1.45, 1.65, 2.00), 0.60),
    128: Device(1.30, (1.50, 1.80, 2.10, 2.90), (1.50, 2.20, 2.60, 3.60), 2.00),
}


def serve(num_requests: int, rate: float, num_steps: int, *, takes_sampled_for_greedy: bool = False) -> float:
    """Tokens per ms with "adaptive" over those of an engine without a drafter; every draft is kept at a rate."""
    device, generator = DEVICES[num_requests], random.Random(0)

    def measure(kind: StepKind) -> WholeStepCosts:
        return device.trial(num_requests, is_sampled=kind.is_sampled and not takes_sampled_for_greedy)

    controller = DraftLengthController(7, CostsByKind(measure))
    step = StepAhead(SAMPLED_STEP, num_requests, ((TEXT, num_requests),))
    waiting, has_context, total_ms, num_tokens = controller.next_num_drafts(step), True, 0.0, 0
    unread: list[tuple[list[JudgedBlock], StepSize | None, float]] = []
    for _ in range(num_steps):
        if not has_context:  # requests come and go; a new one is asked for where a probe is due
            controller.skip_step(SAMPLED_STEP)
            has_context = controller.wants_another_request(step)
        planned = controller.next_num_drafts(step) if has_context else 0
        row_index = padded(max(waiting, planned))
        ms = device.sampled_ms[row_index] if has_context or row_index > 0 else device.plain_ms
        ms = max(ms, device.host_ms) * generator.lognormvariate(0, 0.03)
        total_ms += ms * (HICCUP if generator.random() < HICCUP_SHARE else 1)
        blocks = []
        for _ in range(num_requests):
            accepted = next((i for i in range(waiting) if generator.random() >= rate), waiting)
            blocks.append(JudgedBlock(TEXT, waiting, accepted))
            num_tokens += 1 + accepted
        is_steady = row_index == padded(planned)
        size = StepSize(SAMPLED_STEP, num_requests, planned, has_context) if is_steady else None
        unread.append((blocks, size, ms))
        waiting = planned
        if len(unread) == 2:
            blocks, size, ms = unread.pop(0)
            controller.observe(SAMPLED_STEP, blocks)
            if size is not None:
                controller.costs.of(SAMPLED_STEP).observe(size, ms, device.host_ms)
            if controller.has_given_up(SAMPLED_STEP) and waiting == 0:
                has_context = False
    plain_ms = max(device.plain_ms, device.host_ms) * (1 + HICCUP_SHARE * (HICCUP - 1))
    return num_tokens / total_ms / (num_requests / plain_ms)


def padded(num_drafts: int) -> int:
    """Which of `ROWS` a step has that judges so many."""
    return next(index for index, rows in enumerate(ROWS) if rows > num_drafts)


def best(num_requests: int, rate: float) -> float:
    """The same for the best constant length, 0 included."""
    device = DEVICES[num_requests]
    ratios = [
        sum(rate**i for i in range(rows)) * max(device.plain_ms, device.host_ms) / max(ms, device.host_ms)
        for rows, ms in zip(ROWS, device.sampled_ms, strict=True)
    ]
    return max(1.0, *ratios)


@pytest.mark.parametrize("num_requests", list(DEVICES))
@pytest.mark.parametrize("rate", [0.2, 0.46, 0.6])
def test_it_is_near_the_best_constant_length_and_never_clearly_below_plain_decoding(
    num_requests: int, rate: float
) -> None:
    ratio = serve(num_requests, rate, 1200)
    assert ratio > 0.95
    assert ratio > 0.91 * best(num_requests, rate)


@pytest.mark.parametrize("num_requests", [8, 32])
def test_costs_of_greedy_steps_leave_sampled_text_below_plain_decoding(
    num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted, as it once was; what real steps are seen to take makes up for it."""
    assert serve(num_requests, 0.4, 1200, takes_sampled_for_greedy=True) > 0.95
    monkeypatch.setattr(KindCosts, "observe", lambda *_args: None)
    assert serve(num_requests, 0.4, 1200, takes_sampled_for_greedy=True) < 0.9


def test_lengths_that_were_not_run_are_not_taken_to_be_as_slow_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: with everything as slow as what was found to be slow, nobody ever learns what plain decoding costs."""

    def slowest(costs: KindCosts, _bucket: int) -> float:
        return max((factor.value for factor in costs._factors.values() if factor.value is not None), default=1.0)

    monkeypatch.setattr(KindCosts, "_typical", slowest)
    assert serve(8, 0.4, 1200, takes_sampled_for_greedy=True) < 0.9


def test_without_what_the_host_takes_plain_decoding_seems_faster_than_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many requests the device waits for the host, so drafts are nearly free."""
    assert serve(128, 0.46, 500) > 1.3
    monkeypatch.setattr(KindCosts, "_least_ms", lambda *_args: 0.0)
    assert serve(128, 0.46, 500) < 1.25
