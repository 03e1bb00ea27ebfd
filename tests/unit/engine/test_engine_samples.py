"""Several samples of a prompt, methods of verification, drafting switched off for one request, structured output."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fakes import ByteTokenizer, TableProposer, table_target
from tests.tiny import loaded, tiny_drafter_contract, tiny_prompts
from tests.unit.engine.replays import BASE, PROMPTS, check_agreement, make_target, same, with_mistakes

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.engine.step import SentOutput
from paceline.engine.structured import StructuredOutput
from paceline.errors import ConfigError, RequestError

HOT = replace(BASE, temperature=1.0, top_p=0.95)

# Samples


def test_samples_of_a_prompt_follow_each_other_and_use_seeds_of_their_own() -> None:
    """B61: four samples with a neighbour of one; each is the request that its seed makes alone."""
    target, drafter = loaded("qwen3")
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=3, draft_sample_method="probabilistic"))
    found = engine.generate(PROMPTS[:2], [replace(HOT, n=4, seed=7), BASE])
    assert [result.sample_index for result in found] == [0, 1, 2, 3, 0]
    assert [result.prompt_ids for result in found] == [tuple(PROMPTS[0])] * 4 + [tuple(PROMPTS[1])]
    assert len({result.token_ids for result in found[:4]}) == 4
    check_agreement(engine, found)
    for index, result in enumerate(found[:4]):
        assert same(result, engine.generate([PROMPTS[0]], replace(HOT, seed=7 + index))[0])
    assert all(record.num_draft_tokens == 7 for record in found[4].trace.records), "the neighbour keeps drafting"


def test_unseeded_samples_differ() -> None:
    """Under one shared seed all would be equal. Two by themselves are equal by chance once in some hundred runs."""
    found = Engine(make_target()).generate([PROMPTS[0]], replace(HOT, n=4, temperature=2.0, top_p=1.0))
    assert len({result.token_ids for result in found}) > 1


def test_requests_of_several_samples_go_through_add_samples() -> None:
    engine = Engine(make_target())
    with pytest.raises(RequestError, match="n is 3; a request is one sample") as caught:
        engine.add_request(PROMPTS[0], replace(HOT, n=3))
    assert "add_samples" in str(caught.value)
    assert engine.add_samples(PROMPTS[0], replace(HOT, n=2), "mine") == ["mine-0", "mine-1"]
    with pytest.raises(RequestError, match="'mine-0' is still running"):
        engine.add_samples(PROMPTS[0], replace(HOT, n=3), "mine")
    assert engine.stats().num_waiting == 2, "none of the three was queued"
    with pytest.raises(RequestError, match="logit_bias holds 512"):
        engine.add_samples(PROMPTS[0], replace(HOT, n=3, logit_bias={512: 1.0}))
    assert engine.stats().num_waiting == 2


# Methods


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
@pytest.mark.parametrize("verify_method", ["match", "coupled"])
def test_the_target_draws_the_same_text_with_and_without_drafts(family: Any, verify_method: Any) -> None:
    """Judged by equality, a sampled text is that of plain decoding at the same seed."""
    target, drafter = loaded("qwen3", drafter_family=family)
    each = [replace(HOT, seed=seed, repetition_penalty=1.2) for seed in range(3)]
    plain = Engine(target).generate(PROMPTS, each)
    found = Engine(target, drafter, EngineSettings(verify_method=verify_method)).generate(PROMPTS, each)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert {(result.verify_method, result.is_lossless, result.trace.lossless) for result in found} == {
        (verify_method, True, True)
    }


@pytest.mark.parametrize("is_coupled", [True, False])
def test_coupled_drafts_use_the_targets_noise(is_coupled: bool) -> None:
    """A draft from the target's own distribution is always what the target draws, unless its noise is its own."""
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    target = table_target(table)
    contract = tiny_drafter_contract(target.contract)
    proposer = TableProposer(table.unsqueeze(1), contract, method="probabilistic", is_coupled=is_coupled)
    engine = Engine(target, None, EngineSettings(verify_method="coupled"), proposer=proposer)
    (result,) = engine.generate([[3]], SamplingParameters(max_tokens=200, temperature=0.9, seed=3))
    share = engine.stats().num_accepted / engine.stats().num_draft_tokens
    assert (share == 1.0) if is_coupled else (share < 0.6), share
    plain = Engine(target).generate([[3]], SamplingParameters(max_tokens=200, temperature=0.9, seed=3))
    assert result.token_ids == plain[0].token_ids


def test_coupled_verification_asks_for_drafts_that_are_drawn() -> None:
    target, drafter = loaded("qwen3")
    coupled = Engine(target, drafter, EngineSettings(verify_method="coupled"))
    assert coupled.stats().method == "dflash/probabilistic", "greedy drafts have no noise to share"
    with pytest.raises(ConfigError, match=r"'coupled'.*'greedy'"):
        EngineSettings(verify_method="coupled", draft_sample_method="greedy")


# Drafting off


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_one_request_may_go_without_drafts(family: Any) -> None:
    target, drafter = loaded("qwen3", drafter_family=family)
    off = replace(BASE, draft_length="off")
    alone = Engine(target, drafter).generate(PROMPTS, BASE)
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    found = engine.generate(PROMPTS, [BASE, off, BASE])
    assert all(same(one, other) for one, other in zip(found, alone, strict=True))
    assert {record.num_draft_tokens for record in found[1].trace.records} == {0}
    assert found[1].trace.method == "plain"
    for index in (0, 2):  # the last one follows in the slot of one of the others
        proposed = [record.proposed_ids for record in found[index].trace.records]
        assert proposed == [record.proposed_ids for record in alone[index].trace.records]
    check_agreement(engine, found)


def test_an_engine_may_be_off_and_a_request_on() -> None:
    target, drafter = loaded("qwen3")
    engine = Engine(target, drafter, EngineSettings(draft_length="off"))
    off, on = engine.generate(PROMPTS[:2], [BASE, replace(BASE, draft_length="fixed")])
    assert {record.num_draft_tokens for record in off.trace.records} == {0}
    assert {record.num_draft_tokens for record in on.trace.records} == {7}
    assert engine.stats().num_undrafted == 0, "not drafting for it was asked for"


# Structured output

LETTERS = ByteTokenizer({256 + index: bytes([97 + index % 26]) * (1 + index // 26) for index in range(200)})
FORMS = {
    "regex": StructuredOutput("regex", "[a-c]{3,6}-[0-9]{2}"),
    "choice": StructuredOutput("choice", ("alpha", "beta", "gamma ray")),
    "schema": StructuredOutput(
        "json_schema",
        '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}',
    ),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_kept_with_drafts_as_without(name: str, temperature: float) -> None:
    """A neighbour without a form is left alone, and drafts of a random drafter are nearly all against the grammar."""
    target, drafter = loaded("qwen3", tokenizer=LETTERS)
    shape = {"temperature": temperature, "repetition_penalty": 1.2, "structured_output": FORMS[name]}
    sampling = SamplingParameters(max_tokens=60, seed=3, logprobs=2, **shape)
    free = replace(BASE, temperature=temperature, seed=4)
    settings = EngineSettings(max_num_seqs=2, verify_method="match")
    each = [sampling, free, replace(sampling, seed=5)]
    alone = Engine(target, None, settings).generate(PROMPTS, each)
    drafted = Engine(target, drafter, settings)
    for engine in (drafted, with_mistakes(target, alone, frozenset((9, 20)), verify_method="match")):
        found = engine.generate(PROMPTS, each)
        assert all(same(one, other) for one, other in zip(found, alone, strict=True))
        check_agreement(engine, found)
    for result in (alone[0], alone[2]):
        assert (result.finish_reason, result.stop_reason) in (("stop", None), ("stop", 2))
        if name == "regex":
            assert re.fullmatch("[a-c]{3,6}-[0-9]{2}", result.text)
        elif name == "choice":
            assert result.text in FORMS[name].value
        else:
            assert isinstance(json.loads(result.text)["a"], bool)


def test_a_form_survives_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = loaded("qwen3", tokenizer=LETTERS)
    sampling = SamplingParameters(max_tokens=40, structured_output=StructuredOutput("regex", "([a-f]{2}[0-9]){9}"))
    (alone,) = Engine(target).generate([PROMPTS[0]], sampling)
    engine = with_mistakes(target, [alone])
    name = engine.add_request(PROMPTS[0], sampling)
    calls, true = iter(range(10**6)), SentOutput.read

    def interrupted(self: SentOutput) -> Any:
        if next(calls) % 2 == 0:
            raise KeyboardInterrupt
        return true(self)

    monkeypatch.setattr(SentOutput, "read", interrupted)
    while engine.has_unfinished():
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    assert same(engine.result(name), alone)


def test_a_form_that_rules_make_impossible_ends_with_a_reason() -> None:
    target, drafter = loaded("qwen3", tokenizer=LETTERS)
    form = StructuredOutput("regex", "ab[0-9]c")
    blocked = SamplingParameters(structured_output=form, allowed_token_ids=tuple(b"abc"), logprobs=0)
    for engine in (Engine(target), Engine(target, drafter)):
        blocked_result, free = engine.generate(PROMPTS[:2], [blocked, BASE])
        assert (blocked_result.finish_reason, blocked_result.text) == ("error", "ab")
        assert blocked_result.error.startswith("no token is allowed: structured_output, allowed_token_ids")
        assert len(blocked_result.logprobs) == 2
        assert free.finish_reason == "length"


def test_forms_that_cannot_be_compiled_are_refused_when_added() -> None:
    engine = Engine(loaded("qwen3", tokenizer=LETTERS)[0])
    with pytest.raises(RequestError, match="regex"):
        engine.add_request(PROMPTS[0], SamplingParameters(structured_output=StructuredOutput("regex", "(")))
    assert not engine.has_unfinished()


def test_long_prompts_with_forms_are_masked_on_their_last_chunk_alone() -> None:
    target, _ = loaded("qwen3", tokenizer=LETTERS)
    (prompt,) = tiny_prompts([40])
    sampling = SamplingParameters(structured_output=FORMS["choice"])
    whole, chunked = (
        Engine(target, None, EngineSettings(prefill_chunk_size=size)).generate([prompt], sampling)[0]
        for size in (512, 7)
    )
    assert same(whole, chunked)
    assert whole.text in FORMS["choice"].value
