"""Requests that end exactly at the context limit: plain decoding's text, 200 times over, and nothing leaks."""

from __future__ import annotations

import functools
import gc
import itertools
from typing import Any

import pytest
import torch
from tests.tiny import loaded, tiny_prompts

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.request_blocks import RequestBlocks

LIMIT, NUM_REPETITIONS, AT_ONCE = 32, 200, 5
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_kv_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": LIMIT,
}
LENGTHS = (9, 16, 24, 25, 27, 28, LIMIT - 3, LIMIT - 2, LIMIT - 1)  # the last leaves room for a single token
PROMPTS = [prompt for length in LENGTHS for prompt in tiny_prompts([length], seed=length, vocab_size=64)]
WITHOUT_END = SamplingParameters(max_tokens=10_000, ignore_eos=True)
SAMPLED = SamplingParameters(max_tokens=10_000, ignore_eos=True, temperature=1.0, seed=9)


def engine(family: str | None, **changes: Any) -> Engine:
    target, drafter = loaded("qwen3", target_changes=SIZES, drafter_family=family or "dflash", **changes)
    return Engine(target, drafter if family else None, settings())


def settings() -> EngineSettings:
    return EngineSettings(max_num_seqs=AT_ONCE, block_size=8, verify_method="match")


@functools.cache
def plain_texts(sampling: SamplingParameters) -> list[tuple[int, ...]]:
    return texts(engine(None).generate(PROMPTS, sampling))


def texts(results: list[RequestResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("dflash", WITHOUT_END),
        ("dflash2", WITHOUT_END),
        ("dspark", WITHOUT_END),
        ("eagle3", WITHOUT_END),
        ("dflash2", SAMPLED),
        ("eagle3", SAMPLED),
    ],
)
def test_the_limit_is_reached_and_nothing_leaks(family: str, sampling: SamplingParameters) -> None:
    plain = plain_texts(sampling)
    assert [len(text) for text in plain] == [LIMIT - length for length in LENGTHS]
    drafting = engine(family, max_position_embeddings=4 * LIMIT)  # so it drafts to the very end
    start = drafting.stats()
    num_done, num_tensors = 0, 0
    while num_done < NUM_REPETITIONS:
        results = drafting.generate(PROMPTS, sampling)
        assert texts(results) == plain
        assert {result.finish_reason for result in results} == {"length"}
        stats = drafting.stats()
        assert (stats.num_free_blocks, stats.num_free_slots) == (start.num_free_blocks, AT_ONCE)
        assert (stats.num_used_blocks, stats.num_fenced_blocks, stats.num_running) == (0, 0, 0)
        num_done += len(PROMPTS)
        if num_done == 2 * len(PROMPTS):
            num_tensors = count_tensors()  # what the first requests leave behind for good is there by now
    del results
    assert count_tensors() <= num_tensors
    assert stats.num_draft_tokens > 0


def test_a_leak_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: one request in 20 keeps its blocks."""
    release, calls = RequestBlocks.release, itertools.count(1)

    def leaky(*args: Any, **options: Any) -> None:
        if next(calls) % 20:
            release(*args, **options)

    monkeypatch.setattr(RequestBlocks, "release", leaky)
    with pytest.raises(AssertionError):
        test_the_limit_is_reached_and_nothing_leaks("dflash", WITHOUT_END)


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_a_drafter_with_fewer_positions_than_the_limit(family: str) -> None:
    plain = plain_texts(WITHOUT_END)
    drafting = engine(family, max_position_embeddings=LIMIT - 13)
    for _ in range(3):
        assert texts(drafting.generate(PROMPTS, WITHOUT_END)) == plain
    stats = drafting.stats()
    assert stats.num_undrafted > 0 and stats.num_draft_tokens > 0
    assert stats.num_used_blocks == 0


def count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
