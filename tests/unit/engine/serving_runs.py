"""Engines over few small blocks that check themselves, and what a run must have in common with another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.tiny import tiny_prompts

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.models.loading import LoadedDrafter, LoadedTarget

GREEDY = SamplingParameters(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=5)
FAMILIES = ("dflash", "dflash2", "dspark", "eagle3")


def checked(target: LoadedTarget, drafter: LoadedDrafter | None = None, **settings: Any) -> Engine:
    """An engine with blocks of 8 positions that asserts its invariants, free blocks full of NaN."""
    options = {"block_size": 8, "max_model_len": 128, "check_invariants": True} | settings
    return Engine(target, drafter, EngineSettings(**options))


def steps_of(result: RequestResult) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """What a request's blocks were and what became of them: proposed, accepted, emitted."""
    return [(record.proposed_ids, record.num_verified_accepted, record.emitted_ids) for record in result.trace.records]


def same_run(one: RequestResult, other: RequestResult) -> bool:
    """Whether tokens, drafts and acceptance are equal, step by step."""
    return one.token_ids == other.token_ids and steps_of(one) == steps_of(other)


def run(engine: Engine, names: Sequence[str]) -> list[RequestResult]:
    """Step until all is done."""
    while engine.has_unfinished():
        engine.step()
    return [engine.result(name) for name in names]


def require_empty(engine: Engine) -> None:
    """Every block came back, none is waited for."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.num_free_blocks, stats.num_used_blocks, stats.num_fenced_blocks) == (stats.num_blocks, 0, 0)


def shared_prompts(prefix: int, rests: Sequence[int]) -> list[list[int]]:
    """Prompts that begin with the same tokens."""
    (head,) = tiny_prompts([prefix], seed=1)
    return [head + rest for rest in tiny_prompts(rests, seed=2)]
