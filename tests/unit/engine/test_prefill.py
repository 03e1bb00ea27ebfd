"""Prompts in chunks: any chunk size gives the same keys, context, first token and first block."""

from __future__ import annotations

import pytest
import torch
from tests.caches import stored
from tests.tiny import loaded, tiny_prompts

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 20, 21])
def test_chunks_of_any_size_leave_the_same_bits(chunk_size: int) -> None:
    target, drafter = loaded()
    prompt = tiny_prompts([20])[0]
    found = []
    for size in (chunk_size, 512):
        engine = Engine(target, drafter, EngineSettings(max_num_seqs=1, prefill_chunk_size=size))
        engine.add_request(prompt, SamplingParameters(max_tokens=8, ignore_eos=True))
        for _ in range(-(-20 // size) - 1):
            assert engine.step() == [], "a chunk that is not the last delivers nothing"
        (delta, *_) = engine.step()
        planes = [stored(cache, 0, 0, 20) for cache in (engine._loop.parts.cache, engine._loop.parts.proposer.cache)]
        found.append((delta.token_ids, engine._loop.parts.state.draft_ids[0].tolist(), planes))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def test_a_single_token_prompt_is_enough() -> None:
    target, drafter = loaded()
    (result,) = Engine(target, drafter).generate([[5]], SamplingParameters(max_tokens=4, ignore_eos=True))
    assert len(result.token_ids) == 4
    assert result.trace.num_prompt_tokens == 1
