"""Every rule and setting with drafts gives what it gives without: ids, text, ends and log-probabilities.

Drafts are a replay of the right text with some mistakes, so that blocks are kept in whole, in part and not at all, and
those of a random drafter, of which next to none is kept. Arithmetic is row-invariant, so equality is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.replays import (
    BASE,
    PROMPTS,
    WordTokenizer,
    check_agreement,
    make_target,
    same,
    with_mistakes,
)

import paceline.engine.verifier as verifier
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult
from paceline.engine.step import SentOutput
from paceline.engine.token_state import TokenState
from paceline.models.loading import LoadedTarget


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return make_target()


@pytest.fixture(scope="module")
def plain(target: LoadedTarget) -> RequestResult:
    return Engine(target).generate([PROMPTS[0]], BASE)[0]


def rules_of(plain: RequestResult) -> dict[str, dict[str, Any]]:
    """Every field, with values that change the plain text; some act first in the middle of a block."""
    ids = plain.token_ids
    return {
        "logit_bias": {"logit_bias": {ids[3]: -100.0, ids[9]: 4.0, 70: 3.0}},
        "allowed_token_ids": {"allowed_token_ids": tuple(token for token in range(512) if token % 3)},
        "repetition_penalty": {"repetition_penalty": 1.7},
        "frequency_penalty": {"frequency_penalty": 1.1, "logit_bias": {100: 8.0, 101: 8.1, 102: 7.9}},
        "presence_penalty": {"presence_penalty": 1.9, "logit_bias": {100: 8.0, 101: 8.1, 102: 7.9}},
        "bad_words": {"bad_words": tuple("".join(f"<{token}>" for token in ids[a:b]) for a, b in ((1, 3), (4, 7)))},
        "min_tokens": {"min_tokens": 11, "stop_token_ids": (ids[2], ids[12], ids[7])},
        "min_tokens and texts": {"min_tokens": 11, "stop": (f"<{ids[2]}>", f"<{ids[12]}>")},
        "stop across tokens": {"stop": (f"{ids[6]}><{ids[7]}",)},
    }


RULES = (
    "logit_bias",
    "allowed_token_ids",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "bad_words",
    "min_tokens",
    "min_tokens and texts",
    "stop across tokens",
)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_holds_in_a_block_as_without_one(target: LoadedTarget, plain: RequestResult, name: str) -> None:
    target = replace(target, tokenizer=WordTokenizer(target.tokenizer.pieces))
    sampling = replace(BASE, logprobs=3, logprobs_mode="processed", **rules_of(plain)[name])
    alone = [Engine(target).generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert alone[0].token_ids != plain.token_ids, "the rule does something"
    _, drafter = loaded("qwen3")
    for engine in (with_mistakes(target, alone), Engine(target, drafter, EngineSettings(max_num_seqs=2))):
        found = engine.generate(PROMPTS, sampling)
        assert all(same(one, other) for one, other in zip(found, alone, strict=True))
        check_agreement(engine, found)


def blind(field: int, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """`target_logits` with one of its positional arguments spoilt."""
    true = verifier.target_logits

    def spoilt(*arguments: Any, **options: Any) -> Any:
        changed = list(arguments)
        changed[field] = value(changed[field])
        return true(*changed, **options)

    return spoilt


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty", "bad_words"])
def test_histories_without_the_drafts_before_are_found_out(
    target: LoadedTarget, plain: RequestResult, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P31 planted."""
    target = replace(target, tokenizer=WordTokenizer(target.tokenizer.pieces))
    sampling = replace(BASE, **rules_of(plain)[name])
    alone = Engine(target).generate(PROMPTS, sampling)
    monkeypatch.setattr(verifier, "target_logits", blind(1, lambda drafts: torch.full_like(drafts, -1)))
    found = with_mistakes(target, alone).generate(PROMPTS, sampling)
    assert not all(same(one, other) for one, other in zip(found, alone, strict=True))


def test_one_position_for_a_whole_block_is_found_out(
    target: LoadedTarget, plain: RequestResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P33 planted: with every row held to the bound of the first, a stop inside the block comes too late or never."""
    sampling = replace(BASE, **rules_of(plain)["min_tokens"])
    alone = Engine(target).generate(PROMPTS[:1], sampling)
    true = verifier.target_logits

    def row_by_row(logits_BLV: Any, drafts: Any, anchors: Any, *rest: Any, **options: Any) -> Any:
        return true(logits_BLV, drafts, anchors - logits_BLV.shape[1] + 1, *rest, **options)

    monkeypatch.setattr(verifier, "target_logits", row_by_row)
    found = with_mistakes(target, alone, frozenset()).generate(PROMPTS[:1], sampling)
    assert not same(found[0], alone[0])


def test_counts_with_refused_drafts_are_found_out(
    target: LoadedTarget, plain: RequestResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P32 planted."""
    sampling = replace(BASE, **rules_of(plain)["frequency_penalty"])
    alone = Engine(target).generate(PROMPTS, sampling)
    engine = with_mistakes(target, alone)
    true = TokenState.extend

    def extend(self: TokenState, slots_B: Any, tokens_BL: Any, flags: Any) -> None:
        true(self, slots_B, tokens_BL.masked_fill(tokens_BL < 0, plain.token_ids[1]), flags)

    monkeypatch.setattr(TokenState, "extend", extend)
    found = engine.generate(PROMPTS, sampling)
    assert not all(same(one, other) for one, other in zip(found, alone, strict=True))


def test_counts_on_the_device_are_those_of_the_output_after_every_step(target: LoadedTarget) -> None:
    """P32."""
    sampling = replace(BASE, frequency_penalty=0.3, repetition_penalty=1.1)
    engine = with_mistakes(target, Engine(target).generate(PROMPTS, sampling))
    for prompt in PROMPTS:
        engine.add_request(prompt, sampling)
    while engine.has_unfinished():
        engine.step()
        for request in engine._loop.scheduler.running:
            counts = engine._loop.parts.state.tokens._penalties.output_counts_BV[request.slot]
            output = torch.tensor(request.output.token_ids)
            assert torch.equal(counts.long(), torch.bincount(output, minlength=512))


# Neighbours and slots

EACH = [
    replace(BASE, repetition_penalty=1.4, logprobs=2),
    replace(BASE, temperature=0.8, top_p=0.9, seed=5, frequency_penalty=0.7, bad_words=("<7>",), logprobs=0),
    replace(BASE, temperature=1.1, top_k=20, min_p=0.02, seed=6, logit_bias={9: 2.0}, min_tokens=9),
    replace(BASE, allowed_token_ids=tuple(range(4, 500)), logprobs=4, logprobs_mode="processed"),
    replace(BASE, temperature=1.0, seed=7),
    BASE,
]
MANY = tiny_prompts([7, 12, 3, 21, 9, 15], seed=4)


@pytest.mark.parametrize(
    ("verify_method", "method"),
    [
        ("standard", "greedy"),
        ("standard", "probabilistic"),
        ("block", "probabilistic"),
        ("match", "greedy"),
        ("coupled", "probabilistic"),
    ],
)
def test_a_mixed_batch_equals_solo_runs_whatever_the_order(verify_method: str, method: str) -> None:
    """P26, P12: greedy and sampled, ruled and free, in any slot and company."""
    target, drafter = loaded("qwen3", tokenizer=WordTokenizer())
    options = {"draft_sample_method": method, "verify_method": verify_method}
    alone = [
        Engine(target, drafter, EngineSettings(max_num_seqs=1, **options)).generate([prompt], sampling)[0]
        for prompt, sampling in zip(MANY, EACH, strict=True)
    ]
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=3, **options))
    order = [4, 0, 5, 2, 1, 3]
    found = engine.generate([MANY[index] for index in order], [EACH[index] for index in order])
    for result, index in zip(found, order, strict=True):
        assert same(result, alone[index]), index
        assert [r.proposed_ids for r in result.trace.records] == [r.proposed_ids for r in alone[index].trace.records]
        assert (result.verify_method, result.is_lossless) == (verify_method, True)
    check_agreement(engine, found)


def test_a_slot_passed_on_keeps_no_rule(target: LoadedTarget) -> None:
    """P13: one slot, a request with every rule, then one with none, then one with other rules."""
    target = replace(target, tokenizer=WordTokenizer(target.tokenizer.pieces))
    heavy = replace(
        BASE,
        logit_bias={9: 5.0, 10: 5.0},
        allowed_token_ids=tuple(range(0, 512, 2)),
        frequency_penalty=2.0,
        repetition_penalty=3.0,
        bad_words=("<9>", "<4><6>"),
        min_tokens=15,
        stop_token_ids=(6,),
    )
    light = replace(BASE, presence_penalty=0.5, bad_words=("<3>",))
    _, drafter = loaded("qwen3")
    shared = Engine(target, drafter, EngineSettings(max_num_seqs=1))
    for sampling in (heavy, BASE, light, replace(BASE, temperature=1.0, seed=3)):
        fresh = Engine(target, drafter, EngineSettings(max_num_seqs=1))
        assert same(shared.generate([PROMPTS[0]], sampling)[0], fresh.generate([PROMPTS[0]], sampling)[0])


def test_rules_survive_an_interruption_anywhere(target: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device had counted tokens that the host never saw; the histories are written again."""
    target = replace(target, tokenizer=WordTokenizer(target.tokenizer.pieces))
    sampling = replace(BASE, frequency_penalty=1.0, bad_words=("<5><6>",), logit_bias={100: 8.0, 101: 8.1, 102: 7.9})
    alone = Engine(target).generate(PROMPTS, replace(sampling, logprobs=1))
    engine = with_mistakes(target, alone)
    names = [engine.add_request(prompt, replace(sampling, logprobs=1)) for prompt in PROMPTS]
    true, num_calls = SentOutput.read, 0

    def interrupted(self: SentOutput) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 1:
            raise KeyboardInterrupt
        return true(self)

    monkeypatch.setattr(SentOutput, "read", interrupted)
    while engine.has_unfinished():
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    assert num_calls > 9
    assert all(same(engine.result(name), other) for name, other in zip(names, alone, strict=True))


@pytest.mark.parametrize("num_left", [1, 2, 5, 9])
def test_the_context_limit_cuts_all_alike(target: LoadedTarget, num_left: int) -> None:
    """P11: near the limit rows lie beyond it; positions, bounds and entries stay right."""
    prompt = tiny_prompts([30])[0]
    each = replace(BASE, min_tokens=15, temperature=1.0, seed=8, logprobs=2, stop_token_ids=(7,))
    limit = {"max_model_len": 30 + num_left, "verify_method": "match"}
    (alone,) = Engine(target, None, EngineSettings(**limit)).generate([prompt], each)
    engine = with_mistakes(target, [alone], frozenset((33,)), **limit)
    (found,) = engine.generate([prompt], each)
    assert same(found, alone)
    assert (found.finish_reason, len(found.token_ids)) == ("length", num_left)
    check_agreement(engine, [found])
