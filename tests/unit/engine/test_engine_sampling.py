"""Sampled output has the target's exact distribution, with any drafter. The faults that would break it do break it.

The target is a table: the next token depends on the last alone, so a long text is many samples. A text is cut into
windows of three tokens, counted by the token before them, and compared with the exact product distribution.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from tests.fakes import TableProposer, table_target
from tests.tiny import tiny_drafter_contract

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.models.drafters.proposal import DraftSampling, Proposal
from paceline.ops import noise

VOCAB, NUM_DRAFTS, NUM_REQUESTS, NUM_TOKENS = 8, 3, 128, 480  # 20,480 windows
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5}

TABLE = (torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5).log_softmax(-1)
DRAFTS = TABLE.unsqueeze(1) + torch.randn(VOCAB, NUM_DRAFTS, VOCAB, generator=torch.Generator().manual_seed(6))


def exact_rows() -> np.ndarray:
    """p of each previous token: temperature, then top-k, then top-p, in float64."""
    p = np.exp(TABLE.double().numpy() / SAMPLING["temperature"])
    p /= p.sum(1, keepdims=True)
    for row in p:
        order = np.argsort(-row)
        row[order[SAMPLING["top_k"] :]] = 0
        row /= row.sum()
        mass_before = np.cumsum(row[order]) - row[order]
        row[order[mass_before >= SAMPLING["top_p"]]] = 0
        row /= row.sum()
    return p


def run(proposer: TableProposer | None, num_requests: int = NUM_REQUESTS) -> tuple[list[RequestResult], Engine]:
    settings = EngineSettings(max_num_seqs=num_requests, max_model_len=NUM_TOKENS + 8)
    engine = Engine(table_target(TABLE), None, settings, proposer=proposer)
    prompts = [[index % VOCAB] for index in range(num_requests)]
    each = [SamplingParameters(max_tokens=NUM_TOKENS, seed=1000 + index, **SAMPLING) for index in range(num_requests)]
    return engine.generate(prompts, each), engine


def make_proposer(method: str, corrupt=None) -> TableProposer:
    contract = tiny_drafter_contract(table_target(TABLE).contract)
    return TableProposer(DRAFTS, contract, method=method, corrupt=corrupt)


def p_value(results: list[RequestResult]) -> float:
    """Chi-square over windows of three, by the token before; rare windows are pooled."""
    p = exact_rows()
    counts: dict[int, Counter[tuple[int, ...]]] = {state: Counter() for state in range(VOCAB)}
    for result in results:
        text = result.prompt_ids[-1:] + result.token_ids
        for start in range(0, len(text) - 3, 3):
            counts[text[start]][text[start + 1 : start + 4]] += 1
    statistic, freedom = 0.0, 0
    for state, seen in counts.items():
        total = sum(seen.values())
        joint = total * p[state][:, None, None] * p[:, :, None] * p[None, :, :]
        observed = np.zeros_like(joint)
        for window, count in seen.items():
            observed[window] = count
        if (observed[joint == 0] > 0).any():
            return 0.0  # a token that top-k or top-p removed
        common = joint >= 5
        expected = [*joint[common], joint[~common].sum()]
        found = [*observed[common], observed[~common].sum()]
        if expected[-1] < 5:
            expected[-2:], found[-2:] = [sum(expected[-2:])], [sum(found[-2:])]
        statistic += sum((o - e) ** 2 / e for o, e in zip(found, expected, strict=True) if e > 0)
        freedom += len(expected) - 1
    return float(stats.chi2.sf(statistic, freedom))


def first_position_acceptance(results: list[RequestResult], method: str) -> tuple[int, float]:
    """Steps that kept their first draft, and how many should have: the sum of min(p, q) over steps."""
    p = exact_rows()
    q = (DRAFTS[:, 0].double() / SAMPLING["temperature"]).softmax(-1).numpy()
    if method == "greedy":
        q = np.eye(VOCAB)[DRAFTS[:, 0].argmax(-1).numpy()]
    by_anchor = np.minimum(p, q).sum(1)
    records = [record for result in results for record in result.trace.records]
    return sum(record.num_verified_accepted > 0 for record in records), sum(by_anchor[r.anchor_id] for r in records)


def test_plain_sampling_is_exact() -> None:
    assert p_value(run(None)[0]) > 0.01


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_speculative_sampling_is_exact_and_accepts_what_theory_says(method: str) -> None:
    """B52, one-hot and full q."""
    results, engine = run(make_proposer(method))
    assert p_value(results) > 0.01
    kept, expected = first_position_acceptance(results, method)
    assert kept == pytest.approx(expected, rel=0.02)
    assert engine.stats().num_impossible_drafts == 0


def test_a_wrong_q_is_noticed() -> None:
    """The drafts come from one distribution, the report names another; a quarter of the requests shows it."""

    def flat(proposal: Proposal) -> Proposal:
        assert proposal.log_q_BKC is not None
        return proposal._replace(log_q_BKC=torch.full_like(proposal.log_q_BKC, -np.log(VOCAB)))

    assert p_value(run(make_proposer("probabilistic", flat), NUM_REQUESTS // 4)[0]) < 1e-6


def test_noise_shared_between_draft_and_target_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftSampling, "_keys", property(lambda _: (None, noise.TARGET)))
    assert p_value(run(make_proposer("probabilistic"))[0]) < 1e-4


def test_a_draft_that_its_q_calls_impossible_is_refused_and_counted() -> None:
    def impossible(proposal: Proposal) -> Proposal:
        assert proposal.candidate_ids_BKC is not None
        assert proposal.log_q_BKC is not None
        is_drafted = proposal.candidate_ids_BKC == proposal.ids_BK.unsqueeze(2)
        return proposal._replace(log_q_BKC=proposal.log_q_BKC.masked_fill(is_drafted, -torch.inf))

    results, engine = run(make_proposer("probabilistic", impossible), num_requests=2)
    assert engine.stats().num_accepted == 0
    assert engine.stats().num_impossible_drafts == engine.stats().num_draft_tokens
    assert all(result.finish_reason == "length" for result in results)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_batch_may_mix_greedy_and_sampled_requests(method: str) -> None:
    target = table_target(TABLE)
    greedy = SamplingParameters(max_tokens=40)
    (alone,) = Engine(target).generate([[3]], greedy)
    engine = Engine(target, None, EngineSettings(max_num_seqs=4), proposer=make_proposer(method))
    mixed = engine.generate([[1], [3], [2]], [SamplingParameters(max_tokens=40, seed=1, **SAMPLING), greedy, greedy])
    assert mixed[1].token_ids == alone.token_ids
