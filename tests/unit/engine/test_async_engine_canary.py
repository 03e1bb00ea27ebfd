"""Checks of an engine that serves: before its first request, and between steps."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from tests.unit.engine.async_runs import engine_threads, expected, read, run
from tests.unit.engine.fake_engine import FAULTY, FakeEngine

from paceline.engine.async_engine import AsyncEngine
from paceline.errors import CompatibilityError, EngineClosedError


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
