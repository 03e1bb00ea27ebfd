"""One thread serves many coroutines: order, ends of every kind, and failures planted anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.engine import async_runs
from tests.unit.engine.async_runs import expected, failing_at, read, run, sampling
from tests.unit.engine.fake_engine import FakeEngine

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine_thread import EngineThread
from paceline.engine.request import RequestDelta
from paceline.errors import ConfigError, EngineDeadError, RequestError

# Requests


def test_many_requests_at_once_each_get_their_own() -> None:
    async def body(engine: AsyncEngine) -> None:
        prompts = [[0] * (1 + index % 5) for index in range(20)]
        found = await asyncio.gather(*(read(engine, prompt, 3 + len(prompt)) for prompt in prompts))
        assert found == [expected(prompt, 3 + len(prompt)) for prompt in prompts]
        assert (await engine.stats()).num_running == 0

    run(body)


def test_one_thread_owns_the_engine() -> None:
    made: list[FakeEngine] = []

    def make() -> FakeEngine:
        made.append(FakeEngine())
        return made[-1]

    async def body(engine: AsyncEngine) -> None:
        await read(engine, [1])
        await engine.check()
        await engine.clear_prefix_cache()

    run(body, AsyncEngine(make))
    (thread,) = made[0].threads
    assert thread != threading.get_ident()
    assert made[0].is_closed


def test_priority_name_and_timeout_are_passed_on() -> None:
    fake = FakeEngine(step_s=0.002)

    async def body(engine: AsyncEngine) -> None:
        assert (await read(engine, [1], 3, "mine", priority=7))[2] == "length"
        assert fake.order == ["mine 7"]
        assert (await engine.result("mine")).token_ids == (1, 2, 3)
        assert (await engine.take_result("mine")).token_ids == (1, 2, 3)
        with pytest.raises(RequestError):
            await engine.result("mine")
        tokens, _, reason = await read(engine, [1], 10_000, timeout_s=0.05)
        assert reason == "abort" and 0 < len(tokens) < 10_000

    run(body, fake)


def test_an_error_of_one_request_is_its_own() -> None:
    async def body(engine: AsyncEngine) -> None:
        other = asyncio.create_task(read(engine, [1, 2], 200, "taken"))
        await asyncio.sleep(0.01)
        for prompt, name, error in (
            ([1], "taken", RequestError),  # first: however slow the machine is, the other still runs
            ([], None, RequestError),
            (None, None, RequestError),
            ([1], ["no text"], TypeError),  # of the stand-in; the engine has a word for it
        ):
            with pytest.raises(error):
                await read(engine, prompt, name=name)
        assert await other == expected([1, 2], 200)

    run(body, FakeEngine(step_s=0.002))


def test_an_unforeseen_error_in_admission_is_that_requests_own(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(FakeEngine):
        def add_request(self, prompt_ids: Any, *args: Any, **options: Any) -> str:
            if prompt_ids == [13]:
                raise ZeroDivisionError("a bug of ours")
            return super().add_request(prompt_ids, *args, **options)

    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(ZeroDivisionError, match="a bug of ours"):
            await read(engine, [13])
        assert await read(engine, [1]) == expected([1], 5)
        assert engine.is_healthy

    run(body, Odd())
    assert "a bug of ours" in caplog.text


def test_a_slow_reader_gets_everything_in_few_deltas() -> None:
    async def body(engine: AsyncEngine) -> None:
        deltas: list[RequestDelta] = []
        async for delta in engine.generate([1], sampling(200)):
            deltas.append(delta)
            if len(deltas) == 1:
                await read(engine, [1, 2], 300)  # a neighbour ends long before this one is read on
        assert [token for delta in deltas for token in delta.token_ids] == list(range(1, 201))
        assert len(deltas) <= 6 and deltas[-1].finish_reason == "length"

    run(body, AsyncEngine(FakeEngine, most_waiting_deltas=4))


# Ends before the end


def test_leaving_the_loop_ends_the_request() -> None:
    fake = FakeEngine(step_s=0.001)

    async def body(engine: AsyncEngine) -> None:
        async with contextlib.aclosing(engine.generate([1], sampling(100_000), "left")) as deltas:
            async for delta in deltas:
                if delta.token_ids[0] > 3:
                    break
        assert (await engine.result("left")).finish_reason == "abort"
        assert (await engine.stats()).num_running == 0

    run(body, fake)
    assert len(fake.results["left"].token_ids) < 1000


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.004, 0.01, 0.02])
def test_cancelling_at_any_moment_ends_the_request(delay_s: float) -> None:
    fake = FakeEngine(max_num_seqs=2, step_s=0.003)

    async def body(engine: AsyncEngine) -> None:
        kept = asyncio.create_task(read(engine, [1], 12))
        tasks = [asyncio.create_task(read(engine, [1], 100_000)) for _ in range(4)]  # running and waiting ones
        await asyncio.sleep(delay_s)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        assert await kept == expected([1], 12)
        assert (await engine.stats()).num_running == 0

    run(body, fake)
    assert not fake.waiting and not fake.running


def test_abort_gives_the_reader_a_last_delta() -> None:
    async def body(engine: AsyncEngine) -> None:
        async def abort_soon() -> None:
            await asyncio.sleep(0.02)
            await engine.abort("mine")
            await engine.abort("mine")
            await engine.abort("nobody")

        (tokens, text, reason), _ = await asyncio.gather(read(engine, [1], 100_000, "mine"), abort_soon())
        result = await engine.result("mine")
        assert (tuple(tokens), text, reason) == (result.token_ids, result.text, "abort")

    run(body, FakeEngine(step_s=0.001))


# Failures of steps


@pytest.mark.parametrize("where", ["fail_step", "fail_late"])
def test_a_failed_step_ends_those_in_it_and_no_others(where: str, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeEngine(max_num_seqs=2, **{where: failing_at(3)})

    async def body(engine: AsyncEngine) -> None:
        found = await asyncio.gather(*(read(engine, [1], 6, f"r{index}") for index in range(5)))
        assert [reason for *_, reason in found] == ["error", "error", "length", "length", "length"]
        # What was computed in the failed step was not handed out; it is not lost all the same.
        for (tokens, text, _), name in zip(found[:2], ("r0", "r1"), strict=True):
            result = await engine.result(name)
            assert (tuple(tokens), text) == (result.token_ids, result.text)
            assert result.error == "ArithmeticError: step 3"
        assert len(found[0][0]) == (3 if where == "fail_step" else 4)
        assert found[2:] == [expected([1], 6)] * 3
        assert engine.is_healthy

    run(body, fake)
    assert "a step failed, 1 of at most 3 in a row" in caplog.text


def test_a_request_that_ended_in_the_failed_step_has_its_own_end() -> None:
    """The next step returns its last delta."""

    async def body(engine: AsyncEngine) -> None:
        short, long = await asyncio.gather(read(engine, [1], 4), read(engine, [1], 9))
        assert short == expected([1], 4) and long[2] == "error"

    run(body, FakeEngine(fail_late=failing_at(3)))


def test_failures_with_progress_between_them_kill_nothing() -> None:
    fake = FakeEngine(max_num_seqs=1, fail_step=lambda step: failing_at(step)(step) if step % 3 else None)

    async def body(engine: AsyncEngine) -> None:
        for _ in range(8):
            await read(engine, [1], 2)
        assert engine.is_healthy

    run(body, fake)
    assert fake.num_steps > 9


def test_three_failures_in_a_row_kill_the_engine_and_everybody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    made: list[FakeEngine] = []

    def make() -> FakeEngine:
        bad = (2, 3, 4) if not made else ()
        made.append(FakeEngine(max_num_seqs=2, fail_step=failing_at(*bad)))
        return made[-1]

    async def body(engine: AsyncEngine) -> None:
        results = await asyncio.gather(*(read(engine, [1], 6) for _ in range(8)), return_exceptions=True)
        reasons = [type(found) if isinstance(found, Exception) else found[2] for found in results]
        assert reasons == ["error"] * 4 + [EngineDeadError] * 4
        assert isinstance(results[-1].__cause__, ArithmeticError) and "step 4" in str(results[-1])
        assert not engine.is_running and not engine.is_healthy
        for question in (read(engine, [1]), engine.stats(), engine.check(), engine.abort("x"), engine.result("x")):
            with pytest.raises(EngineDeadError):
                await question
        await engine.start()
        assert engine.is_healthy and await read(engine, [1]) == expected([1], 5)

    run(body, AsyncEngine(make))
    assert "the engine is dead" in caplog.text and made[0].is_closed


def test_a_fault_in_the_bookkeeping_kills_at_once() -> None:
    class Broken(FakeEngine):
        def fail(self, request_id: str, error: Exception) -> None:
            raise KeyError("no such request")

    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(EngineDeadError, match="KeyError"):
            await read(engine, [1])

    run(body, Broken(fail_step=failing_at(1)))


@pytest.mark.parametrize("options", [{"canary": "sometimes"}, {"most_failures": 0}, {"most_waiting_deltas": 0}])
def test_impossible_values(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        AsyncEngine(FakeEngine, **options)


# Planted faults: what the tests above must see


def let_the_failed_step_pass(patch: pytest.MonkeyPatch) -> None:
    """A failed step is forgotten: its requests never end, or go on with a hole."""
    patch.setattr(EngineThread, "_recover", lambda self, engine, error: None)


def kill_at_the_first_failure(patch: pytest.MonkeyPatch) -> None:
    """One failure ends everybody."""

    def die(self: EngineThread, engine: Any, error: Exception) -> None:
        raise error

    patch.setattr(EngineThread, "_recover", die)


def fail_everybody(patch: pytest.MonkeyPatch) -> None:
    """A failed step ends those that wait, too."""
    patch.setattr(FakeEngine, "running_ids", lambda self: tuple(self.running | self.waiting))


@pytest.mark.parametrize("plant", [let_the_failed_step_pass, kill_at_the_first_failure, fail_everybody])
def test_wrong_recoveries_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, EngineDeadError)):
        test_a_failed_step_ends_those_in_it_and_no_others("fail_late", caplog)


def test_a_reader_that_left_unnoticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineThread, "abandon", lambda self, stream: None)
    monkeypatch.setattr(async_runs, "WAIT_S", 1)
    with pytest.raises((AssertionError, RequestError)):
        test_leaving_the_loop_ends_the_request()
