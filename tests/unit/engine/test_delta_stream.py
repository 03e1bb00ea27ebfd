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
