"""Whole texts, step after step: a step after a refusal drafts later positions anew, under the same seed.

A worked chain of three symbols; many requests decode as one batch, each at its own pace. What is counted is a fixed
number of tokens per request, so nothing is conditioned on how many a step emitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from scipy.stats import chi2
from tests.unit.ops.enumeration import START, THREE_SYMBOLS, Row
from torch import Tensor

from paceline.ops import acceptance, noise
from paceline.ops.sample_tokens import NO_TOKEN, sample_tokens
from paceline.ops.verify_block import VERIFY_METHODS, VerifyMethod, verify_block

K, LENGTH, NUM_REQUESTS = 3, 16, 40_000
ALPHA = 1e-6


def logs(table: Mapping[int, Row]) -> Tensor:
    """One row per token, the start's last, so that -1 finds it."""
    return torch.tensor([[float(x) for x in table[a]] for a in (*range(3), START)]).log()


@dataclasses.dataclass(frozen=True)
class Tables:
    """Log-probabilities after each token."""

    log_p: Tensor
    log_q: Tensor


WORKED = Tables(logs(THREE_SYMBOLS.p), logs(THREE_SYMBOLS.q))
# p and q far apart, so that much of a text is drafted more than once.
P_WEIGHTS = [[16, 16, 9], [64, 16, 49], [100, 16, 81], [1, 25, 16]]
Q_WEIGHTS = [[9, 36, 100], [4, 9, 64], [81, 81, 9], [100, 9, 25]]
FAR_APART = Tables(*(torch.tensor(weights).log().log_softmax(-1) for weights in (P_WEIGHTS, Q_WEIGHTS)))


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How the requests of a batch decode."""

    method: VerifyMethod = "standard"
    is_one_hot: bool = False  # drafts are sampled as ever, but no q is told
    drafts_afresh: bool = True  # the step goes into the draft noise
    drops: bool = False  # some drafts are missing, another number in each step
    temperature: float = 1.0
    seed: int = 0
    tables: Tables = WORKED

    def drafts(self, last: Tensor, seed: Tensor, position: Tensor, step: int) -> Tensor:
        is_coupled = self.method == "coupled"
        contexts = [last]
        for i in range(K):
            contexts.append(
                sample_tokens(
                    self.tables.log_q[contexts[-1]],
                    temperature_R=torch.full(last.shape, self.temperature),
                    seed_R=seed,
                    position_R=position + i,
                    domain=noise.TARGET if is_coupled else noise.DRAFT,
                    step_R=torch.full_like(last, step) if self.drafts_afresh and not is_coupled else None,
                )
            )
        return torch.stack(contexts, dim=1)


def decode(how: Decoding, num_requests: int = NUM_REQUESTS) -> tuple[Tensor, float]:
    """The first tokens of every request, and the mean number of tokens per step."""
    seed = torch.arange(num_requests) * 7919 + how.seed
    tokens = torch.full((num_requests, LENGTH + K + 1), NO_TOKEN)
    length, last = torch.zeros_like(seed), torch.full_like(seed, START)
    num_steps = torch.zeros_like(seed)
    for step in range(LENGTH):  # each step emits at least one token
        contexts = how.drafts(last, seed, 10 + length, step)
        drafts = contexts[:, 1:].clone()
        if how.drops:
            drafts[:, (step * 2) % (K + 1) :] = NO_TOKEN
        q = {
            "candidate_ids_BKC": torch.arange(3).expand(num_requests, K, 3),
            "log_q_BKC": how.tables.log_q[contexts[:, :K]],
        }
        verdict = verify_block(
            drafts,
            how.tables.log_p[contexts],
            temperature_B=torch.full((num_requests,), how.temperature),
            seed_B=seed,
            anchor_position_B=10 + length,
            step_B=torch.full_like(seed, step),
            method=how.method,
            **({} if how.is_one_hot else q),
        )
        emitted = torch.nn.functional.pad(drafts, (0, 1))
        emitted.scatter_(1, verdict.accepted_B.unsqueeze(1), verdict.bonus_ids_B.unsqueeze(1))
        num_steps += length < LENGTH
        for i in range(K + 1):
            place = (length + i).clamp(max=LENGTH + K).unsqueeze(1)
            is_new = (verdict.accepted_B >= i).unsqueeze(1)
            tokens.scatter_(1, place, torch.where(is_new, emitted[:, i : i + 1], tokens.gather(1, place)))
        length = (length + verdict.accepted_B + 1).clamp(max=LENGTH)
        last = verdict.bonus_ids_B
    return tokens[:, :LENGTH], LENGTH * num_requests / num_steps.sum().item()


def plain(how: Decoding, num_requests: int) -> Tensor:
    """The same requests without any draft."""
    seed = torch.arange(num_requests) * 7919 + how.seed
    last, tokens = torch.full_like(seed, START), []
    for i in range(LENGTH):
        temperature_R = torch.full(last.shape, how.temperature)
        last = sample_tokens(
            how.tables.log_p[last], temperature_R=temperature_R, seed_R=seed, position_R=torch.full_like(seed, 10 + i)
        )
        tokens.append(last)
    return torch.stack(tokens, dim=1)


def transitions(tokens: Tensor, tables: Tables = WORKED) -> float:
    """p-value of the counts of every pair of neighbours, 6 degrees of freedom."""
    counts = torch.bincount((tokens[:, :-1] * 3 + tokens[:, 1:]).flatten(), minlength=9).view(3, 3).double()
    expected = counts.sum(dim=1, keepdim=True) * tables.log_p[:3].double().exp()
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum().item(), 6))


def beginnings(tokens: Tensor) -> float:
    """p-value of the joint of the first five tokens."""
    p = WORKED.log_p.double().exp()
    joint = p[START]
    index = tokens[:, 0]
    for i in range(1, 5):
        joint = (joint.view(-1, 3, 1) * p[:3]).flatten()
        index = index * 3 + tokens[:, i]
    expected = joint * len(tokens)
    counts = torch.bincount(index, minlength=len(joint)).double()
    is_large = expected >= 5
    statistic = ((counts - expected) ** 2 / expected)[is_large].sum().item()
    return float(chi2.sf(statistic, int(is_large.sum()) - 1))


@pytest.mark.parametrize("is_one_hot", [False, True])
@pytest.mark.parametrize("method", VERIFY_METHODS)
def test_texts_follow_the_target(method: VerifyMethod, is_one_hot: bool) -> None:
    tokens, _ = decode(Decoding(method, is_one_hot))
    assert transitions(tokens) >= ALPHA and beginnings(tokens) >= ALPHA


def test_block_emits_at_least_as_many_tokens_per_step() -> None:
    means = {method: decode(Decoding(method), 20_000)[1] for method in VERIFY_METHODS}
    assert means["block"] > means["standard"] + 0.05
    assert means["coupled"] > means["match"] + 0.5


def reuse_uniforms(patch: pytest.MonkeyPatch) -> None:
    sound = acceptance.log_acceptance_uniforms
    patch.setattr(
        acceptance, "log_acceptance_uniforms", lambda seed, step, *rest: sound(seed, torch.zeros_like(step), *rest)
    )


@pytest.mark.parametrize("fault", ["none", "uniforms by position alone", "draft noise by position alone"])
def test_block_needs_the_step_in_its_noise(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that looked at refused drafts is repeated where the same randomness comes back."""
    if fault == "uniforms by position alone":
        reuse_uniforms(monkeypatch)
    how = Decoding("block", drafts_afresh=fault != "draft noise by position alone", tables=FAR_APART)
    assert (transitions(decode(how)[0], FAR_APART) >= ALPHA) == (fault == "none")


def test_standard_does_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reuse_uniforms(monkeypatch)
    tokens, _ = decode(Decoding("standard", drafts_afresh=False, tables=FAR_APART))
    assert transitions(tokens, FAR_APART) >= ALPHA


@pytest.mark.parametrize("method", ["match", "coupled"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("drops", [False, True])
def test_equality_gives_the_text_of_plain_decoding(method: VerifyMethod, temperature: float, drops: bool) -> None:
    how = Decoding(method, temperature=temperature, drops=drops, seed=3)
    assert torch.equal(decode(how, 300)[0], plain(how, 300))
    changed = decode(dataclasses.replace(how, seed=4), 300)[0]
    assert torch.equal(changed, plain(how, 300)) == (temperature == 0.0)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_ratios_give_another_text_of_the_same_distribution(method: VerifyMethod) -> None:
    how = Decoding(method, seed=3)
    assert not torch.equal(decode(how, 300)[0], plain(how, 300))
    greedy = Decoding(method, temperature=0.0, drops=True)
    assert torch.equal(decode(greedy, 50)[0], plain(greedy, 50))
