"""Runs the answers of one HTTP request side by side: each prompt, n times, as one stream of what happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.engine.request import RequestDelta, RequestResult
from paceline.engine.sampling import SamplingParameters, samples_of
from paceline.errors import NumericError, RequestError
from paceline.serving.fields import named

if TYPE_CHECKING:
    from paceline.engine.async_engine import AsyncEngine
    from paceline.serving.metrics import ServerMetrics

_MOST_WAITING = 256  # deltas between the engine and a reader that is slow; behind them the engine joins further ones


@dataclass(frozen=True)
class Asked:
    """What a request comes to.

    Attributes:
        prompts: ids of each.
        sampling: of all; `n` answers for each prompt.
        priority: as for `AsyncEngine.generate`, and so are the other two.
        timeout_s: likewise.
        cache_salt: likewise.
        interval_s: likewise.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParameters
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str | None = None
    interval_s: float = 0.0

    @property
    def num_samples(self) -> int:
        """Answers in all; answer `i` is of prompt `i // n`."""
        return len(self.prompts) * self.sampling.n


Event = tuple[int, RequestDelta | RequestResult]


async def run_samples(
    engine: AsyncEngine, asked: Asked, request_id: str, metrics: ServerMetrics
) -> AsyncGenerator[Event, None]:
    """Run everything that was asked for; closing the generator ends it.

    Args:
        engine: that serves.
        asked: what for.
        request_id: of the HTTP request; those of the engine begin with it.
        metrics: told of each answer.

    Yields:
        Of each answer, its deltas and then its result, beside its index.

    Raises:
        PacelineError: one of them was refused, or ended in an error; the others end with it.
    """
    waiting: asyncio.Queue[Event | BaseException] = asyncio.Queue(_MOST_WAITING)
    samples = samples_of(asked.sampling)
    runs: Sequence[tuple[tuple[int, ...], SamplingParameters]] = [
        (prompt, sampling) for prompt in asked.prompts for sampling in samples
    ]
    tasks = [
        asyncio.create_task(_run(engine, asked, prompt, sampling, f"{request_id}-{index}", index, waiting, metrics))
        for index, (prompt, sampling) in enumerate(runs)
    ]
    try:
        num_running = len(tasks)
        while num_running:
            event = await waiting.get()
            if isinstance(event, BaseException):
                raise event
            num_running -= isinstance(event[1], RequestResult)
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    engine: AsyncEngine,
    asked: Asked,
    prompt: tuple[int, ...],
    sampling: SamplingParameters,
    name: str,
    index: int,
    waiting: asyncio.Queue[Event | BaseException],
    metrics: ServerMetrics,
) -> None:
    timer = metrics.follow(len(prompt))
    reason = "abort"  # unless it comes to an end of its own
    is_taken = False
    try:
        stream = engine.generate(
            prompt,
            sampling,
            name,
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            cache_salt=asked.cache_salt,
            interval_s=asked.interval_s,
        )
        async with contextlib.aclosing(stream):
            async for delta in stream:
                timer.take(delta)
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                await waiting.put((index, delta))
        result = await engine.take_result(name)
        is_taken = True
        if result.finish_reason == "error":
            kind = RequestError if result.has_dead_end else NumericError  # its own rules, or numbers
            raise kind(result.error or "the request ended in an error")
        await waiting.put((index, result))
    except Exception as error:
        reason = "error"
        await waiting.put(named(error) if isinstance(error, RequestError) else error)
    finally:
        timer.end(reason)
        if not is_taken:  # behind the end of its request; where there is none, it was refused or the engine is gone
            with contextlib.suppress(Exception):
                await engine.take_result(name)
