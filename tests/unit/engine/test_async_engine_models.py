"""The thread around real engines: the same texts as without it, failures inside, memory that comes back."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.async_runs import engine_threads, read

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.engine.step import SentOutput
from paceline.errors import EngineDeadError, RequestError

SAMPLING = SamplingParameters(max_tokens=24, ignore_eos=True)


async def tokens_of(engine: AsyncEngine, prompt: list[int], sampling: SamplingParameters = SAMPLING) -> Any:
    tokens: list[int] = []
    text, reason = "", None
    async for delta in engine.generate(prompt, sampling):
        tokens += delta.token_ids
        text, reason = text + delta.text, delta.finish_reason
    return tuple(tokens), text, reason


def test_the_texts_are_those_of_the_engine_alone_while_a_check_runs() -> None:
    target, drafter = loaded("qwen3")
    settings = EngineSettings(max_num_seqs=3)
    prompts = tiny_prompts([9, 4, 40, 17, 3])
    alone = Engine(target, drafter, settings).generate(prompts, SAMPLING)

    async def whole() -> list[Any]:
        async with AsyncEngine(lambda: Engine(target, drafter, settings)) as engine:
            *found, report = await asyncio.gather(*(tokens_of(engine, prompt) for prompt in prompts), engine.check())
            assert report.has_passed and engine.is_healthy
            stats = await engine.stats()
            assert stats.num_finished == 5 and stats.alarm.length.limit is not None
        return found

    assert asyncio.run(whole()) == [(result.token_ids, result.text, result.finish_reason) for result in alone]
    assert engine_threads() == []


def test_a_step_that_raises_ends_its_requests_and_the_next_ones_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded("qwen3")
    prompts = tiny_prompts([9, 4, 17, 6])
    alone = Engine(target, drafter).generate(prompts, SAMPLING)
    original, calls = SentOutput.read, []

    def failing(self: SentOutput) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise ArithmeticError("the device")
        return original(self)

    monkeypatch.setattr(SentOutput, "read", failing)

    async def whole() -> list[Any]:
        settings = EngineSettings(max_num_seqs=2)
        async with AsyncEngine(lambda: Engine(target, drafter, settings), canary="off") as engine:
            return await asyncio.gather(*(tokens_of(engine, prompt) for prompt in prompts))

    found = asyncio.run(whole())
    assert [reason for *_, reason in found] == ["error", "error", "length", "length"]
    for (tokens, _, _), right in zip(found, alone, strict=True):
        assert tokens == right.token_ids[: len(tokens)]
    assert found[2][0] == alone[2].token_ids and found[3][0] == alone[3].token_ids


def test_an_engine_that_always_fails_dies_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = loaded()

    def failing(self: SentOutput) -> Any:
        raise ArithmeticError("the device")

    async def whole() -> None:
        engine = AsyncEngine(lambda: Engine(target, drafter, EngineSettings(max_num_seqs=1)), canary="off")
        await engine.start()
        with monkeypatch.context() as patch:
            patch.setattr(SentOutput, "read", failing)
            found = await asyncio.gather(*(tokens_of(engine, [5, 6, 7]) for _ in range(5)), return_exceptions=True)
        assert [isinstance(one, EngineDeadError) for one in found] == [False, False, True, True, True]
        await engine.start()
        assert (await tokens_of(engine, [5, 6, 7]))[2] == "length"
        with pytest.raises(RequestError, match="empty"):
            await read(engine, [])
        await engine.stop()

    asyncio.run(whole())
    assert engine_threads() == []


def tensors_mb() -> float:
    """What live tensors hold. Not the process's resident pages: whether the C library gives those back is its mood."""
    tensors = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    # Other tests of the process may have left sparse ones, or some without memory.
    tensors = (each for each in tensors if each.layout is torch.strided and each.device.type == "cpu")
    storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
    return sum(storages.values()) / 2**20


@pytest.mark.parametrize("is_kept", [False, True])
def test_three_engines_one_after_another_leave_memory_flat(is_kept: bool) -> None:
    """B89: some 40 MB of caches each. Keeping their parts is the planted fault, and shows."""
    target, drafter = loaded()
    settings = EngineSettings(max_num_seqs=2, num_blocks=800)
    made: list[weakref.ref[Engine]] = []
    kept: list[Any] = []

    def make() -> Engine:
        engine = Engine(target, drafter, settings)
        made.append(weakref.ref(engine))
        if is_kept:
            kept.append([cache.planes for cache in engine._loop.parts.planes.caches])
        return engine

    async def cycle(engine: AsyncEngine) -> None:
        await engine.start()
        assert (await tokens_of(engine, [5, 6, 7]))[2] == "length"
        cut_off = SamplingParameters(max_tokens=400, ignore_eos=True)
        asyncio.create_task(tokens_of(engine, [1], cut_off))  # noqa: RUF006
        await asyncio.sleep(0.05)
        await engine.stop(drain=False)

    engine = AsyncEngine(make, canary="off")
    asyncio.run(cycle(engine))
    gc.collect()
    before = tensors_mb()
    for _ in range(3):
        asyncio.run(cycle(engine))
        gc.collect()
        assert made[-1]() is None and engine_threads() == []
    grown = tensors_mb() - before
    assert grown > 60 if is_kept else grown < 1
