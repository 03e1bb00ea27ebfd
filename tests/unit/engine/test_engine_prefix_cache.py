"""A prefix hit gives back everything: the target's keys, the drafter's context, and with them the gain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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

from paceline.engine.block_attends import BlockPerRequest
from paceline.engine.cache import KeyValueCache
from paceline.engine.engine import Engine
from paceline.engine.identity import prefix_identity, weights_digest
from paceline.engine.request_blocks import RequestBlocks

begin_block = BlockPerRequest.__init__


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_gain_is_the_same_with_the_cache_off_cold_and_warm(family: str, sampling) -> None:
    """T7.1, B40: the same drafts, accepted alike, step by step."""
    target, drafter = loaded(drafter_family=family)
    method = "probabilistic" if sampling is SAMPLED else None
    first, second = shared_prompts(43, [6, 9])
    off = checked(target, drafter, prefix_cache=False, draft_sample_method=method).generate([first, second], sampling)
    engine = checked(target, drafter, draft_sample_method=method)
    (cold,) = engine.generate([first], sampling)
    assert engine.stats().num_hit_tokens == 0
    (warm,) = engine.generate([second], sampling)
    (again,) = engine.generate([first], sampling)
    assert [cold.num_cached_tokens, warm.num_cached_tokens, again.num_cached_tokens] == [0, 40, 48]
    for right, found in zip([*off, off[0]], [cold, warm, again], strict=True):
        assert same_run(found, right)
        assert found.context_start == 0
        assert all(proposed for proposed, _, _ in steps_of(found))
    assert all(result.num_cached_tokens == 0 for result in off)
    require_empty(engine)


def test_a_hit_without_its_draft_context_is_found() -> None:
    """The planted fault behind T7.1: the target's keys alone are restored, and no text shows it."""
    target, drafter = loaded()
    first, second = shared_prompts(43, [6, 9])
    (right,) = checked(target, drafter, prefix_cache=False).generate([second], GREEDY)
    engine = checked(target, drafter, check_invariants=False)
    engine.generate([first], GREEDY)
    context = engine._loop.parts.proposer.cache
    context.clear_blocks(range(1, context.tables.num_blocks))
    (found,) = engine.generate([second], GREEDY)
    assert (found.token_ids, found.num_cached_tokens) == (right.token_ids, 40)
    assert steps_of(found) != steps_of(right)


@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_a_drafter_costs_no_hits(family: str | None) -> None:
    """B41, T7.3: as many cached tokens as without one, whatever the length."""
    target, drafter = loaded(drafter_family=family or "dflash")
    engine = checked(target, drafter if family else None)
    for index, length in enumerate((23, 24, 25, 26)):
        (prompt,) = tiny_prompts([length], seed=50 + index)
        found = [engine.generate([prompt], replace(GREEDY, max_tokens=1))[0].num_cached_tokens for _ in range(3)]
        assert found == [0] + [(length - 1) // 8 * 8] * 2
        (longer,) = engine.generate([[*prompt, 5, 8, 9]], replace(GREEDY, max_tokens=1))
        # An EAGLE-3 key depends on the token behind it, and behind a whole prompt another one came.
        depends = family == "eagle3" and length % 8 == 0
        assert longer.num_cached_tokens == length // 8 * 8 - (8 if depends else 0)
        (other,) = engine.generate([[*prompt[:20], 7, 8, 9]], replace(GREEDY, max_tokens=1))
        assert other.num_cached_tokens == 16


def test_the_text_that_was_generated_is_found_too() -> None:
    """The next turn of a conversation: all but the last, unrun token's block."""
    target, drafter = loaded()
    engine = checked(target, drafter)
    (prompt,) = tiny_prompts([20])
    (first,) = engine.generate([prompt], GREEDY)
    turn = [*prompt, *first.token_ids, 9, 10, 11]
    (second,) = engine.generate([turn], GREEDY)
    assert second.num_cached_tokens == (20 + 24 - 1) // 8 * 8
    (right,) = checked(target, drafter, prefix_cache=False).generate([turn], GREEDY)
    assert same_run(second, right)


@pytest.mark.parametrize("sharing", [True, False], ids=["shared blocks", "runs of their own"])
def test_requests_that_share_a_prefix_leave_each_other_alone(sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """T7.4: eight of them, admitted one by one; each equals its solo run, and what is published never changes."""
    if sharing:  # as on a GPU, where nothing is copied
        monkeypatch.setattr(RequestBlocks, "_spare_run", lambda *_args: None)
    target, drafter = loaded("qwen3")
    prompts = shared_prompts(32, range(1, 9))
    each = [SAMPLED if index % 2 else GREEDY for index in range(8)]
    alone = [
        checked(target, drafter, max_num_seqs=1, prefix_cache=False).generate([prompt], sampling)[0]
        for prompt, sampling in zip(prompts, each, strict=True)
    ]
    engine = checked(target, drafter, max_num_seqs=8)
    names = []
    for prompt, sampling in zip(prompts, each, strict=True):
        names.append(engine.add_request(prompt, sampling))
        engine.step()
    assert (engine.stats().num_consolidations > 0) != sharing
    for found, right in zip(run(engine, names), alone, strict=True):
        assert same_run(found, right)
    assert [engine.result(name).num_cached_tokens for name in names] == [0] + [32] * 7
    require_empty(engine)


def feeding_drafted_requests_alone(engine: Engine) -> Engine:
    """As if the drafter's positions ended at once for requests without drafts: their prompts leave no context."""
    engine._loop.blocks._context_limit = 0
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_without_drafts_leaves_its_context_to_those_behind(family: str) -> None:
    target, drafter = loaded(drafter_family=family)
    first, second = shared_prompts(40, [5, 9])
    engine = checked(target, drafter)
    engine.generate([first], replace(GREEDY, draft_length="off"))
    (drafted,) = engine.generate([second], GREEDY)
    assert drafted.num_cached_tokens >= 32 and drafted.context_start == 0
    (right,) = checked(target, drafter, prefix_cache=False).generate([second], GREEDY)
    assert same_run(drafted, right)
    require_empty(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_without_draft_context_is_drafted_behind(family: str) -> None:
    """T7.7: the text is right, drafts are others, and what nobody wrote is not read: free blocks hold NaN."""
    target, drafter = loaded(drafter_family=family)
    first, second = shared_prompts(40, [5, 9])
    engine = feeding_drafted_requests_alone(checked(target, drafter))
    (plain,) = engine.generate([first], replace(GREEDY, draft_length="off"))
    (drafted,) = engine.generate([second], GREEDY)
    hit = 32 if family == "eagle3" else 40  # its last key would need the token behind it
    assert (drafted.num_cached_tokens, drafted.context_start, plain.context_start) == (hit, hit, 0)
    (right,) = checked(target, drafter, prefix_cache=False).generate([second], GREEDY)
    assert drafted.token_ids == right.token_ids
    assert steps_of(drafted) != steps_of(right)
    assert all(proposed for proposed, _, _ in steps_of(drafted))
    (mixed,) = engine.generate([[*second, *drafted.token_ids]], GREEDY)
    assert (mixed.num_cached_tokens, mixed.context_start) == ((49 + 23) // 8 * 8, hit)
    require_empty(engine)


def forget_where_contexts_begin(self: BlockPerRequest, cache: KeyValueCache, *spans: Any, **options: Any) -> None:
    slots, lengths, firsts, *rest = spans
    begin_block(self, cache, slots, lengths, [0] * len(firsts), *rest, **options)


def test_reading_context_that_is_not_there_changes_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault behind T7.7: the context's start is forgotten, and what nobody wrote is read as context."""
    target, drafter = loaded()
    first, second = shared_prompts(40, [5, 9])
    found = []
    for is_planted in (False, True):
        engine = feeding_drafted_requests_alone(checked(target, drafter))
        engine.generate([first], replace(GREEDY, draft_length="off"))
        if is_planted:
            monkeypatch.setattr(BlockPerRequest, "__init__", forget_where_contexts_begin)
        found += engine.generate([second], GREEDY)
    assert {result.context_start for result in found} == {40}
    assert found[0].token_ids == found[1].token_ids
    assert steps_of(found[0]) != steps_of(found[1])


def test_drafters_and_targets_do_not_share_cached_text() -> None:
    """T7.8: the same shapes, other weights."""
    target, drafter = loaded()
    same, twin = loaded()
    other, other_drafter = loaded(seed=7)
    identity = prefix_identity(target, drafter, method="dflash/greedy")
    assert identity == prefix_identity(same, twin, method="dflash/greedy")
    assert identity != prefix_identity(other, drafter, method="dflash/greedy")
    assert identity != prefix_identity(target, other_drafter, method="dflash/greedy")
    assert identity != prefix_identity(target, None, method="plain")
    assert not identity.reads_ahead
    assert prefix_identity(*loaded(drafter_family="eagle3"), method="eagle3/greedy").reads_ahead
    assert weights_digest(target.model) != weights_digest(other.model)


def test_a_salt_keeps_cached_text_apart() -> None:
    target, drafter = loaded()
    engine = checked(target, drafter)
    (prompt,) = tiny_prompts([30])
    hits = []
    for salt in (None, "a", "b", "a", None):
        (result,) = run(engine, [engine.add_request(prompt, GREEDY, cache_salt=salt)])
        hits.append(result.num_cached_tokens)
    assert hits == [0, 0, 0, 24, 24]


def test_the_cache_can_be_switched_off_and_emptied() -> None:
    target, drafter = loaded()
    (prompt,) = tiny_prompts([30])
    off = checked(target, drafter, prefix_cache=False)
    assert [off.generate([prompt], GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert (off.stats().num_cached_blocks, off.stats().num_queried_tokens) == (0, 58)
    engine = checked(target, drafter)
    engine.generate([prompt], GREEDY)
    num_cached = engine.stats().num_cached_blocks
    assert num_cached == (30 + 23) // 8
    assert engine.clear_prefix_cache() == num_cached
    assert engine.stats().num_cached_blocks == 0
    assert engine.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_a_prompt_of_bad_numbers_is_not_found_again() -> None:
    """Its keys are cleared, and a request behind it on the same blocks is sound."""
    import torch
    from tests.fakes import table_target

    table = torch.full((16, 16), -20.0)
    for before in range(16):
        table[before, (before + 1) % 5] = 0.0
    target = table_target(table)
    target.model.embed_tokens.weight[9] = torch.nan
    engine = checked(target, max_num_seqs=1)
    for _ in range(2):
        (bad,) = engine.generate([[1, 2, 3, 9] * 6], GREEDY)
        assert (bad.finish_reason, bad.num_cached_tokens) == ("error", 0)
    assert engine.stats().num_cached_blocks == 0
    (sound,) = engine.generate([[1, 2, 3, 4] * 6], GREEDY)
    assert sound.finish_reason == "length"
    require_empty(engine)


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
@pytest.mark.parametrize("chunk_size", [200, 64, 63, 17, 1])
def test_chunks_of_any_size_draft_the_same(family: str, chunk_size: int) -> None:
    """B72: the token behind a chunk is the prompt's own."""
    target, drafter = loaded(drafter_family=family)
    (prompt,) = tiny_prompts([100])
    settings = {"max_model_len": 160, "block_size": 16}
    (right,) = checked(target, drafter, **settings).generate([prompt], GREEDY)
    engine = checked(target, drafter, prefill_chunk_size=chunk_size, **settings)
    (found,) = engine.generate([prompt], GREEDY)
    assert same_run(found, right)
    (warm,) = engine.generate([prompt], GREEDY)
    assert warm.num_cached_tokens == 96
    assert same_run(warm, right)
