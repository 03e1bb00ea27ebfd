"""Deltas reach one reader in order, joined where it is slow; an error comes behind them, a closed loop is noticed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.engine.delta_stream import DeltaStream, joined
from paceline.engine.request import RequestDelta, TokenLogprobs
from paceline.trace.step import StepRecord


def delta(token: int, **fields: object) -> RequestDelta:
    return RequestDelta("r", (token,), f"<{token}>", **fields)


def record(step: int) -> StepRecord:
    return StepRecord("r", step, 5, 1, (2,), 0, 0, (3,), 3, 1.0)


def test_two_deltas_as_one() -> None:
    entry = TokenLogprobs(1, -0.5, (), "raw")
    first = RequestDelta("r", (1, 2), "ab", None, record(0), (entry, entry))
    last = RequestDelta("r", (3,), "c", "stop", record(1), (entry,))
    assert joined(first, last) == RequestDelta("r", (1, 2, 3), "abc", "stop", record(1), (entry,) * 3)
    assert joined(first, RequestDelta("r", (), "", "abort")).step == record(0)
    assert joined(delta(1), delta(2)).logprobs is None


def test_a_slow_reader_loses_nothing_and_keeps_little_waiting() -> None:
    async def read() -> list[RequestDelta]:
        stream = DeltaStream(asyncio.get_running_loop(), 3)
        writer = threading.Thread(target=lambda: [stream.put(delta(index)) for index in range(100)])
        writer.start()
        writer.join()
        stream.put(delta(100, finish_reason="length"))
        return [await stream.get() for _ in range(3)]

    found = asyncio.run(read())
    assert [entry.token_ids for entry in found[:2]] == [(0,), (1,)]
    assert found[2].token_ids == tuple(range(2, 101)) and found[2].finish_reason == "length"
    assert "".join(entry.text for entry in found) == "".join(f"<{index}>" for index in range(101))


def test_a_fast_reader_waits_for_each() -> None:
    async def read() -> list[int]:
        stream = DeltaStream(asyncio.get_running_loop(), 2)
        found = []
        for index in range(200):
            asyncio.get_running_loop().run_in_executor(None, stream.put, delta(index))
            found += (await asyncio.wait_for(stream.get(), 10)).token_ids
        return found

    assert asyncio.run(read()) == list(range(200))


def test_an_error_comes_behind_what_waits() -> None:
    async def read() -> None:
        stream = DeltaStream(asyncio.get_running_loop(), 2)
        stream.put(delta(1))
        stream.fail(KeyError("gone"))
        assert (await stream.get()).token_ids == (1,)
        with pytest.raises(KeyError, match="gone"):
            await stream.get()

    asyncio.run(read())


def test_a_closed_loop_and_an_abandoned_stream_are_read_by_nobody() -> None:
    async def make() -> DeltaStream:
        stream = DeltaStream(asyncio.get_running_loop(), 2)
        assert stream.put(delta(1))
        return stream

    stream = asyncio.run(make())
    assert not stream.put(delta(2)) and not stream.fail(KeyError())

    async def abandon() -> None:
        stream = DeltaStream(asyncio.get_running_loop(), 2)
        stream.is_abandoned = True
        assert not stream.put(delta(1))

    asyncio.run(abandon())


def test_a_reader_that_looks_now_and_then_is_woken_so_often() -> None:
    """At the first delta, after each interval, and at the end; what came meanwhile comes as one."""

    async def read(interval_s: float, pauses_s: list[float]) -> list[tuple[int, ...]]:
        stream = DeltaStream(asyncio.get_running_loop(), 64, interval_s)
        found: list[tuple[int, ...]] = []

        async def look() -> None:
            while sum(map(len, found)) < len(pauses_s):
                found.append((await asyncio.wait_for(stream.get(), 10)).token_ids)

        looking = asyncio.ensure_future(look())
        for index, pause_s in enumerate(pauses_s):
            await asyncio.sleep(pause_s)
            stream.put(delta(index, finish_reason="stop" if index == len(pauses_s) - 1 else None))
        await looking
        return found

    steps_s = [0.001] * 20
    assert asyncio.run(read(0.0, steps_s)) == [(index,) for index in range(20)]
    assert asyncio.run(read(float("inf"), steps_s)) == [(0,), tuple(range(1, 20))]
    assert asyncio.run(read(0.3, [0.0, 0.05, 0.4, 0.05, 0.05])) == [(0,), (1, 2), (3, 4)]


def test_an_error_wakes_a_reader_that_looks_now_and_then() -> None:
    async def read() -> None:
        stream = DeltaStream(asyncio.get_running_loop(), 64, float("inf"))
        stream.put(delta(0))
        assert (await stream.get()).token_ids == (0,)
        waiting = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0.01)
        stream.put(delta(1))
        stream.fail(ValueError("gone"))
        assert (await asyncio.wait_for(waiting, 10)).token_ids == (1,)
        with pytest.raises(ValueError, match="gone"):
            await asyncio.wait_for(stream.get(), 10)

    asyncio.run(read())


def test_somebody_who_left_is_noticed_between_two_looks() -> None:
    async def leave() -> None:
        stream = DeltaStream(asyncio.get_running_loop(), 64, float("inf"))
        assert stream.put(delta(0)) and stream.put(delta(1))
        stream.is_abandoned = True
        assert not stream.put(delta(2))

    asyncio.run(leave())
