"""Answers of one request run side by side: each whole, all ended with the first that fails, nothing of them kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

import pytest
from tests.unit.engine.async_runs import failing_at, run
from tests.unit.engine.fake_engine import FakeEngine

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.request import RequestDelta, RequestResult, SamplingParameters
from paceline.errors import EngineClosedError, EngineDeadError, NumericError, PacelineError, RequestError
from paceline.serving.fields import FieldError
from paceline.serving.samples import Asked, Event, run_samples


class Timer:
    """What one answer tells."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens, self.num_tokens = num_prompt_tokens, 0
        self.reasons: list[str] = []

    def take(self, delta: RequestDelta) -> None:
        assert not self.reasons
        self.num_tokens += len(delta.token_ids)

    def end(self, reason: str) -> None:
        self.reasons.append(reason)


class Metrics:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def follow(self, num_prompt_tokens: int) -> Timer:
        self.timers.append(Timer(num_prompt_tokens))
        return self.timers[-1]

    @property
    def reasons(self) -> list[str]:
        """Of all answers, in the order of their beginning; each has been told one."""
        assert all(len(timer.reasons) == 1 for timer in self.timers)
        return [timer.reasons[0] for timer in self.timers]


class PickyEngine(FakeEngine):
    """Refuses prompts that begin with 13."""

    def add_request(self, prompt_ids: Any, *arguments: Any, **options: Any) -> str:
        if prompt_ids[0] == 13:
            raise RequestError("stop_token_ids holds 999; the vocabulary has 512 ids")
        return super().add_request(prompt_ids, *arguments, **options)


def asked(*prompts: tuple[int, ...], max_tokens: int = 5, n: int = 1, **options: Any) -> Asked:
    return Asked(prompts, SamplingParameters(max_tokens=max_tokens, n=n, seed=40), **options)


def events_of(engine: AsyncEngine, wanted: Asked, metrics: Metrics) -> AsyncGenerator[Event, None]:
    return run_samples(engine, wanted, "r", cast(Any, metrics))


async def collected(events: AsyncGenerator[Event, None]) -> list[Event]:
    async with contextlib.aclosing(events):
        return [event async for event in events]


def serve(fake: FakeEngine, body: Callable[[AsyncEngine], Awaitable[Any]]) -> Any:
    """Run with the engine, which then holds nothing more."""

    async def checked(engine: AsyncEngine) -> Any:
        found = await body(engine)
        await until(lambda: not (fake.waiting or fake.running or fake.results))
        return found

    return run(checked, fake)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for the engine's thread, a second at most."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never comes to that")


# Whole answers


@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
def test_prompts_and_samples_side_by_side(max_num_seqs: int) -> None:
    wanted, metrics = asked((1,), (1, 2), (1, 2, 3), max_tokens=4, n=3), Metrics()
    assert wanted.num_samples == 9
    events = serve(FakeEngine(max_num_seqs=max_num_seqs), lambda engine: collected(events_of(engine, wanted, metrics)))
    for index in range(9):
        own = [news for which, news in events if which == index]
        *deltas, last = own
        assert isinstance(last, RequestResult) and last.request_id == f"r-{index}"
        assert len(last.prompt_ids) == index // 3 + 1
        assert last.token_ids == tuple(range(len(last.prompt_ids), len(last.prompt_ids) + 4))
        assert all(isinstance(delta, RequestDelta) for delta in deltas)
        assert tuple(token for delta in deltas for token in delta.token_ids) == last.token_ids
        assert "".join(delta.text for delta in deltas) == last.text
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert metrics.reasons == ["length"] * 9
    assert [(timer.num_prompt_tokens, timer.num_tokens) for timer in metrics.timers] == [
        (index // 3 + 1, 4) for index in range(9)
    ]


def test_samples_have_seeds_of_their_own() -> None:
    fake = FakeEngine()
    seen: dict[str, tuple[int | None, int]] = {}
    add = fake.add_request

    def note(prompt: Any, sampling: SamplingParameters, name: str | None = None, **options: Any) -> str:
        seen[str(name)] = (sampling.seed, sampling.n)
        return add(prompt, sampling, name, **options)

    fake.add_request = note  # type: ignore[method-assign]
    serve(fake, lambda engine: collected(events_of(engine, asked((1,), (2,), n=2), Metrics())))
    assert seen == {"r-0": (40, 1), "r-1": (41, 1), "r-2": (40, 1), "r-3": (41, 1)}


def test_priority_and_timeout_are_passed_on() -> None:
    fake, metrics = FakeEngine(step_s=0.002), Metrics()
    wanted = asked((1,), max_tokens=10_000, priority=7, timeout_s=0.05)
    *_, (_, last) = serve(fake, lambda engine: collected(events_of(engine, wanted, metrics)))
    assert fake.order == ["r-0 7"]
    assert isinstance(last, RequestResult) and last.finish_reason == "abort" and last.token_ids
    assert metrics.reasons == ["abort"]


def test_a_reader_that_is_slow_gets_everything() -> None:
    async def body(engine: AsyncEngine) -> list[int]:
        tokens: list[int] = []
        async with contextlib.aclosing(events_of(engine, asked((1,), max_tokens=2000), Metrics())) as events:
            async for _, news in events:
                if len(tokens) < 10:
                    await asyncio.sleep(0.01)
                if isinstance(news, RequestDelta):
                    tokens += news.token_ids
        return tokens

    assert serve(FakeEngine(), body) == list(range(1, 2001))


# Failures


def failure(fake: FakeEngine, wanted: Asked, metrics: Metrics) -> BaseException:
    async def body(engine: AsyncEngine) -> BaseException:
        with pytest.raises(PacelineError) as caught:
            await collected(events_of(engine, wanted, metrics))
        return caught.value

    return cast(BaseException, serve(fake, body))


def test_a_refusal_of_one_ends_the_others() -> None:
    metrics = Metrics()
    error = failure(PickyEngine(max_num_seqs=8), asked((1,), (13,), (2,), max_tokens=100_000), metrics)
    assert isinstance(error, FieldError) and error.param == "stop_token_ids"
    assert metrics.reasons == ["abort", "error", "abort"]


def test_an_error_of_one_ends_the_others() -> None:
    metrics = Metrics()
    fake = FakeEngine(max_num_seqs=1, fail_step=failing_at(3))
    error = failure(fake, asked((1,), (2,), max_tokens=100_000), metrics)
    assert isinstance(error, NumericError) and "step 3" in str(error)
    assert metrics.reasons == ["error", "abort"]
    assert metrics.timers[0].num_tokens == 3


def test_an_error_behind_answers_that_are_whole() -> None:
    metrics = Metrics()
    error = failure(FakeEngine(max_num_seqs=1, fail_step=failing_at(7)), asked((1,), (2,), max_tokens=5), metrics)
    assert isinstance(error, NumericError)
    assert metrics.reasons == ["length", "error"]


def test_an_engine_that_dies_is_told() -> None:
    metrics = Metrics()
    fake = FakeEngine(fail_step=failing_at(*range(1, 100)))

    async def body(engine: AsyncEngine) -> None:
        for expected in (NumericError, NumericError, EngineDeadError):
            with pytest.raises(expected):
                await collected(events_of(engine, asked((1,), max_tokens=50), metrics))

    run(body, AsyncEngine(lambda: fake, most_failures=3))
    assert metrics.reasons == ["error"] * 3


def test_an_engine_that_has_stopped_is_told() -> None:
    metrics = Metrics()

    async def body(engine: AsyncEngine) -> None:
        await engine.stop()
        with pytest.raises(EngineClosedError):
            await collected(events_of(engine, asked((1,), (2,)), metrics))

    run(body, FakeEngine())
    assert metrics.reasons == ["error"] * 2


# Ends from outside


@pytest.mark.parametrize("num_read", [1, 3, 40])
def test_closing_ends_what_runs_and_what_waits(num_read: int) -> None:
    metrics = Metrics()
    fake = FakeEngine(max_num_seqs=2)

    async def body(engine: AsyncEngine) -> None:
        events = events_of(engine, asked((1,), (2,), (3,), max_tokens=10**6), metrics)
        for _ in range(num_read):
            await anext(events)
        await events.aclose()
        assert not fake.running and not fake.waiting and not fake.results

    serve(fake, body)
    assert metrics.reasons == ["abort"] * 3


def test_cancelling_the_reader_ends_everything() -> None:
    metrics = Metrics()

    async def body(engine: AsyncEngine) -> None:
        reader = asyncio.create_task(collected(events_of(engine, asked((1,), n=4, max_tokens=10**6), metrics)))
        await until(lambda: any(timer.num_tokens for timer in metrics.timers))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    serve(FakeEngine(), body)
    assert metrics.reasons == ["abort"] * 4


def test_an_answer_that_ended_unread_is_not_kept_either() -> None:
    """The reader goes while an answer that is whole waits for room in its queue."""
    metrics = Metrics()
    fake = FakeEngine(max_num_seqs=64)

    async def body(engine: AsyncEngine) -> None:
        events = events_of(engine, asked((1,), n=64, max_tokens=60), metrics)
        await anext(events)
        await until(lambda: len(fake.results) == 64)  # far more deltas than the queue holds
        await events.aclose()
        assert not fake.results

    serve(fake, body)
    assert len(metrics.reasons) == 64


def test_closing_before_the_beginning_does_nothing() -> None:
    metrics = Metrics()

    async def body(engine: AsyncEngine) -> None:
        await events_of(engine, asked((1,)), metrics).aclose()

    serve(FakeEngine(), body)
    assert metrics.timers == []
