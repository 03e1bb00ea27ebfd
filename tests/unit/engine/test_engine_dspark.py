"""DSpark drafters in the engine: ids that drafts cannot change, drafts that equal direct ones, exact sampled output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fakes import TableProposer, table_target
from tests.tiny import loaded, tiny_drafter_contract, tiny_prompts
from tests.unit.engine.test_engine_sampling import NUM_REQUESTS, TABLE, VOCAB, p_value, run
from tests.unit.engine.test_proposal import FORMS, make_proposer, serve

from paceline.checkpoint.contract import ConfidenceSettings, LatentAttentionSettings, MarkovSettings
from paceline.engine.canary_drafts import count_equal_drafts
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SlotState
from paceline.models.drafters.draw import draw_rows
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.proposal import DraftSampling, Proposal

LONG = SamplingParameters(max_tokens=24, ignore_eos=True)
LATENT = LatentAttentionSettings(
    q_lora_rank=24, kv_lora_rank=32, qk_nope_head_size=16, qk_rope_head_size=8, v_head_size=12
)
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "fill_in": {"layout": "fill_in", "layer_windows": (8, None), "layer_causal": (True, False)},
    "rank_0": {"markov": None},
    "gated": {"markov": MarkovSettings(8, "gated"), "confidence": ConfidenceSettings(False)},
    "rnn": {"markov": MarkovSettings(8, "rnn"), "confidence": ConfidenceSettings(True)},
    "top_k": {"draft_top_k": 6},
    "reduced": {"draft_vocab_size": 100, "has_own_head": True},
    "latent": {"latent": LATENT, "is_neox_style": False, "layer_windows": (None, 8)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_any_dspark_leaves_greedy_output_unchanged_and_drafts_what_it_should(name: str) -> None:
    target, drafter = loaded(drafter_family="dspark", block_size=5, **VARIANTS[name])
    prompts = tiny_prompts([5, 31, 12])
    plain = Engine(target).generate(prompts, LONG)
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    found = engine.generate(prompts, LONG)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    num_drafts = 4 if name == "fill_in" else 5
    assert {record.num_draft_tokens for result in found for record in result.trace.records} == {num_drafts}
    report = engine.canary()
    assert report.has_passed and not report.refusals
    assert report.num_equal == report.num_compared >= 20  # blocks


@pytest.mark.parametrize("name", ["vanilla", "fill_in", "rnn", "reduced", "latent"])
def test_served_drafts_equal_direct_ones_in_every_form_of_attention(name: str) -> None:
    target, drafter = loaded(drafter_family="dspark", linear_mode="plain", **VARIANTS[name])
    num_drafts = drafter.contract.num_draft_tokens
    texts = tiny_prompts([14, 14])
    for is_batched, is_paged in FORMS:
        form = {"is_batched": is_batched, "is_paged": is_paged}
        proposer = make_proposer(target, drafter, **form, num_draft_tokens=num_drafts)
        for text, block in zip(texts, serve(proposer, target, texts, num_junk=5), strict=True):
            assert count_equal_drafts(target.model, drafter, text, [(13, block)]) == num_drafts
    # The walk is what makes them: without it most drafts are others.
    if name != "reduced":
        drafter.model.markov_head.markov_w2.weight.zero_()
        assert count_equal_drafts(target.model, drafter, texts[0], [(13, block)]) < num_drafts


def test_block_size_7_drafts_7_tokens_and_verifies_8_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """B08."""
    target, drafter = loaded(drafter_family="dspark", block_size=7, rms_norm_eps=1e-5)
    engine = Engine(target, drafter)
    num_rows: set[int] = set()

    def watch(inner: Proposer) -> Proposer:
        write = inner.write_context

        def noted(rows: Rows, taps: Any, positions_BT: Any) -> None:
            num_rows.add(rows.num_rows)
            write(rows, taps, positions_BT)

        monkeypatch.setattr(inner, "write_context", noted)
        return inner

    engine.wrap_proposer(watch)
    (result,) = engine.generate(tiny_prompts([11]), LONG)
    assert num_rows == {11, 8}  # the prompt, then steps of the anchor and 7 drafts
    assert all(record.num_draft_tokens == 7 for record in result.trace.records)
    assert engine.stats().method == "dspark/greedy"
    other_target, other = loaded(drafter_family="dspark", block_size=7, rms_norm_eps=1e-2)
    (again,) = Engine(other_target, other).generate(tiny_prompts([11]), LONG)
    assert again.token_ids == result.token_ids
    assert [r.proposed_ids for r in again.trace.records] != [r.proposed_ids for r in result.trace.records]


@pytest.mark.parametrize("name", ["vanilla", "rnn", "top_k", "reduced", "latent"])
def test_sampled_requests_have_the_same_bits_alone_and_in_company(name: str) -> None:
    target, drafter = loaded("qwen3", drafter_family="dspark", **VARIANTS[name])
    settings = EngineSettings(max_num_seqs=3, draft_sample_method="probabilistic")
    prompts = tiny_prompts([5, 31, 12])
    sampled = SamplingParameters(max_tokens=16, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)
    each = [sampled, replace(sampled, seed=12, temperature=0.7, top_k=30), replace(LONG, max_tokens=16)]
    together = Engine(target, drafter, settings).generate(prompts, each)
    engine = Engine(target, drafter, settings)
    for prompt, parameters, expected in zip(prompts, each, together, strict=True):
        (alone,) = engine.generate([prompt], parameters)
        assert alone.token_ids == expected.token_ids
        assert [r.proposed_ids for r in alone.trace.records] == [r.proposed_ids for r in expected.trace.records]
    assert engine.stats().num_impossible_drafts == 0
    assert together[2].token_ids == Engine(target).generate(prompts[2:], each[2])[0].token_ids


# Exact sampled output

NUM_DRAFTS = 3


class WalkingProposer(TableProposer):
    """A table of base logits by anchor, and a real DSpark walk over it; the logits serve as hidden rows, too.

    Args:
        drafter: for a vocabulary of `VOCAB`, hidden width that of its draft vocabulary.
        reports_base: planted fault: q of the rows before the bias.
    """

    def __init__(self, drafter: DSparkDrafter, *, reports_base: bool = False) -> None:
        generator = torch.Generator().manual_seed(8)
        kept = torch.arange(VOCAB) if drafter.vocabulary.target_ids_V is None else drafter.vocabulary.target_ids_V
        base = TABLE.unsqueeze(1)[..., kept] + torch.randn(VOCAB, NUM_DRAFTS, len(kept), generator=generator)
        super().__init__(base, tiny_drafter_contract(table_target(TABLE).contract), method="probabilistic")
        self._walker, self._reports_base = drafter, reports_base
        self.num_candidates = drafter.num_candidates

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """Draw K drafts per request, or the first `num_drafts` of them."""
        settings = state.sampling_rows(rows.slots_B)
        anchors_B = state.anchors[rows.slots_B].clamp(min=0)
        sampling = DraftSampling(
            method="probabilistic",
            temperature_B=settings.temperature_B,
            seed_B=settings.seed_B,
            position_B=state.lengths[rows.slots_B],
            step_B=state.steps[rows.slots_B],
        )
        logits_BKV = self._logits_VKV[anchors_B, :num_drafts]
        proposal = self._walker.propose(logits_BKV, logits_BKV, anchors_B, sampling)
        if self._reports_base:
            base = draw_rows(logits_BKV, sampling, self._walker.vocabulary)
            proposal = proposal._replace(candidate_ids_BKC=base.candidate_ids_BKC, log_q_BKC=base.log_q_BKC)
        return proposal


def walker(**changes: Any) -> DSparkDrafter:
    contract = tiny_drafter_contract(table_target(TABLE).contract, family="dspark", **changes)
    drafter = DSparkDrafter(replace(contract, hidden_size=contract.draft_vocab_size)).requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    for parameter in drafter.parameters():
        parameter.normal_(0.0, 0.8, generator=generator)
    if contract.has_vocabulary_map:
        drafter.vocabulary.target_ids_V = torch.tensor([0, 2, 3, 5, 7])
    return drafter


@pytest.mark.parametrize(
    "changes",
    [
        {"markov": MarkovSettings(4, "rnn"), "draft_vocab_size": 5, "has_own_head": True},
        {"markov": MarkovSettings(4, "gated"), "draft_top_k": 3},
    ],
    ids=["rnn over a reduced vocabulary", "gated under top-k"],
)
def test_speculative_sampling_with_a_walk_is_exact(changes: dict[str, Any]) -> None:
    """B52: q is that of the realised prefix."""
    results, engine = run(WalkingProposer(walker(**changes)))
    assert p_value(results) > 0.01
    assert engine.stats().num_impossible_drafts == 0
    assert engine.stats().num_accepted > 0.1 * engine.stats().num_draft_tokens


def test_a_q_that_forgets_the_walk_is_noticed() -> None:
    """A quarter of the requests of the test above shows it."""
    assert p_value(run(WalkingProposer(walker(), reports_base=True), NUM_REQUESTS // 4)[0]) < 1e-6
