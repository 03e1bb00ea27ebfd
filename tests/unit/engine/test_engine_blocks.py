"""Blocks of every length, ends anywhere inside of them, and faults: what is delivered is what plain decoding gives."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import ByteTokenizer, scripted_target, table_target
from tests.tiny import tiny_prompts
from tests.unit.engine.replays import (
    BASE,
    PROMPTS,
    FlawedReplay,
    WordTokenizer,
    check_agreement,
    make_target,
    replaying,
    same,
)

from paceline.engine.engine import Engine
from paceline.engine.request import SamplingParameters
from paceline.models.loading import LoadedTarget


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return make_target()


# Numbers of drafts


class SomeDrafts(FlawedReplay):
    """A replay that leaves off the end of every block, at another place each time."""

    num_blocks = 0

    def propose(self, rows: Any, state: Any, *, all_greedy: bool, num_drafts: int | None = None) -> Any:
        proposal = super().propose(rows, state, all_greedy=all_greedy, num_drafts=num_drafts)
        for ids_K in proposal.ids_BK:
            ids_K[self.num_blocks % (len(ids_K) + 1) :] = -1
            self.num_blocks += 1
        return proposal


@pytest.mark.parametrize(("verify_method", "temperature"), [("standard", 0.0), ("match", 0.0), ("match", 0.9)])
def test_blocks_of_any_length_in_one_batch(target: LoadedTarget, verify_method: str, temperature: float) -> None:
    """P30, P15: the bonus row of a short block is its own; blocks without any draft are among them."""
    sampling = replace(BASE, temperature=temperature, seed=4, repetition_penalty=1.3, logprobs=1)
    alone = Engine(target).generate(PROMPTS, sampling)
    engine = replaying(target, {r.prompt_ids: r.token_ids for r in alone}, 5, verify_method=verify_method)
    engine.wrap_proposer(lambda inner: SomeDrafts(inner, frozenset((14,)), 512))
    found = engine.generate(PROMPTS, sampling)
    assert all(same(one, other) for one, other in zip(found, alone, strict=True))
    numbers = {record.num_draft_tokens for result in found for record in result.trace.records}
    assert numbers == {0, 1, 2, 3, 4, 5}
    check_agreement(engine, found)


def test_steps_without_any_draft_and_steps_inside_a_prompt(target: LoadedTarget) -> None:
    """P15: placeholders reach neither penalties nor bad words; a long prompt is run in between, chunk by chunk."""
    target = replace(target, tokenizer=WordTokenizer(target.tokenizer.pieces))
    sampling = replace(BASE, repetition_penalty=1.5, frequency_penalty=0.5, bad_words=("<0>", "<3><4>"), logprobs=1)
    prompts = [PROMPTS[1], tiny_prompts([60], seed=2)[0]]
    alone = [Engine(target).generate([prompt], sampling)[0] for prompt in prompts]

    class Nothing(FlawedReplay):
        def propose(self, rows: Any, state: Any, **options: Any) -> Any:
            proposal = super().propose(rows, state, **options)
            return proposal._replace(ids_BK=torch.full_like(proposal.ids_BK, -1))

    engine = replaying(target, {r.prompt_ids: r.token_ids for r in alone}, 4, prefill_chunk_size=7)
    engine.wrap_proposer(lambda inner: Nothing(inner, frozenset(), 512))
    found = engine.generate(prompts, sampling)
    assert all(same(one, other) for one, other in zip(found, alone, strict=True))
    assert engine.stats().num_draft_tokens == 0


@pytest.mark.parametrize("kind", ["eos", "stop id", "text", "budget"])
def test_nothing_behind_an_end_inside_a_block_is_delivered_or_counted(kind: str) -> None:
    """P34: the stop is the middle of a block whose drafts are all right."""
    script = list(range(10, 40))
    tokenizer = ByteTokenizer({index: b"<%d>" % index for index in script})
    end = script[9]
    target = scripted_target(script, vocab_size=64, tokenizer=tokenizer, stop_token_ids=(end,) if kind == "eos" else ())
    ends = {
        "eos": {},
        "stop id": {"stop_token_ids": (end,)},
        "text": {"stop": (f"<{end}>",)},
        "budget": {"max_tokens": 9},
    }
    sampling = SamplingParameters(logprobs=1, **ends[kind])
    engine = replaying(target, {(10,): script[1:]}, 6)
    (result,) = engine.generate([[10]], sampling)
    assert result.token_ids == tuple(script[1:10])
    assert result.finish_reason == ("length" if kind == "budget" else "stop")
    check_agreement(engine, [result])
    last = result.trace.records[-1]
    assert (last.num_verified_accepted, last.num_accepted, last.bonus_id) == (6, 1, None)


# Faults


def test_rules_without_a_way_out_end_one_request_and_spare_the_others(target: LoadedTarget) -> None:
    """P17: the first position, or a later one in the middle of a block."""
    target = replace(target, tokenizer=WordTokenizer(target.tokenizer.pieces))
    (free,) = Engine(target).generate([PROMPTS[0]], BASE)
    at_once = replace(BASE, allowed_token_ids=(9,), bad_words=("<9>",))
    chain = {"logit_bias": {9: 100.0, 8: 50.0}, "allowed_token_ids": (8, 9)}
    later = replace(BASE, bad_words=("<9><9><9><9><9>", "<9><9><9><9><8>"), logprobs=1, **chain)
    replayed = {tuple(PROMPTS[0]): free.token_ids, tuple(PROMPTS[1]): (9,) * 20, tuple(PROMPTS[2]): (9,) * 20}
    for engine in (Engine(target), replaying(target, replayed, 5)):
        first, sound, second = engine.generate([PROMPTS[1], PROMPTS[0], PROMPTS[2]], [at_once, BASE, later])
        assert (first.finish_reason, first.token_ids) == ("error", ())
        assert first.error == "no token is allowed: allowed_token_ids, bad_words left none for position 4"
        assert (second.finish_reason, second.token_ids) == ("error", (9, 9, 9, 9))
        assert "position 21" in second.error
        assert len(second.logprobs) == 4
        assert same(sound, free)
        assert (engine.stats().num_dead_ends, engine.stats().num_numeric_errors) == (2, 0)
        assert same(engine.generate([PROMPTS[0]], BASE)[0], free), "the engine serves on"


def test_bad_numbers_are_told_from_rules_that_leave_nothing() -> None:
    """P16: NaN behind one token, an allow-list of one around it."""
    table = torch.full((8, 8), -20.0)
    for before, after in ((0, 1), (1, 2), (2, 5), (3, 4), (4, 3)):
        table[before, after] = 0.0
    target = table_target(table)
    target.model.embed_tokens.weight[5] = torch.nan
    allowed = SamplingParameters(max_tokens=9, allowed_token_ids=(1, 2, 5), logprobs=2, presence_penalty=0.1)
    for engine in (Engine(target), replaying(target, {(0,): [1, 2, 5, 1], (3,): [4, 3] * 6}, 3)):
        bad, sound = engine.generate([[0], [3]], [allowed, replace(allowed, allowed_token_ids=None)])
        assert (bad.finish_reason, bad.token_ids) == ("error", (1, 2, 5))
        assert bad.error == "numbers: the target's logits for position 4 hold NaN or infinity"
        assert (sound.finish_reason, sound.error) == ("length", None)
        assert [entry.token_id for entry in bad.logprobs] == [1, 2, 5]
        assert (engine.stats().num_dead_ends, engine.stats().num_numeric_errors) == (0, 1)


def test_an_overflowing_draft_leaves_histories_right() -> None:
    """The block is run again without drafts; its tokens must not be counted twice."""
    table = torch.full((8, 8), -20.0)
    for before, after in ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0)):
        table[before, after] = 0.0
    table[:, 6] = -0.5  # a second choice, once the penalties have grown
    target = table_target(table)
    sampling = SamplingParameters(max_tokens=24, frequency_penalty=0.2, logprobs=1)
    (plain,) = Engine(target).generate([[0]], sampling)
    assert 6 in plain.token_ids
    target.model.embed_tokens.weight[5] = torch.nan
    drafts = list(plain.token_ids)
    drafts[3] = drafts[8] = 5
    engine = replaying(target, {(0,): drafts}, 3)
    (found,) = engine.generate([[0]], sampling)
    assert engine.stats().num_spoiled_blocks >= 2
    assert found.token_ids == plain.token_ids
    check_agreement(engine, [found])


# Ends in random places


@settings(max_examples=25)
@given(
    stops=st.lists(st.integers(0, 17), max_size=3),
    texts=st.lists(st.integers(0, 16), max_size=2),
    max_tokens=st.integers(1, 20),
    min_share=st.floats(0, 1),
    wrong=st.frozensets(st.integers(9, 28), max_size=8),
    num_draft_tokens=st.integers(1, 7),
    shows=st.booleans(),
)
def test_delivered_tokens_entries_and_counters_agree_wherever_it_ends(
    stops, texts, max_tokens, min_share, wrong, num_draft_tokens, shows
) -> None:
    target, ids = _story()
    sampling = replace(
        BASE,
        stop_token_ids=tuple(ids[index] for index in stops),
        stop=tuple(f"{ids[index]}><{ids[index + 1]}" for index in texts),
        max_tokens=max_tokens,
        min_tokens=int(min_share * max_tokens),
        include_stop_str_in_output=shows,
        logprobs=1,
    )
    (alone,) = Engine(target).generate([PROMPTS[0]], sampling)
    engine = replaying(target, {tuple(PROMPTS[0]): ids}, num_draft_tokens)
    engine.wrap_proposer(lambda inner: FlawedReplay(inner, wrong, 512))
    (found,) = engine.generate([PROMPTS[0]], sampling)
    assert same(found, alone)
    assert min(sampling.min_tokens, max_tokens) <= len(found.token_ids) <= max_tokens
    check_agreement(engine, [found])


@functools.cache
def _story() -> tuple[LoadedTarget, tuple[int, ...]]:
    target = make_target()
    return target, Engine(target).generate([PROMPTS[0]], replace(BASE, max_tokens=22))[0].token_ids
