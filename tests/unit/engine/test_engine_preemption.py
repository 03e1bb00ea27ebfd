"""A request that steps back is resumed as if nothing had happened: the same tokens from the same drafts."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.serving_runs import (
    FAMILIES,
    GREEDY,
    SAMPLED,
    checked,
    require_empty,
    run,
    same_run,
    shared_prompts,
    steps_of,
)

import paceline.engine.batching as batching_module
from paceline.checkpoint.contract import DrafterFamily
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.structured import StructuredOutput
from paceline.errors import ConfigError
from paceline.models.loading import LoadedDrafter, LoadedTarget

RULED = replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, bad_words=("a", "b"), min_tokens=5, logprobs=2)
EACH = [GREEDY, SAMPLED, RULED, replace(RULED, temperature=0.0), replace(SAMPLED, draft_length="off")]


IN_PARTS = {"draft_sample_method": "probabilistic", "prefill_chunk_size": 16}


@functools.cache
def runs_of_each_kind_alone(
    family: DrafterFamily,
) -> tuple[LoadedTarget, LoadedDrafter, list[list[int]], list[RequestResult]]:
    """Models, prompts, and what each gives in an engine of its own."""
    target, drafter = loaded(drafter_family=family)
    prompts = tiny_prompts([13, 20, 7, 31, 16])
    alone = [
        checked(target, drafter, max_num_seqs=1, prefix_cache=False, **IN_PARTS).generate([prompt], sampling)[0]
        for prompt, sampling in zip(prompts, EACH, strict=True)
    ]
    return target, drafter, prompts, alone


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no cache"])
def test_preemption_at_any_step_leaves_tokens_and_drafts_alone(family: DrafterFamily, prefix_cache: bool) -> None:
    """T7.6: requests of all kinds step back at random."""
    target, drafter, prompts, alone = runs_of_each_kind_alone(family)
    chance = random.Random(family)
    engine = checked(target, drafter, max_num_seqs=4, prefix_cache=prefix_cache, **IN_PARTS)
    names = [engine.add_request(prompt, sampling) for prompt, sampling in zip(prompts, EACH, strict=True)]
    deltas: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(500):
        for delta in engine.step():
            deltas[delta.request_id] += delta.token_ids
        if not engine.has_unfinished():
            break
        for name in engine.running_ids():
            if chance.random() < 0.15:
                assert engine.preempt(name)
    for name, right in zip(names, alone, strict=True):
        found = engine.result(name)
        assert same_run(found, right)
        assert (found.text, found.finish_reason, found.logprobs) == (right.text, right.finish_reason, right.logprobs)
        assert tuple(deltas[name]) == right.token_ids
    assert engine.stats().num_preemptions == sum(engine.result(name).num_preemptions for name in names) > 5
    assert (engine.stats().num_resumed_tokens > 0) == prefix_cache
    require_empty(engine)


def test_resuming_with_another_step_counter_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault behind T7.6: the text is right all the same, by verification, but drafts differ."""
    target, drafter = loaded()
    (prompt,) = tiny_prompts([13])
    runs, chunk = [], batching_module.PrefillChunk
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(
                batching_module, "PrefillChunk", lambda **fields: chunk(**_with_counter_of_zero(fields))
            )
        engine = checked(target, drafter, draft_sample_method="probabilistic", verify_method="match")
        name = engine.add_request(prompt, SAMPLED)
        for _ in range(6):
            engine.step()
        engine.preempt(name)
        runs += run(engine, [name])
    assert runs[0].token_ids == runs[1].token_ids
    assert steps_of(runs[0]) != steps_of(runs[1])


def _with_counter_of_zero(fields: dict[str, object]) -> dict[str, object]:
    return fields if fields["resumed_step"] is None else fields | {"resumed_step": 0}


def test_a_request_under_a_grammar_is_resumed_where_its_form_stands() -> None:
    target, drafter = loaded()
    sampling = SamplingParameters(max_tokens=40, structured_output=StructuredOutput("regex", "([a-f]{2}[0-9]){9}"))
    (prompt,) = tiny_prompts([13])
    (right,) = checked(target, drafter).generate([prompt], sampling)
    engine = checked(target, drafter)
    name = engine.add_request(prompt, sampling)
    while engine.has_unfinished():
        engine.step()
        engine.preempt(name)
    found = engine.result(name)
    assert same_run(found, right) and (found.text, found.finish_reason) == (right.text, "stop")
    assert found.num_preemptions > 10


LONG = replace(GREEDY, max_tokens=60)


@functools.cache
def long_runs_alone() -> tuple[LoadedTarget, LoadedDrafter, list[list[int]], list[RequestResult]]:
    """Models, prompts, and what each gives in an engine of its own."""
    target, drafter = loaded()
    prompts = tiny_prompts([40, 8, 33, 21, 17, 60])
    alone = [
        checked(target, drafter, max_num_seqs=1, prefix_cache=False).generate([prompt], LONG)[0] for prompt in prompts
    ]
    return target, drafter, prompts, alone


@pytest.mark.parametrize("num_blocks", [20, 24, 40])
def test_a_pool_for_less_than_all_serves_all(num_blocks: int) -> None:
    """Requests that fit alone, and not together, step back for each other; nobody notices, and nothing leaks."""
    target, drafter, prompts, alone = long_runs_alone()
    engine = checked(target, drafter, max_num_seqs=6, num_blocks=num_blocks)
    names = [engine.add_request(prompt, LONG) for prompt in prompts]
    found = run(engine, names)
    for result, right in zip(found, alone, strict=True):
        assert same_run(result, right)
    assert engine.stats().num_preemptions > 0
    assert found[0].num_preemptions == 0, "the first always gets on"
    require_empty(engine)


def test_a_pool_that_holds_not_even_one_request_is_refused() -> None:
    target, drafter = loaded()
    with pytest.raises(ConfigError, match=r"num_blocks is 18; one request of max_model_len 128, with 16 positions"):
        checked(target, drafter, num_blocks=18)
    checked(target, drafter, num_blocks=19)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5])
def test_survivors_of_cancelled_neighbours_in_a_tiny_pool_are_right(num_draft_tokens: int) -> None:
    """B74: requests come, step back, and are cancelled at random, and the cache is emptied under them."""
    target, drafter = loaded()
    chance = random.Random(num_draft_tokens)
    prompts = shared_prompts(16, [chance.randint(1, 20) for _ in range(8)])
    each = [replace(EACH[index % 3], max_tokens=20) for index in range(8)]
    plain = [
        checked(target, max_num_seqs=1).generate([prompt], sampling)[0].token_ids
        for prompt, sampling in zip(prompts, each, strict=True)
    ]
    settings = {"num_draft_tokens": num_draft_tokens} if num_draft_tokens else {}
    engine = checked(
        target, drafter if num_draft_tokens else None, max_num_seqs=4, num_blocks=21, verify_method="match", **settings
    )
    kept: dict[str, int] = {}
    for _ in range(40):
        index = chance.randrange(8)
        name = engine.add_request(prompts[index], each[index])
        kept[name] = index
        for _ in range(chance.randint(0, 3)):
            engine.step()
        if chance.random() < 0.4:
            name = chance.choice(list(kept))
            engine.abort(name)
            delivered = engine.result(name).token_ids
            assert delivered == plain[kept[name]][: len(delivered)]
            del kept[name]
        if chance.random() < 0.1:
            engine.clear_prefix_cache()
    for name, result in zip(kept, run(engine, list(kept)), strict=True):
        assert result.token_ids == plain[kept[name]]
    require_empty(engine)


def test_preempting_what_does_not_run_says_so() -> None:
    target, _ = loaded()
    engine = checked(target, max_num_seqs=1)
    running, waiting = (engine.add_request(prompt, GREEDY) for prompt in tiny_prompts([5, 6]))
    assert not engine.preempt(running)
    engine.step()
    assert engine.preempt(running)
    assert not engine.preempt(running) and not engine.preempt(waiting) and not engine.preempt("nobody")
    found = run(engine, [running, waiting])
    assert [result.num_preemptions for result in found] == [1, 0]
    assert [len(result.token_ids) for result in found] == [24, 24]


def test_interrupted_steps_and_preemptions_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in any pass of a run in which requests step back; deltas and blocks add up."""
    target, drafter = loaded()
    prompts = tiny_prompts([30, 9, 22])
    alone = [checked(target).generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    logits, chance = target.model.logits, random.Random(3)

    def interrupted(hidden):
        if chance.random() < 0.2:
            raise KeyboardInterrupt
        return logits(hidden)

    engine = checked(target, drafter, max_num_seqs=2, num_blocks=24, prefill_chunk_size=16)
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    monkeypatch.setattr(target.model, "logits", interrupted)
    for _ in range(400):
        try:
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
        except KeyboardInterrupt:
            continue
        for name in engine.running_ids():
            if chance.random() < 0.1:
                engine.preempt(name)
        if not engine.has_unfinished():
            break
    monkeypatch.undo()
    assert [tuple(tokens[name]) for name in names] == alone
    assert [engine.result(name).token_ids for name in names] == alone
    require_empty(engine)


def test_the_context_limit_leaks_nothing() -> None:
    """Requests that end exactly at the limit equal plain decoding, over and over."""
    target, drafter = loaded()
    prompts = tiny_prompts([50, 61, 57])
    sampling = SamplingParameters(max_tokens=100, ignore_eos=True)
    plain = [result.token_ids for result in checked(target, max_model_len=64).generate(prompts, sampling)]
    assert [len(tokens) for tokens in plain] == [14, 3, 7]
    engine = checked(target, drafter, max_model_len=64, max_num_seqs=2, num_blocks=19)
    for _ in range(10):
        assert [result.token_ids for result in engine.generate(prompts, sampling)] == plain
        require_empty(engine)
