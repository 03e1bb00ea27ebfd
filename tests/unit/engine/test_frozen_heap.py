"""The heap is frozen while somebody serves, and only what this froze is thawed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest
from tests import tiny

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.frozen_heap import frozen_heap
from paceline.engine.sampling import SamplingParameters


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    assert gc.get_freeze_count() == 0
    gc.collect()
    gc.freeze()  # as the session has it: thawed, every collection and every server that starts would walk all modules


def test_it_is_frozen_until_the_last_is_done() -> None:
    with frozen_heap():
        assert gc.get_freeze_count() > 1000
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_garbage_is_not_kept() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    gc.disable()
    try:
        for _ in range(100):
            Cycle()
        with frozen_heap():
            gc.unfreeze()
            assert not any(type(one).__name__ == "Cycle" for one in gc.get_objects())
    finally:
        gc.enable()


def test_an_error_thaws_it() -> None:
    with pytest.raises(ValueError, match="broken"), frozen_heap():
        raise ValueError("broken")


def test_what_the_process_froze_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() == before
    gc.unfreeze()


def test_an_engine_that_serves_is_frozen_and_one_that_ended_is_not() -> None:
    target, drafter = tiny.loaded()

    async def serve() -> int:
        async with AsyncEngine(lambda: Engine(target, drafter, EngineSettings()), canary="off") as engine:
            (prompt,) = tiny.tiny_prompts([5])
            async for _ in engine.generate(prompt, SamplingParameters(max_tokens=4)):
                pass
            return gc.get_freeze_count()

    assert asyncio.run(serve()) > 1000
