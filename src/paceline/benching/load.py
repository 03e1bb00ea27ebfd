"""The load generator: a closed loop keeps a number of requests in flight, an open loop sends them as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from paceline.benching.records import AnswerRecord, Question

Ask = Callable[[Question], Awaitable[AnswerRecord]]


async def run_load(
    questions: Sequence[Question],
    ask: Ask,
    finished: list[AnswerRecord],
    *,
    concurrency: int | None,
    arrivals_s: Sequence[float] | None = None,
    on_answer: Callable[[AnswerRecord], None] = lambda _record: None,
) -> float:
    """Ask all questions.

    Args:
        questions: in the order in which they are sent.
        ask: asks one; an error that it raises ends the loop.
        finished: records are added to it as they come, so that they are there if the loop is cut short.
        concurrency: most requests at once; None sets no limit.
        arrivals_s: of an open loop, when each arrives; None is a closed loop.
        on_answer: called with each record.

    Returns:
        Seconds from the beginning to the last end.
    """
    began_s = time.perf_counter()

    async def answer(question: Question, due_s: float | None) -> None:
        record = await ask(question)
        record.place(began_s, due_s)
        finished.append(record)
        on_answer(record)

    if arrivals_s is None:
        waiting = iter(questions)

        async def ask_in_turn() -> None:
            for question in waiting:
                await answer(question, None)

        await _all(ask_in_turn() for _ in range(min(concurrency or len(questions), len(questions))))
    else:
        places = asyncio.Semaphore(concurrency) if concurrency is not None else contextlib.nullcontext()

        async def ask_when_due(question: Question, due_s: float) -> None:
            await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
            async with places:
                await answer(question, due_s)

        await _all(ask_when_due(*each) for each in zip(questions, arrivals_s, strict=True))
    return time.perf_counter() - began_s


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them side by side; where one raises, or this is cancelled, none is left behind."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
