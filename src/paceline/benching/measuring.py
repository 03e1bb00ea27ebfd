"""Which set-up runs when: a warm-up each, then rounds over the same questions, there and back again (A-B-B-A)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.benching.arrivals import arrival_times
from paceline.benching.load import run_load
from paceline.benching.records import AnswerRecord, Load, Pass, Question, SetUp, first_error
from paceline.errors import ServerError
from paceline.trace.acceptance import DraftTotals

_WARM_UPS_AT_ONCE = 8  # where nothing else says how many


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        questions: of every pass.
        loads: one after the other.
        num_rounds: passes of each set-up at each load; with 2, two set-ups run A-B-B-A.
        num_warm_ups: questions of the pass before that does not count; None takes all of them.
        seed: of the arrivals; rounds differ, set-ups do not.
    """

    questions: Sequence[Question]
    loads: Sequence[Load]
    num_rounds: int = 2
    num_warm_ups: int | None = None
    seed: int = 0

    @property
    def warm_ups(self) -> Sequence[Question]:
        """Questions of a warm-up."""
        return self.questions if self.num_warm_ups is None else self.questions[: self.num_warm_ups]

    def num_requests(self, num_setups: int) -> int:
        """Requests in all, warm-ups among them."""
        per_load = len(self.warm_ups) + self.num_rounds * len(self.questions)
        return per_load * num_setups * len(self.loads)


@dataclass(frozen=True)
class Watcher:
    """Who is told how far it is.

    Attributes:
        on_answer: called with each record, of warm-ups too.
        on_pass: called with each pass that counts, once it is whole.
    """

    on_answer: Callable[[AnswerRecord], None] = lambda _record: None
    on_pass: Callable[[Pass], None] = lambda _pass: None


async def measure(setups: Sequence[SetUp], plan: Plan, passes: list[Pass], watcher: Watcher | None = None) -> None:
    """Run the plan.

    Args:
        setups: in the order of the first round.
        plan: what is run.
        passes: each is added as it begins, so that what there is can be read if this is cut short.
        watcher: who is told.

    Raises:
        ServerError: nothing at all came of a pass.
        PacelineError: an engine or a server cannot go on.
    """
    watcher = watcher or Watcher()
    for load in plan.loads:
        for setup in setups:
            await _warm_up(setup, plan, load, watcher)
        for round_index in range(plan.num_rounds):
            for setup in setups if round_index % 2 == 0 else reversed(setups):
                begun = Pass(setup.name, load, round_index)
                passes.append(begun)
                await _run(setup, plan, begun, watcher)
                watcher.on_pass(begun)
                _require_answers(begun.records, setup.name)


async def _warm_up(setup: SetUp, plan: Plan, load: Load, watcher: Watcher) -> None:
    """As the passes go, but in a closed loop: there is nothing to learn from waiting."""
    records: list[AnswerRecord] = []
    if plan.warm_ups:
        await run_load(
            plan.warm_ups,
            setup.ask,
            records,
            concurrency=load.concurrency or _WARM_UPS_AT_ONCE,
            on_answer=watcher.on_answer,
        )
        _require_answers(records, setup.name)


async def _run(setup: SetUp, plan: Plan, begun: Pass, watcher: Watcher) -> None:
    load = begun.load
    arrivals_s = None
    if load.request_rate is not None:
        arrivals_s = arrival_times(
            len(plan.questions),
            load.request_rate,
            burstiness=load.burstiness,
            seed=(plan.seed + begun.round_index) % 2**63,
        )
    before = await setup.counters()
    began_s = time.perf_counter()
    try:
        begun.total_s = await run_load(
            plan.questions,
            setup.ask,
            begun.records,
            concurrency=load.concurrency,
            arrivals_s=arrivals_s,
            on_answer=watcher.on_answer,
        )
    except BaseException:
        begun.total_s = time.perf_counter() - began_s
        raise
    begun.drafting = grown(before, await setup.counters())
    begun.is_whole = True


def grown(before: DraftTotals | None, after: DraftTotals | None) -> DraftTotals | None:
    """What was counted in between; None where a counter is missing, or fell, as after a restart."""
    if before is None or after is None or after.num_steps < before.num_steps:
        return None
    earlier = (*before.kept, *([0] * (len(after.kept) - len(before.kept))))
    return DraftTotals(
        after.num_steps - before.num_steps,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted - before.num_accepted,
        tuple(now - then for now, then in zip(after.kept, earlier, strict=True)),
        None,
    )


def _require_answers(records: Sequence[AnswerRecord], name: str) -> None:
    if records and not any(record.is_whole for record in records):
        raise ServerError(
            f"{name}: all {len(records)} requests of a pass failed; the first with: {first_error(records)}"
        )
