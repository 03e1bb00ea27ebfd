"""The heap is frozen while somebody serves, and only what this froze is thawed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
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


def test_what_only_one_that_ended_held_goes_with_it() -> None:
    """New engines start before old ones stop, again and again: what nobody needs any more must not pile up."""

    class Model:
        def __init__(self) -> None:
            self.me = self  # a cycle, as every module is one with its hooks

    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    model = Model()
    seen = weakref.ref(model)
    first.enter_context(frozen_heap())
    second.enter_context(frozen_heap())
    del model
    assert gc.collect() >= 0 and seen() is not None, "frozen, or the test shows nothing"
    first.close()
    assert seen() is None and gc.get_freeze_count() > 1000
    second.close()


def test_what_the_process_freezes_meanwhile_stays_frozen() -> None:
    with frozen_heap():
        more = [[number] for number in range(100_000)]
        gc.freeze()
        assert len(more) == 100_000
    assert gc.get_freeze_count() > 1000
    gc.unfreeze()


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


@pytest.mark.parametrize("inside", [False, True])
def test_an_engine_that_is_collected_meanwhile_can_end(inside: bool) -> None:
    """Its finaliser waits for a thread that gives its own hold up: whoever collects must not keep that from it."""

    class Owner:
        def __init__(self) -> None:
            self.me = self

    holds, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with frozen_heap():
            holds.set()
            may_end.wait()

    def end() -> None:
        may_end.set()
        thread.join(5)
        ended.append(not thread.is_alive())

    ended: list[bool] = []
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holds.wait(5)
    if inside:
        with frozen_heap():
            weakref.finalize(Owner(), end)
    else:
        weakref.finalize(Owner(), end)
        with frozen_heap():
            pass
    assert ended == [True]


def test_an_error_thaws_it() -> None:
    with pytest.raises(ValueError, match="broken"), frozen_heap():
        raise ValueError("broken")


def test_what_the_process_froze_stays_frozen() -> None:
    """Told by one object, which no list of the collector has: the number falls whenever something frozen is let go."""
    frozen = [object()]
    gc.freeze()
    try:
        with frozen_heap():
            pass
        assert not any(one is frozen for one in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(one is frozen for one in gc.get_objects())


@pytest.mark.parametrize("freezes_heap", [True, False])
def test_an_engine_that_serves_freezes_the_heap_where_it_is_told_to(freezes_heap: bool) -> None:
    target, drafter = tiny.loaded()

    async def serve() -> int:
        made = AsyncEngine(lambda: Engine(target, drafter, EngineSettings()), canary="off", freezes_heap=freezes_heap)
        async with made as engine:
            (prompt,) = tiny.tiny_prompts([5])
            async for _ in engine.generate(prompt, SamplingParameters(max_tokens=4)):
                pass
            return gc.get_freeze_count()

    assert (asyncio.run(serve()) > 1000) is freezes_heap
