"""One thread serves many coroutines: order, ends of every kind, failures planted anywhere, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.unit.engine.fake_engine import FAULTY, FakeEngine

import paceline.engine.engine_thread as thread_module
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine_thread import EngineThread
from paceline.engine.request import RequestDelta, SamplingParameters
from paceline.errors import CompatibilityError, ConfigError, EngineClosedError, EngineDeadError, RequestError

WAIT_S = 20


def sampling(max_tokens: int = 5) -> SamplingParameters:
    return SamplingParameters(max_tokens=max_tokens)


async def read(
    engine: AsyncEngine, prompt: list[int], max_tokens: int = 5, name: str | None = None, **options: Any
) -> tuple[list[int], str, str | None]:
    """Tokens, text and reason of a whole request."""
    tokens: list[int] = []
    text, reason = "", None
    async for delta in engine.generate(prompt, sampling(max_tokens), name, **options):
        assert reason is None, "nothing comes behind the last delta"
        tokens += delta.token_ids
        text, reason = text + delta.text, delta.finish_reason
    return tokens, text, reason


def expected(prompt: list[int], max_tokens: int) -> tuple[list[int], str, str]:
    tokens = list(range(len(prompt), len(prompt) + max_tokens))
    return tokens, "".join(f"{token} " for token in tokens), "length"


def run(body: Callable[..., Awaitable[Any]], engine: AsyncEngine | FakeEngine | None = None) -> Any:
    """Run a coroutine with a started engine; afterwards no thread of it is left."""
    served = engine if isinstance(engine, AsyncEngine) else AsyncEngine(lambda: engine or FakeEngine())

    async def whole() -> Any:
        async with served:
            return await asyncio.wait_for(body(served), WAIT_S)

    try:
        return asyncio.run(whole())
    finally:
        assert engine_threads() == []


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "paceline-engine"]


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
        other = asyncio.create_task(read(engine, [1, 2], 50, "taken"))
        await asyncio.sleep(0.01)
        for prompt, name, error in (([], None, RequestError), ([1], "taken", RequestError), (None, None, RequestError)):
            with pytest.raises(error):
                await read(engine, prompt, name=name)
        assert await other == expected([1, 2], 50)

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


def failing_at(*steps: int) -> Callable[[int], None]:
    def fail(step: int) -> None:
        if step in steps:
            raise ArithmeticError(f"step {step}")

    return fail


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


# Starting and stopping


def test_stop_with_drain_serves_what_it_has_and_takes_nothing_new() -> None:
    async def whole() -> None:
        engine = AsyncEngine(lambda: FakeEngine(step_s=0.002))
        await engine.start()
        tasks = [asyncio.create_task(read(engine, [1], 20)) for _ in range(5)]
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0.005)
        with pytest.raises(EngineClosedError, match="is stopping"):
            await read(engine, [1])
        assert await asyncio.gather(*tasks) == [expected([1], 20)] * 5
        await stopping
        with pytest.raises(EngineClosedError, match="start"):
            await engine.stats()
        await engine.stop()

    asyncio.run(whole())
    assert engine_threads() == []


@pytest.mark.parametrize("options", [{"drain": False}, {"timeout_s": 0.02}])
def test_stop_that_does_not_wait_aborts_the_rest(options: dict[str, Any]) -> None:
    async def whole() -> None:
        engine = AsyncEngine(lambda: FakeEngine(step_s=0.002))
        await engine.start()
        tasks = [asyncio.create_task(read(engine, [1], 100_000)) for _ in range(5)]
        await asyncio.sleep(0.02)
        await engine.stop(**options)
        found = await asyncio.gather(*tasks)
        assert [reason for *_, reason in found] == ["abort"] * 5
        assert found[0][0] and not found[-1][0]

    asyncio.run(whole())
    assert engine_threads() == []


def test_a_stop_that_is_cancelled_hurries() -> None:
    async def whole() -> None:
        engine = AsyncEngine(lambda: FakeEngine(step_s=0.002))
        await engine.start()
        task = asyncio.create_task(read(engine, [1], 1_000_000))
        await asyncio.sleep(0.01)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.stop(), 0.05)
        assert (await task)[2] == "abort"
        await engine.stop()

    asyncio.run(whole())
    assert engine_threads() == []


def test_an_error_in_the_block_stops_without_waiting() -> None:
    async def whole() -> None:
        async with AsyncEngine(lambda: FakeEngine(step_s=0.002)) as engine:
            asyncio.create_task(read(engine, [1], 1_000_000))  # noqa: RUF006
            await asyncio.sleep(0.01)
            raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        asyncio.run(asyncio.wait_for(whole(), WAIT_S))
    assert engine_threads() == []


def test_one_engine_serves_three_event_loops_one_after_another() -> None:
    made: list[FakeEngine] = []

    def make() -> FakeEngine:
        made.append(FakeEngine(step_s=0.001))
        return made[-1]

    engine = AsyncEngine(make)

    async def serve(is_last: bool) -> None:
        await engine.start()
        assert await read(engine, [1, 2], 4) == expected([1, 2], 4)
        # Left as it is: asyncio.run cancels it, and the next loop finds an engine without requests.
        asyncio.create_task(read(engine, [1], 1_000_000))  # noqa: RUF006
        await asyncio.sleep(0.01)
        if is_last:
            await engine.stop(drain=False)

    for index in range(3):
        asyncio.run(serve(index == 2))
    assert len(made) == 1 and len(made[0].order) == 6
    assert engine_threads() == []


def test_a_loop_that_was_closed_around_a_reader_does_not_keep_its_request() -> None:
    fake = FakeEngine(step_s=0.001)
    engine = AsyncEngine(lambda: fake)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    deltas = engine.generate([1], sampling(1_000_000), "left")
    loop.run_until_complete(anext(deltas))
    loop.close()

    async def ended() -> None:
        async with asyncio.timeout(WAIT_S):
            while (await engine.stats()).num_running:
                await asyncio.sleep(0.001)
        assert (await engine.result("left")).finish_reason == "abort"
        await engine.stop()

    asyncio.run(ended())
    asyncio.run(deltas.aclose())


@pytest.mark.parametrize("stops", [True, False])
def test_start_stop_start(stops: bool) -> None:
    made: list[FakeEngine] = []

    def make() -> FakeEngine:
        made.append(FakeEngine())
        return made[-1]

    async def whole() -> None:
        engine = AsyncEngine(make)
        for _ in range(20):
            await engine.start()
            await engine.start()
            assert await read(engine, [1]) == expected([1], 5)
            if stops:
                await engine.stop()
        await engine.stop()

    asyncio.run(whole())
    assert len(made) == (20 if stops else 1) and all(fake.is_closed for fake in made)
    assert engine_threads() == []


def test_what_make_engine_raises_comes_out_of_start() -> None:
    async def whole() -> None:
        engine = AsyncEngine(failing)
        for _ in range(2):
            with pytest.raises(CompatibilityError, match="another target"):
                await engine.start()
            assert not engine.is_running and engine_threads() == []
        with pytest.raises(EngineClosedError):
            await engine.stats()

    def failing() -> FakeEngine:
        raise CompatibilityError("the drafter is of another target")

    asyncio.run(whole())


def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    let_go = threading.Event()

    def slow() -> FakeEngine:
        let_go.wait(WAIT_S)
        return FakeEngine()

    async def whole() -> None:
        engine = AsyncEngine(slow)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.start(), 0.05)
        let_go.set()
        await engine.start()
        assert await read(engine, [1]) == expected([1], 5)
        await engine.stop()

    asyncio.run(whole())
    assert engine_threads() == []


def test_nothing_is_served_before_start() -> None:
    async def whole() -> None:
        engine = AsyncEngine(FakeEngine)
        with pytest.raises(EngineClosedError, match="has not been started"):
            await read(engine, [1])
        await engine.stop()

    asyncio.run(whole())


def test_an_engine_that_nobody_stopped_ends_when_it_is_collected() -> None:
    async def whole() -> None:
        engine = AsyncEngine(FakeEngine)
        await engine.start()
        await read(engine, [1])

    asyncio.run(whole())
    gc.collect()
    assert engine_threads() == []


def test_a_process_ends_although_nobody_stopped_the_engine() -> None:
    """And with the code of Ctrl-C where that came while requests were running."""
    script = """
        import asyncio, os, signal, sys
        from paceline.engine.async_engine import AsyncEngine
        from paceline.engine.request import SamplingParameters
        from tests.unit.engine.fake_engine import FakeEngine

        fake = FakeEngine(step_s=0.001)
        engine = AsyncEngine(lambda: fake)

        async def main():
            await engine.start()
            async for delta in engine.generate([1], SamplingParameters(max_tokens=100000)):
                if delta.token_ids[0] > 20:
                    if sys.argv[1] == "interrupt":
                        os.kill(os.getpid(), signal.SIGINT)
                        await asyncio.sleep(20)
                    break

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            sys.exit(130)
    """
    for kind, code in (("leave", 0), ("interrupt", 130)):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), kind], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (code, ""), done.stderr


@pytest.mark.parametrize("dies", [False, True])
def test_the_engine_itself_is_let_go(dies: bool) -> None:
    """An exception that a caller keeps must not keep the engine, whose frames it came through."""
    kept: list[BaseException] = []
    made: list[weakref.ref[FakeEngine]] = []

    def make() -> FakeEngine:
        fake = FakeEngine(fail_step=failing_at(*range(2, 5 if dies else 2)))
        made.append(weakref.ref(fake))
        return fake

    async def whole() -> None:
        engine = AsyncEngine(make)
        for _ in range(3):
            await engine.start()
            for prompt in ([], [1], [1], [1]):
                try:
                    await read(engine, prompt)
                except Exception as error:
                    kept.append(error)
            with contextlib.suppress(EngineDeadError):
                await engine.check()
            await engine.stop()
        gc.collect()
        assert [ref() for ref in made] == [None] * 3

    asyncio.run(whole())
    assert len(kept) == (6 if dies else 3)


# The canary


def test_a_faulty_engine_does_not_start() -> None:
    fake = FakeEngine(report=FAULTY)

    async def whole() -> None:
        engine = AsyncEngine(lambda: fake)
        with pytest.raises(CompatibilityError, match="draft 2 of step 1 was 7"):
            await engine.start()
        assert engine_threads() == []

    asyncio.run(whole())
    assert fake.is_closed


@pytest.mark.parametrize(
    ("options", "settings", "num_checks"), [({}, {}, 5), ({"canary": "off"}, {}, 0), ({}, {"canary": "start"}, 0)]
)
def test_the_check_at_the_start_runs_once(options: dict[str, Any], settings: dict[str, Any], num_checks: int) -> None:
    """Not at all where it is off, or where the engine has done it itself."""
    fake = FakeEngine(**settings)

    async def body(engine: AsyncEngine) -> None:
        assert engine.is_healthy and fake.num_checks == num_checks

    run(body, AsyncEngine(lambda: fake, **options))


def test_a_check_runs_in_pieces_between_the_steps_of_requests() -> None:
    fake = FakeEngine(step_s=0.002)

    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(read(engine, [1], 60))
        await asyncio.sleep(0.01)
        before = fake.num_steps
        report = await engine.check()
        assert report.has_passed and fake.num_checks == 5 and engine.is_healthy
        assert fake.num_steps - before >= 4, "a step came between any two pieces"
        assert await task == expected([1], 60)
        first, second = await asyncio.gather(engine.check(), engine.check())
        assert first.has_passed and second.has_passed

    run(body, AsyncEngine(lambda: fake, canary="off"))


def test_a_fault_found_while_running_is_told_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeEngine()

    async def body(engine: AsyncEngine) -> None:
        fake.report = FAULTY
        with caplog.at_level(logging.ERROR, logger="paceline"):
            report = await engine.check()
        assert not report.has_passed and engine.is_running and not engine.is_healthy
        assert await read(engine, [1]) == expected([1], 5)
        fake.report = FakeEngine().report
        assert (await engine.check()).has_passed and engine.is_healthy

    run(body, fake)
    assert "the canary found a fault" in caplog.text


def test_a_check_that_cannot_run_fails_alone() -> None:
    class Odd(FakeEngine):
        def canary_steps(self) -> Any:
            yield
            raise MemoryError("no room for the canary's engines")

    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(MemoryError):
            await engine.check()
        assert engine.is_healthy and await read(engine, [1]) == expected([1], 5)

    run(body, AsyncEngine(Odd, canary="off"))


def test_a_stop_ends_a_check() -> None:
    fake = FakeEngine(step_s=0.01)

    async def whole() -> None:
        engine = AsyncEngine(lambda: fake, canary="off")
        await engine.start()
        reading = asyncio.create_task(read(engine, [1], 100_000))
        checking = asyncio.create_task(engine.check())
        await asyncio.sleep(0.015)
        await engine.stop(drain=False)
        with pytest.raises(EngineClosedError):
            await checking
        assert (await reading)[2] == "abort"

    asyncio.run(whole())


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
    monkeypatch.setattr(sys.modules[__name__], "WAIT_S", 1)
    with pytest.raises((AssertionError, RequestError)):
        test_leaving_the_loop_ends_the_request()


def test_an_error_that_keeps_its_frames_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "_released", lambda error: error)
    with pytest.raises(AssertionError):
        test_the_engine_itself_is_let_go(dies=True)
