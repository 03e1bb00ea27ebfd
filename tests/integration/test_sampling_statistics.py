"""Whole engine loop against the exact distribution: penalties, bias, masks, truncation and temperatures in one batch.

The target is a table, so that a slow float64 formula gives p of every token a request emitted, given all it had emitted
before. Summed over a text, counts minus these probabilities have mean 0 and a known covariance whatever the history
was, so long texts can be tested although penalties make every context new: chi-square by the token before, and by
request settings. Requests outnumber the slots, so that every slot has several owners.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.fakes import TableProposer, table_target
from tests.slow_target_distribution import Wishes, slow_processed, slow_rules
from tests.tiny import tiny_drafter_contract

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.models.drafters.proposal import Proposal
from paceline.ops import target_distribution
from paceline.trace.acceptance import AcceptanceSummary


class LetterTokenizer:
    """Id 0 is "a", id 1 is "b", and so on; other characters have no id and leave no trace."""

    def encode(self, text: str) -> list[int]:
        """One id per known letter."""
        return [ord(letter) - 97 for letter in text if 0 <= ord(letter) - 97 < VOCAB]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """One letter per id."""
        return "".join(chr(97 + index) for index in ids)


VOCAB, NUM_DRAFTS, NUM_SLOTS, NUM_TOKENS, PER_SETTING = 8, 3, 48, 96, 16
STOP_ID = 7
ALPHA = 1e-6
TOKENIZER = LetterTokenizer()
TABLE = (torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(15)) * 1.2).log_softmax(-1)
DRAFTS = TABLE.unsqueeze(1) + torch.randn(VOCAB, NUM_DRAFTS, VOCAB, generator=torch.Generator().manual_seed(16))

# Two letters each, the second being what the target likes best after the first, so that drafts complete them.
BAD_WORDS = tuple(TOKENIZER.decode([first, int(TABLE[first].argmax())]) for first in (0, 1, 4, 6))

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    "biased": {
        "temperature": 1.3,
        "min_p": 0.05,
        "logit_bias": {0: 1.0, 3: -2.0},
        "frequency_penalty": 0.05,
        "presence_penalty": 0.4,
    },
    "repeated": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "allowed_token_ids": (0, 1, 2, 4, 5, 6),
        "bad_words": BAD_WORDS,
    },
    "held": {"temperature": 1.0, "min_tokens": NUM_TOKENS - 8, "stop_token_ids": (STOP_ID,), "top_p": 0.95},
    "greedy": {"temperature": 0.0, "frequency_penalty": 0.3, "logit_bias": {5: 0.5}},
}
METHODS = [
    ("standard", "greedy"),
    ("standard", "probabilistic"),
    ("block", "greedy"),
    ("block", "probabilistic"),
    ("match", "greedy"),
    ("match", "probabilistic"),
    ("coupled", "probabilistic"),
]


def requests() -> list[tuple[str, list[int], SamplingParameters]]:
    """Settings take turns, so every batch mixes them."""
    return [
        (
            name,
            [(index + turn) % VOCAB, (3 * turn) % VOCAB],
            SamplingParameters(max_tokens=NUM_TOKENS, seed=9000 + 100 * index + turn, ignore_eos=True, **changes),
        )
        for turn in range(PER_SETTING)
        for index, (name, changes) in enumerate(SETTINGS.items())
    ]


def run(
    verify_method: str = "standard",
    draft_method: str | None = "probabilistic",
    corrupt: Callable[[Proposal], Proposal] | None = None,
) -> tuple[dict[str, list[RequestResult]], Engine]:
    """All requests, by setting; `draft_method` None decodes plainly."""
    target = table_target(TABLE, tokenizer=TOKENIZER)
    settings = EngineSettings(max_num_seqs=NUM_SLOTS, max_model_len=NUM_TOKENS + 8, verify_method=verify_method)
    proposer = None
    if draft_method is not None:
        contract = tiny_drafter_contract(target.contract)
        proposer = TableProposer(
            DRAFTS, contract, method=draft_method, corrupt=corrupt, is_coupled=verify_method == "coupled"
        )
    engine = Engine(target, None, settings, proposer=proposer)
    asked = requests()
    found: dict[str, list[RequestResult]] = defaultdict(list)
    for (name, _, _), result in zip(
        asked, engine.generate([prompt for _, prompt, _ in asked], [sampling for _, _, sampling in asked]), strict=True
    ):
        found[name].append(result)
    return found, engine


@functools.cache
def sound(verify_method: str, draft_method: str | None) -> tuple[dict[str, list[RequestResult]], Engine]:
    return run(verify_method, draft_method)


def next_probabilities(text: Sequence[int], start: int, sampling: SamplingParameters) -> np.ndarray:
    """The exact distribution of the token after a text whose output begins at `start`."""
    wishes = Wishes(
        prompt=tuple(text[:start]),
        output=tuple(text[start:]),
        allowed=None if sampling.allowed_token_ids is None else frozenset(sampling.allowed_token_ids),
        bias=dict(sampling.bias_pairs),
        stop_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        repetition=sampling.repetition_penalty,
        frequency=sampling.frequency_penalty,
        presence=sampling.presence_penalty,
        bad_words=tuple(tuple(TOKENIZER.encode(word)) for word in sampling.bad_words),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    _, ruled = slow_rules(TABLE[text[-1]].tolist(), 0, (), wishes)
    z = np.array(slow_processed(ruled, wishes)[0])
    p: np.ndarray = np.exp(z - z.max())
    return p / p.sum()


def p_value(results: list[RequestResult], sampling: SamplingParameters) -> float:
    """Chi-square of next-token counts by the token before; a hit on an impossible token is a plain no."""
    excess, expected = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    covariance = np.zeros((VOCAB, VOCAB, VOCAB))
    for result in results:
        text = [*result.prompt_ids, *result.token_ids]
        start = len(result.prompt_ids)
        for place in range(start, len(text)):
            before, token = text[place - 1], text[place]
            p = next_probabilities(text[:place], start, sampling)
            if p[token] == 0:
                return 0.0
            excess[before] -= p
            excess[before, token] += 1
            expected[before] += p
            covariance[before] += np.diag(p) - np.outer(p, p)
    statistic, freedom = 0.0, 0
    for state in range(VOCAB):
        common = expected[state] >= 5
        if common.sum() < 2:
            continue
        merge = np.vstack([np.eye(VOCAB)[common], (~common).astype(float)])
        part, spread = merge @ excess[state], merge @ covariance[state] @ merge.T
        rank = int(np.linalg.matrix_rank(spread, tol=1e-6))
        statistic += float(part @ np.linalg.pinv(spread, rcond=1e-9) @ part)
        freedom += rank
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0


def worst(found: dict[str, list[RequestResult]]) -> dict[str, float]:
    """The p-value of each setting that samples."""
    return {
        name: p_value(results, SamplingParameters(max_tokens=NUM_TOKENS, **SETTINGS[name]))
        for name, results in found.items()
        if name != "greedy"
    }


def test_plain_decoding_follows_the_formula() -> None:
    assert min(worst(sound("standard", None)[0]).values()) > ALPHA


@pytest.mark.parametrize(("verify_method", "draft_method"), METHODS)
def test_every_method_follows_the_formula(verify_method: str, draft_method: str) -> None:
    found, engine = sound(verify_method, draft_method)
    values = worst(found)
    assert {name: value for name, value in values.items() if value < ALPHA} == {}
    assert engine.stats().num_accepted > 1000, "drafts were of use, or nothing was tried"
    assert engine.stats().num_impossible_drafts == 0
    held = found["held"]
    assert all(STOP_ID not in result.token_ids[: NUM_TOKENS - 8] for result in held)
    assert any(result.finish_reason == "stop" for result in held)


@pytest.mark.parametrize(("verify_method", "draft_method"), METHODS)
def test_greedy_requests_beside_sampled_ones_are_as_in_plain_decoding(verify_method: str, draft_method: str) -> None:
    """P26, and an L3 check at the same time."""
    plain = [result.token_ids for result in sound("standard", None)[0]["greedy"]]
    assert [result.token_ids for result in sound(verify_method, draft_method)[0]["greedy"]] == plain


@pytest.mark.parametrize(
    ("verify_method", "draft_method"), [pair for pair in METHODS if pair[0] in ("match", "coupled")]
)
def test_methods_that_compare_tokens_give_the_text_of_plain_decoding(verify_method: str, draft_method: str) -> None:
    """L4: same seed, same text, with or without drafts."""
    plain, found = sound("standard", None)[0], sound(verify_method, draft_method)[0]
    for name, results in plain.items():
        assert [result.token_ids for result in found[name]] == [result.token_ids for result in results], name


def test_ratio_methods_give_another_text() -> None:
    """Else the test above would show nothing."""
    plain, found = sound("standard", None)[0], sound("standard", "probabilistic")[0]
    pairs = zip(plain["plain"], found["plain"], strict=True)
    assert all(one.token_ids != other.token_ids for one, other in pairs)


# Planted faults


def flat_q(proposal: Proposal) -> Proposal:
    """Drawn from one distribution, reported as another."""
    if proposal.log_q_BKC is None:
        return proposal
    return proposal._replace(log_q_BKC=torch.full_like(proposal.log_q_BKC, -math.log(VOCAB)))


@pytest.mark.parametrize("verify_method", ["standard", "block"])
def test_a_wrong_q_is_found(verify_method: str) -> None:
    assert min(worst(run(verify_method, "probabilistic", flat_q)[0]).values()) < ALPHA


@pytest.mark.parametrize("verify_method", ["match", "coupled"])
def test_a_wrong_q_does_not_matter_where_tokens_are_compared(verify_method: str) -> None:
    found, plain = run(verify_method, "probabilistic", flat_q)[0], sound("standard", None)[0]
    for name, results in plain.items():
        assert [result.token_ids for result in found[name]] == [result.token_ids for result in results]


@pytest.mark.parametrize("verify_method", ["standard", "match"])
def test_rules_without_the_drafts_before_a_row_are_found(verify_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P31: every row of a block gets the history of its first."""
    apply_rules = target_distribution.apply_token_rules

    def forgetful(logits_BLV: Any, draft_ids_BK: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return apply_rules(logits_BLV, torch.full_like(draft_ids_BK, -1), *arguments, **options)

    monkeypatch.setattr(target_distribution, "apply_token_rules", forgetful)
    assert worst(run(verify_method, "greedy")[0])["repeated"] < ALPHA, "drafts complete bad words"


def test_a_temperature_applied_twice_is_found() -> None:
    """P9, on the test's own side: the same texts against the formula at T squared."""
    found = sound("standard", "probabilistic")[0]["truncated"]
    twice = SamplingParameters(max_tokens=NUM_TOKENS, **SETTINGS["truncated"] | {"temperature": 0.49})
    assert p_value(found, twice) < ALPHA


# Acceptance


def test_block_verification_accepts_at_least_as_much_as_standard() -> None:
    """Two symbols, p = (1/3, 2/3), q = (2/3, 1/3), four drafts: 130/81 and 166/81 accepted per step."""
    num_drafts, vocab_size = 4, 2
    target = table_target(torch.tensor([[1 / 3, 2 / 3]] * vocab_size).log())
    q = torch.tensor([2 / 3, 1 / 3]).log().expand(vocab_size, num_drafts, vocab_size)
    lengths = {}
    for verify_method in ("standard", "block"):
        proposer = TableProposer(q, tiny_drafter_contract(target.contract), method="probabilistic")
        settings = EngineSettings(max_num_seqs=64, max_model_len=208, verify_method=verify_method)
        engine = Engine(target, None, settings, proposer=proposer)
        each = [SamplingParameters(max_tokens=200, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(64)]
        results = engine.generate([[0]] * 64, each)
        # The last step of a text is cut by the budget.
        whole = itertools.chain.from_iterable(result.trace.records[:-1] for result in results)
        lengths[verify_method] = AcceptanceSummary.from_steps(whole).verified_acceptance_length
    assert lengths["block"] > lengths["standard"]
    assert lengths["standard"] == pytest.approx(1 + 130 / 81, abs=0.06)
    assert lengths["block"] == pytest.approx(1 + 166 / 81, abs=0.06)
