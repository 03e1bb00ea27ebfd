"""What must hold of every drafter family in the engine: unchanged greedy ids, exact sampled output, one's own bits.

A new family is one more row of `FAMILIES`. Output is lossless whatever a drafter proposes, so the drafters are random.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fakes import table_target
from tests.tiny import loaded, tiny_drafter, tiny_prompts, wrap_drafter
from tests.unit.engine.test_engine_sampling import SAMPLING, TABLE, VOCAB, p_value

from paceline.checkpoint.contract import ConvolutionSettings, LatentAttentionSettings, SelectorSettings, TargetLayerId
from paceline.engine.canary_drafts import count_equal_drafts
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.models.drafters.proposal import Proposal

FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"drafter_family": "dflash"},
    "dflash2": {"drafter_family": "dflash2"},
    "dflash2 of three taps, causal, windowed, capped": {
        "drafter_family": "dflash2",
        "convolution": ConvolutionSettings(num_taps=3, group_size=16),
        "selector": SelectorSettings(rank=3, top_k=32),
        "layer_causal": (True, False),
        "layer_windows": (8, None),
        "input_embedding_scale": 1.5,
        "output_multiplier": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "dflash2 with latent attention": {
        "drafter_family": "dflash2",
        "is_neox_style": False,
        "latent": LatentAttentionSettings(
            q_lora_rank=24, kv_lora_rank=32, qk_nope_head_size=16, qk_rope_head_size=8, v_head_size=12
        ),
    },
    "dspark": {"drafter_family": "dspark"},
    "eagle3": {"drafter_family": "eagle3"},
}
BLOCK_FAMILIES = [name for name in FAMILIES if name != "eagle3"]
LONG = SamplingParameters(max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParameters(max_tokens=10, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_draft_tokens", [2, 7])
def test_greedy_ids_are_those_of_plain_decoding(name: str, num_draft_tokens: int) -> None:
    target, drafter = loaded("qwen3", **FAMILIES[name])
    prompts = tiny_prompts([5, 31, 12])
    plain = Engine(target).generate(prompts, LONG)
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, num_draft_tokens=num_draft_tokens))
    found = engine.generate(prompts, LONG)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert {record.num_draft_tokens for result in found for record in result.trace.records} == {num_draft_tokens}
    assert engine.stats().method == f"{FAMILIES[name]['drafter_family']}/greedy"


@pytest.mark.parametrize("name", BLOCK_FAMILIES)
def test_served_drafts_are_those_of_the_whole_text(name: str) -> None:
    """Requests of any length, batched, drafted step by step from the cache: as one by one, without cache or batch."""
    target, drafter = loaded("qwen3", **FAMILIES[name])
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=3, num_draft_tokens=5))
    for result in engine.generate(tiny_prompts([5, 31, 12]), LONG):
        text = [*result.prompt_ids, *result.token_ids]
        blocks = [(record.anchor_position, record.proposed_ids) for record in result.trace.records]
        num_drafts = sum(len(ids) for _, ids in blocks)
        assert count_equal_drafts(target.model, drafter, text, blocks) == num_drafts >= 40


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_request_has_the_same_bits_alone_and_in_company(name: str, method: str) -> None:
    target, drafter = loaded("qwen3", **FAMILIES[name])
    prompts = tiny_prompts([5, 31, 12])
    each = [SAMPLED, replace(SAMPLED, seed=12, temperature=0.7, top_k=30), LONG]
    settings = EngineSettings(max_num_seqs=3, draft_sample_method=method)
    together = Engine(target, drafter, settings).generate(prompts, each)
    engine = Engine(target, drafter, settings)
    for prompt, parameters, expected in zip(prompts, each, together, strict=True):
        (alone,) = engine.generate([prompt], parameters)
        assert alone.token_ids == expected.token_ids
        assert [r.proposed_ids for r in alone.trace.records] == [r.proposed_ids for r in expected.trace.records]
    assert engine.stats().num_impossible_drafts == 0


# Exact sampled output: the target is a table, so its distribution is known.

NUM_REQUESTS, NUM_TOKENS = 128, 120


def table_engine(method: str = "probabilistic") -> Engine:
    """A random DFlash2 drafter on the table target."""
    target = table_target(TABLE)
    drafter = tiny_drafter(
        target.contract,
        family="dflash2",
        target_layer_ids=(TargetLayerId(-1), TargetLayerId(0)),
        hidden_size=VOCAB,
        head_size=4,
        convolution=ConvolutionSettings(num_taps=2, group_size=4),
        selector=SelectorSettings(rank=4, top_k=5),
    )
    settings = EngineSettings(
        max_num_seqs=NUM_REQUESTS,
        max_model_len=NUM_TOKENS + 8,
        num_draft_tokens=3,
        draft_sample_method=method,
    )
    return Engine(target, wrap_drafter(drafter, "plain"), settings)


def sampled_p_value(engine: Engine, num_requests: int = NUM_REQUESTS) -> float:
    prompts = [[index % VOCAB] for index in range(num_requests)]
    each = [SamplingParameters(max_tokens=NUM_TOKENS, seed=700 + index, **SAMPLING) for index in range(num_requests)]
    return p_value(engine.generate(prompts, each))


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_output_of_a_dflash2_drafter_is_exact(method: str) -> None:
    """Its q is sparse (5 of 8 ids) and depends on the drafts before it."""
    engine = table_engine(method)
    assert sampled_p_value(engine) > 0.01
    assert engine.stats().num_accepted > 200, "the drafts were of some use, or nothing was tried"
    assert engine.stats().num_impossible_drafts == 0


def test_a_q_that_forgets_the_walk_is_noticed() -> None:
    """P27, P29: drawn along the walk, reported as if every candidate had been as likely."""
    engine = table_engine()

    def forgetful(inner: Any) -> Any:
        propose = inner.propose

        def flat(*arguments: Any, **options: Any) -> Proposal:
            proposal = propose(*arguments, **options)
            return proposal._replace(log_q_BKC=torch.full_like(proposal.log_q_BKC, -math.log(5)))

        inner.propose = flat
        return inner

    engine.wrap_proposer(forgetful)
    assert sampled_p_value(engine, NUM_REQUESTS // 4) < 1e-4
