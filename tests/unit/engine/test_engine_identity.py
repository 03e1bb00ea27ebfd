"""What an engine gives out is the target's own: whatever drafts, whoever runs beside it, whichever slot it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.replays import FlawedReplay, replaying

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters

LONG = SamplingParameters(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParameters(max_tokens=20, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)


@settings(max_examples=10)
@given(
    family=st.sampled_from(["llama", "qwen3"]),
    block_size=st.integers(2, 8),
    seed=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    window=st.sampled_from([None, 8, 16]),
)
def test_any_drafter_leaves_greedy_output_unchanged(family, block_size, seed, lengths, window) -> None:
    target, drafter = loaded(family, seed, block_size=block_size, layer_windows=(window, None))
    prompts = tiny_prompts(lengths, seed)
    plain = Engine(target).generate(prompts, LONG)
    speculative = Engine(target, drafter, EngineSettings(max_num_seqs=2)).generate(prompts, LONG)
    assert [result.token_ids for result in speculative] == [result.token_ids for result in plain]


@settings(max_examples=15)
@given(
    wrong=st.frozensets(st.integers(0, 60)),
    num_draft_tokens=st.integers(1, 7),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3, unique=True),
)
def test_ragged_accepts_leave_greedy_output_unchanged(wrong, num_draft_tokens, lengths) -> None:
    target, _ = loaded("qwen3")
    prompts = tiny_prompts(lengths)
    plain = Engine(target).generate(prompts, LONG)
    engine = replaying(target, {result.prompt_ids: result.token_ids for result in plain}, num_draft_tokens)
    engine.wrap_proposer(lambda inner: FlawedReplay(inner, wrong, 512))
    for right, result in zip(plain, engine.generate(prompts, LONG), strict=True):
        assert result.token_ids == right.token_ids
        for record in result.trace.records:
            drafted = range(record.anchor_position + 1, record.anchor_position + 1 + record.num_draft_tokens)
            first_wrong = next((k for k, position in enumerate(drafted) if position in wrong), len(drafted))
            assert record.num_verified_accepted == first_wrong


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_request_has_the_same_bits_alone_and_in_company(method: str) -> None:
    target, drafter = loaded("qwen3")
    prompts = tiny_prompts([5, 31, 12])
    each = [SAMPLED, replace(SAMPLED, seed=12, temperature=0.7, top_k=30), replace(LONG, max_tokens=20)]
    alone = [
        Engine(target, drafter, EngineSettings(draft_sample_method=method)).generate([prompt], parameters)[0]
        for prompt, parameters in zip(prompts, each, strict=True)
    ]
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=3, draft_sample_method=method))
    names = []
    for index in (2, 0, 1):  # admitted one by one, while the others are in mid-flight
        names.append(engine.add_request(prompts[index], each[index]))
        engine.step()
        engine.step()
    while engine.has_unfinished():
        engine.step()
    for name, index in zip(names, (2, 0, 1), strict=True):
        found, expected = engine.result(name), alone[index]
        assert found.token_ids == expected.token_ids
        assert [record.proposed_ids for record in found.trace.records] == [
            record.proposed_ids for record in expected.trace.records
        ]


def test_a_slot_used_again_is_as_good_as_new() -> None:
    """B44: long, short, long through one slot; ids and drafts equal those of fresh engines."""
    target, drafter = loaded()
    prompts = tiny_prompts([60, 3, 45])
    shared = Engine(target, drafter, EngineSettings(max_num_seqs=1, max_model_len=100))
    for prompt in prompts:
        (again,) = shared.generate([prompt], LONG)
        (fresh,) = Engine(target, drafter, EngineSettings(max_num_seqs=1, max_model_len=100)).generate([prompt], LONG)
        assert again.token_ids == fresh.token_ids
        assert [r.proposed_ids for r in again.trace.records] == [r.proposed_ids for r in fresh.trace.records]


def test_seeds_decide_and_slots_do_not() -> None:
    """B54: equal seeds give equal text, alone or among seven others; other seeds give other text."""
    target, drafter = loaded()
    prompt, *others = tiny_prompts([10, 6, 9, 14, 3, 20, 8, 11])
    engine = Engine(target, drafter, EngineSettings(draft_sample_method="probabilistic"))
    hot = replace(SAMPLED, max_tokens=30, top_p=1.0)
    for _ in range(2):
        one, two, three = engine.generate([prompt] * 3, [replace(hot, seed=seed) for seed in (1, 1, 2)])
        assert one.token_ids == two.token_ids != three.token_ids
        crowd = engine.generate([*others, prompt], [*[replace(hot, seed=None)] * 7, replace(hot, seed=1)])
        assert crowd[-1].token_ids == one.token_ids
    unseeded = engine.generate([prompt] * 2, replace(hot, seed=None))
    assert unseeded[0].token_ids != unseeded[1].token_ids
