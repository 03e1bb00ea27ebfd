"""Starting, stopping, starting again; nothing is left behind, whoever forgets to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest
from tests.unit.engine.async_runs import WAIT_S, engine_threads, expected, failing_at, read, sampling
from tests.unit.engine.fake_engine import FakeEngine

import paceline.engine.engine_thread as thread_module
from paceline.engine.async_engine import AsyncEngine
from paceline.errors import CompatibilityError, EngineClosedError, EngineDeadError


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
            [sys.executable, "-c", textwrap.dedent(script), kind],
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in background
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


def test_an_error_that_keeps_its_frames_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "_released", lambda error: error)
    with pytest.raises(AssertionError):
        test_the_engine_itself_is_let_go(dies=True)
