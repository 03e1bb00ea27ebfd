"""Engines that draft from a short list: greedy text is plain decoding's, sampled text exact, drafts are in the list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fakes import table_target
from tests.tiny import VOCAB_SIZE, loaded, tiny_drafter, tiny_prompts, wrap_drafter
from tests.unit.engine.test_engine_sampling import SAMPLING, TABLE, VOCAB, p_value

from paceline.checkpoint.contract import ConvolutionSettings, MarkovSettings, SelectorSettings, TargetLayerId
from paceline.engine.canary_drafts import count_equal_drafts
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import BlockProposer
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.models.drafters.proposal import Proposal
from paceline.models.drafters.short_list import ShortList, shortened
from paceline.models.drafters.vocabulary import DraftVocabulary
from paceline.models.loading import LoadedDrafter, LoadedTarget

FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"drafter_family": "dflash"},
    "dflash2": {"drafter_family": "dflash2"},
    "dspark": {"drafter_family": "dspark"},
    "eagle3": {"drafter_family": "eagle3"},
}
LONG = SamplingParameters(max_tokens=16, ignore_eos=True)
SIZE = 100


def parts(name: str, **options: Any) -> tuple[LoadedTarget, LoadedDrafter]:
    """The frequent ids are spread over the vocabulary, so that no id of the list is its own index."""
    target, drafter = loaded("qwen3", **FAMILIES[name], **options)
    counts_W = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    counts_W[4::5] = torch.arange(1, len(counts_W[4::5]) + 1)
    return target, replace(drafter, token_counts_W=counts_W)


def listed_ids(engine: Engine) -> set[int]:
    assert engine._loop.parts.short_list is not None
    return set(engine._loop.parts.short_list.ids_V.tolist())


def check_drafts(target: LoadedTarget, drafter: LoadedDrafter, engine: Engine, results: list[RequestResult]) -> None:
    """In the list, and those of the whole text, computed without cache or batch."""
    ids = listed_ids(engine)
    assert engine._loop.parts.short_list is not None
    short = replace(drafter, model=shortened(drafter.model, engine._loop.parts.short_list, target.model))
    for result in results:
        blocks = [(record.anchor_position, record.proposed_ids) for record in result.trace.records]
        assert {token for _, drafts in blocks for token in drafts} <= ids
        text = [*result.prompt_ids, *result.token_ids]
        assert count_equal_drafts(target.model, short, text, blocks) == sum(len(drafts) for _, drafts in blocks) > 30


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_are_those_of_plain_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = parts(name)
    prompts = tiny_prompts([5, 31, 12])
    plain = Engine(target).generate(prompts, LONG)
    settings = EngineSettings(max_num_seqs=2, num_draft_tokens=5, draft_vocab_size=SIZE)
    engine = Engine(target, drafter, settings)
    found = engine.generate(prompts, LONG)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    check_drafts(target, drafter, engine, found)
    stats = engine.stats()
    assert stats.num_listed_ids == SIZE and 0.9 < (stats.listed_share or 0) < 1
    # The planted fault: columns of the short head as target ids. Verification hides it, the check does not.
    monkeypatch.setattr(DraftVocabulary, "to_target_ids", lambda _self, draft_ids: draft_ids)
    faulty = Engine(target, drafter, settings)
    hidden = faulty.generate(prompts, LONG)
    assert [result.token_ids for result in hidden] == [result.token_ids for result in plain]
    with pytest.raises(AssertionError):
        check_drafts(target, drafter, faulty, hidden)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("verify_method", ["standard", "coupled"])
def test_a_request_has_the_same_bits_alone_and_in_company(name: str, verify_method: Any) -> None:
    target, drafter = parts(name)
    prompts = tiny_prompts([5, 31, 12])
    sampled = SamplingParameters(max_tokens=10, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)
    each = [sampled, replace(sampled, seed=12, temperature=0.7, top_k=30), LONG]
    settings = EngineSettings(
        max_num_seqs=3, draft_sample_method="probabilistic", draft_vocab_size=SIZE, verify_method=verify_method
    )
    together = Engine(target, drafter, settings).generate(prompts, each)
    engine = Engine(target, drafter, settings)
    for prompt, parameters, expected in zip(prompts, each, together, strict=True):
        (alone,) = engine.generate([prompt], parameters)
        assert alone.token_ids == expected.token_ids
        assert [r.proposed_ids for r in alone.trace.records] == [r.proposed_ids for r in expected.trace.records]
        assert {token for r in alone.trace.records for token in r.proposed_ids} <= listed_ids(engine)
    assert engine.stats().num_impossible_drafts == 0


def test_auto_without_counts_and_full_are_the_drafter_as_it_was() -> None:
    target, drafter = parts("dflash")
    full = Engine(target, drafter, EngineSettings(draft_vocab_size="full"))
    auto = Engine(target, replace(drafter, token_counts_W=None))
    assert auto.settings.draft_vocab_size == "auto"
    for engine in (full, auto):
        assert engine.stats().num_listed_ids is engine.stats().listed_share is None
        assert (
            isinstance(engine._loop.parts.proposer, BlockProposer)
            and engine._loop.parts.proposer._drafter is drafter.model
        )


def test_the_canary_checks_the_drafters_own_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list would hide what the drafter drafts, and the direct drafts of the canary are the whole head's."""
    target, drafter = parts("dflash")
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, draft_vocab_size=SIZE))
    report = engine.canary()
    assert report.has_passed and report.num_equal == report.num_compared > 12  # blocks
    import paceline.engine.canary as canary

    replaced = canary.replace

    def listed(settings: Any, **changes: Any) -> Any:
        return replaced(settings, **{key: value for key, value in changes.items() if key != "draft_vocab_size"})

    monkeypatch.setattr(canary, "replace", listed)
    assert not engine.canary().has_passed, "a canary of the list compares other drafts"


# Exact sampled output: the target is a table, so its distribution is known.

NUM_REQUESTS, NUM_TOKENS = 128, 120
TABLE_PARTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {
        "convolution": ConvolutionSettings(num_taps=2, group_size=4),
        "selector": SelectorSettings(rank=4, top_k=4),
    },
    "dspark": {"markov": MarkovSettings(rank=4, kind="vanilla")},
}


def table_engine(family: Any) -> Engine:
    """A random drafter on the table target, drafting 5 of its 8 ids."""
    target = table_target(TABLE)
    options = {"target_layer_ids": (TargetLayerId(-1), TargetLayerId(0)), "hidden_size": VOCAB, "head_size": 4}
    drafter = wrap_drafter(tiny_drafter(target.contract, family=family, **options, **TABLE_PARTS[family]), "plain")
    counts_W = torch.tensor([0, 3, 0, 5, 5, 0, 1, 2])
    settings = EngineSettings(
        max_num_seqs=NUM_REQUESTS,
        max_model_len=NUM_TOKENS + 8,
        num_draft_tokens=3,
        draft_sample_method="probabilistic",
        draft_vocab_size=5,
    )
    return Engine(target, replace(drafter, token_counts_W=counts_W), settings)


def sampled_p_value(engine: Engine, num_requests: int = NUM_REQUESTS) -> float:
    prompts = [[index % VOCAB] for index in range(num_requests)]
    each = [SamplingParameters(max_tokens=NUM_TOKENS, seed=700 + index, **SAMPLING) for index in range(num_requests)]
    return p_value(engine.generate(prompts, each))


@pytest.mark.parametrize("family", TABLE_PARTS)
def test_sampled_output_is_exact(family: str) -> None:
    """q is 0 outside the list; what the target says there is never drafted and comes all the same."""
    engine = table_engine(family)
    assert listed_ids(engine) == {1, 3, 4, 6, 7}
    assert sampled_p_value(engine) > 0.01
    stats = engine.stats()
    assert stats.num_accepted > 200, "the drafts were of some use, or nothing was tried"
    assert stats.num_impossible_drafts == 0


def test_a_q_over_columns_of_the_short_head_is_noticed() -> None:
    """The planted fault: drafts in target ids, candidates by their index in the list."""
    engine = table_engine("dflash")
    ids_V = torch.tensor(sorted(listed_ids(engine)))

    def by_column(inner: Any) -> Any:
        propose = inner.propose

        def wrong(*arguments: Any, **options: Any) -> Proposal:
            proposal = propose(*arguments, **options)
            columns = (proposal.candidate_ids_BKC.unsqueeze(-1) == ids_V).long().argmax(-1)
            return proposal._replace(candidate_ids_BKC=columns)

        inner.propose = wrong
        return inner

    engine.wrap_proposer(by_column)
    assert sampled_p_value(engine, NUM_REQUESTS // 4) < 1e-4 or engine.stats().num_impossible_drafts > 0


def test_a_list_of_the_whole_vocabulary_drafts_the_same_bits() -> None:
    """Made by hand: an engine that is asked for all ids keeps the drafter's own head."""
    for name in FAMILIES:
        target, drafter = parts(name)
        everything = ShortList(torch.arange(VOCAB_SIZE), 1.0)
        settings = EngineSettings(draft_sample_method="probabilistic")
        sampled = SamplingParameters(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
        whole = replace(drafter, model=shortened(drafter.model, everything, target.model))
        (full,), (short,) = (
            Engine(target, which, replace(settings, draft_vocab_size="full")).generate(tiny_prompts([9]), sampled)
            for which in (drafter, whole)
        )
        assert short.token_ids == full.token_ids
        assert [r.proposed_ids for r in short.trace.records] == [r.proposed_ids for r in full.trace.records]
