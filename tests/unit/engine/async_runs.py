"""What tests of the thread around an engine share: reading a request whole, running with a started engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from tests.unit.engine.fake_engine import FakeEngine

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.request import SamplingParameters

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


def failing_at(*steps: int) -> Callable[[int], None]:
    def fail(step: int) -> None:
        if step in steps:
            raise ArithmeticError(f"step {step}")

    return fail
