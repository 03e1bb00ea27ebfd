"""Does verification leave the target's distribution alone? Chi-square tests, and planted faults that they catch.

The vocabulary is tiny; target and drafter are random tables, in which the next token depends on the last one. 200,000
requests are judged as one batch.
Whatever a step did not emit is drawn from the exact target, so that joints can be tested without conditioning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from paceline.ops import noise
from paceline.ops import verify_block as module
from paceline.ops.sample_tokens import sample_tokens
from paceline.ops.target_distribution import process_logits
from paceline.ops.verify_block import residual_log_weights, verify_block

V, K, N = 8, 3, 200_000
START = V  # row of the tables that stands for the anchor
ALPHA = 1e-6


@dataclass(frozen=True)
class Setup:
    """One configuration; `draw_temperature` is what the drafter samples with, `told_temperature` what it reports."""

    temperature: float = 1.0
    draft: str = "full"  # full: q on all ids; few: q on five ids; one-hot: argmax; hidden: sampled, judged as one-hot
    vary: str = "seed"
    top_p: float = 0.9
    top_k: int = 0
    told_temperature: float | None = None
    draft_domain: int = noise.DRAFT
    tables: int = 1
    unverified_first: bool = False


@dataclass(frozen=True)
class Outcome:
    tokens: torch.Tensor  # [N, K + 1], completed from the exact target
    drafts: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor
    p: torch.Tensor  # [V + 1, V], float64
    q: torch.Tensor  # the distribution that drafts were drawn from


def draw_tables(setup: Setup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(setup.tables)
    target = torch.randn(V + 1, V, generator=generator) * 1.2
    drafter = target * 0.6 + torch.randn(V + 1, V, generator=generator) * 0.9
    processed = process_logits(
        target,
        temperature_R=torch.full((V + 1,), setup.temperature),
        top_k_R=torch.full((V + 1,), setup.top_k),
        top_p_R=torch.full((V + 1,), setup.top_p),
        min_p_R=torch.zeros(V + 1),
    )
    if setup.draft == "few":
        candidates = torch.stack([torch.randperm(V, generator=generator)[:5] for _ in range(V + 1)])
    else:
        candidates = torch.arange(V).expand(V + 1, V)
    return processed, drafter, candidates


@functools.lru_cache(maxsize=4)
def run_sound(setup: Setup) -> Outcome:
    return run(setup)


def run(setup: Setup) -> Outcome:
    processed, drafter, candidates = draw_tables(setup)
    log_q = (drafter.gather(1, candidates) / setup.temperature).log_softmax(-1)
    told = (drafter.gather(1, candidates) / (setup.told_temperature or setup.temperature)).log_softmax(-1)
    dense_log_q = torch.full((V + 1, V), -torch.inf).scatter(1, candidates, log_q)
    is_argmax = setup.draft == "one-hot"
    counter = torch.arange(N)
    seed = counter * 7919 if setup.vary == "seed" else torch.full_like(counter, 20240607)
    anchor = torch.full_like(counter, 4000) if setup.vary == "seed" else counter * (K + 1)
    step = torch.full_like(counter, 5)
    context = [torch.full_like(counter, START)]
    for i in range(K):
        context.append(
            sample_tokens(
                dense_log_q[context[-1]],
                temperature_R=torch.full((N,), 0.0 if is_argmax else setup.temperature),
                seed_R=seed,
                position_R=anchor + i,
                domain=setup.draft_domain,
                step_R=None if setup.draft_domain == noise.TARGET else step,
            )
        )
    rows = torch.stack(context, dim=1)
    drafts = rows[:, 1:]
    q_arguments: dict[str, Any] = {}
    if setup.draft in ("full", "few"):
        q_arguments = {"candidate_ids_BKC": candidates[rows[:, :K]], "log_q_BKC": told[rows[:, :K]]}
    keys = {
        "temperature_B": torch.full((N,), setup.temperature),
        "seed_B": seed,
        "anchor_position_B": anchor,
        "step_B": step,
    }
    logits = processed[rows]
    if setup.unverified_first:  # draft i + 1 is held against row i
        shifted = {name: value[:, 1:] for name, value in q_arguments.items()}
        verdict = verify_block(drafts[:, 1:], logits[:, :K], **keys, **shifted)
        accepted = verdict.accepted_B + 1
    else:
        verdict = verify_block(drafts, logits, **keys, **q_arguments)
        accepted = verdict.accepted_B
        assert verdict.num_zero_q_B.sum().item() == 0
    p = processed.double().softmax(-1)
    tokens = complete(drafts, accepted, verdict.bonus_ids_B, p)
    q = torch.nn.functional.one_hot(dense_log_q.argmax(-1), V).double() if is_argmax else dense_log_q.double().exp()
    return Outcome(tokens, drafts, accepted, verdict.bonus_ids_B, p, q)


def complete(drafts: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    upper_edges = p.cumsum(-1)
    upper_edges[:, -1] = 1.0
    last, tokens = torch.full_like(bonus, START), []
    for i in range(K + 1):
        spot = torch.rand(N, 1, generator=generator, dtype=torch.float64)
        drawn = (upper_edges[last] <= spot).sum(-1)
        drafted = drafts[:, i] if i < K else bonus
        last = torch.where(i < accepted, drafted, torch.where(accepted == i, bonus, drawn))
        tokens.append(last)
    return torch.stack(tokens, dim=1)


def p_value(observed: torch.Tensor, probability: torch.Tensor) -> float:
    """Pearson's chi-square; cells that expect fewer than five are merged, a hit on an impossible cell is a plain no."""
    observed, expected = observed.double().flatten(), probability.double().flatten()
    expected = expected / expected.sum() * observed.sum()
    if observed[expected == 0].sum() > 0:
        return 0.0
    is_small = expected < 5
    observed = torch.cat([observed[~is_small], observed[is_small].sum().view(1)])
    expected = torch.cat([expected[~is_small], expected[is_small].sum().view(1)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor(float(len(expected) - 1), dtype=torch.float64)
    return torch.special.gammaincc(degrees / 2, statistic / 2).item()


def counts(*columns: torch.Tensor) -> torch.Tensor:
    index = torch.zeros_like(columns[0])
    for column in columns:
        index = index * V + column
    return torch.bincount(index, minlength=V ** len(columns))


def first_token(outcome: Outcome) -> float:
    return p_value(counts(outcome.tokens[:, 0]), outcome.p[START])


def first_two(outcome: Outcome) -> float:
    joint = outcome.p[START].unsqueeze(1) * outcome.p[:V]
    return p_value(counts(outcome.tokens[:, 0], outcome.tokens[:, 1]), joint)


def last_two(outcome: Outcome) -> float:
    before = outcome.p[START] @ outcome.p[:V] @ outcome.p[:V]
    return p_value(counts(outcome.tokens[:, 2], outcome.tokens[:, 3]), before.unsqueeze(1) * outcome.p[:V])


def after_refusal(outcome: Outcome) -> float:
    """The smallest p-value, corrected for their number, of the emitted token given that draft x was refused at 0."""
    log_p, q = outcome.p[START].log(), outcome.q[START]
    values = []
    for x in range(V):
        is_refused = (outcome.accepted == 0) & (outcome.drafts[:, 0] == x)
        if is_refused.sum() < 1000:
            continue
        residual = residual_log_weights(log_p, q.log()).exp()
        values.append(p_value(counts(outcome.bonus[is_refused]), residual))
    return min(1.0, min(values) * len(values))


CHECKS = {"first token": first_token, "first two": first_two, "last two": last_two}


def acceptance_errors(outcome: Outcome, is_one_hot: bool) -> list[float]:
    """How many standard errors each position's accepted count lies from its exact expectation."""
    keep = outcome.p if is_one_hot else (outcome.p / outcome.q).clamp(max=1).nan_to_num(0.0)
    survives = outcome.q * keep
    reached, errors = survives[START], []
    for position in range(K):
        rate = reached.sum().item()
        observed = (outcome.accepted > position).sum().item()
        errors.append((observed - N * rate) / math.sqrt(N * rate * (1 - rate)))
        reached = reached @ survives[:V]
    return errors


def configurations() -> list[Any]:
    """All temperatures, drafts and ways to vary the key; the second way of a pair is slow except at temperature 1."""
    usual = {"full": "position", "few": "seed", "one-hot": "seed", "hidden": "position"}
    return [
        pytest.param(
            temperature, draft, vary, marks=[] if temperature == 1.0 or vary == usual[draft] else [pytest.mark.slow]
        )
        for temperature in (0.5, 1.0, 1.5)
        for draft in usual
        for vary in ("seed", "position")
    ]


@pytest.mark.parametrize(("temperature", "draft", "vary"), configurations())
def test_output_follows_the_target(temperature: float, draft: str, vary: str) -> None:
    outcome = run(Setup(temperature=temperature, draft=draft, vary=vary, tables=int(temperature * 10)))
    assert {name: value for name, check in CHECKS.items() if (value := check(outcome)) < ALPHA} == {}
    if draft in ("full", "few"):
        assert after_refusal(outcome) >= ALPHA
    assert max(map(abs, acceptance_errors(outcome, draft in ("one-hot", "hidden")))) < 5


def test_top_k_and_top_p_together() -> None:
    """The reported bias: drafts drawn without truncation, judged by a truncated target."""
    outcome = run(Setup(temperature=0.7, top_p=0.9, top_k=5, tables=3))
    assert min(check(outcome) for check in CHECKS.values()) >= ALPHA
    assert max(map(abs, acceptance_errors(outcome, is_one_hot=False))) < 5


def residual_from_p(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return log_p


def keep_the_refused(logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    return logits


def accept_all(log_p: torch.Tensor, log_q: torch.Tensor, log_u: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(log_p, dtype=torch.bool)


Check = Callable[[Outcome], float]
FAULTS: dict[str, tuple[Setup, tuple[object, str, object] | None, Check]] = {
    "residual drawn from p": (Setup(), (module, "residual_log_weights", residual_from_p), first_token),
    "one-hot residual keeps x": (Setup(draft="one-hot"), (module, "one_hot_residual", keep_the_refused), first_token),
    "everything accepted": (Setup(), (module, "accepts_draft", accept_all), first_token),
    "draft shares the target's noise": (Setup(draft_domain=noise.TARGET), None, after_refusal),
    "u is a word of the draft noise": (Setup(), (noise, "ACCEPT", noise.DRAFT), first_two),
    "q told at another temperature": (Setup(temperature=0.5, told_temperature=1.0), None, first_token),
    "first draft never judged": (Setup(unverified_first=True), None, first_token),
    "first draft never judged, one-hot": (Setup(draft="one-hot", unverified_first=True), None, first_token),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, patch, check = FAULTS[name]
    sound = replace(setup, told_temperature=None, draft_domain=noise.DRAFT, unverified_first=False)
    assert check(run_sound(sound)) >= ALPHA
    if patch is not None:
        monkeypatch.setattr(*patch)
    assert check(run(setup)) < ALPHA


def test_wasteful_acceptance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging sampled drafts as one-hot is lossless; only the acceptance counts can tell."""
    outcome = run(Setup(draft="hidden"))
    assert first_two(outcome) >= ALPHA
    assert abs(acceptance_errors(outcome, is_one_hot=False)[0]) > 5


@pytest.mark.parametrize("is_full_q", [True, False])
def test_steps_that_draft_a_position_again_keep_the_joint(is_full_q: bool) -> None:
    """Whole chains: a step after a refusal drafts later positions anew, under the same seed."""
    processed, drafter, _ = draw_tables(Setup())
    log_q = drafter.log_softmax(-1)
    counter = torch.arange(N)
    tokens = torch.full((N, 3 + K + 1), -1)
    length, last = torch.zeros_like(counter), torch.full_like(counter, START)
    ones = torch.ones(N)
    for step in range(3):
        step_B, position = torch.full_like(counter, step), 10 + length
        rows = [last]
        for i in range(K):
            draw = {"seed_R": counter, "position_R": position + i, "domain": noise.DRAFT, "step_R": step_B}
            rows.append(sample_tokens(log_q[rows[-1]], temperature_R=ones, **draw))
        contexts = torch.stack(rows, dim=1)
        drafts = contexts[:, 1:]
        q = {"candidate_ids_BKC": torch.arange(V).expand(N, K, V), "log_q_BKC": log_q[contexts[:, :K]]}
        verdict = verify_block(
            drafts,
            processed[contexts],
            temperature_B=ones,
            seed_B=counter,
            anchor_position_B=position,
            step_B=step_B,
            **(q if is_full_q else {}),
        )
        emitted = torch.cat([drafts, drafts[:, :1]], dim=1)
        emitted.scatter_(1, verdict.accepted_B.unsqueeze(1), verdict.bonus_ids_B.unsqueeze(1))
        for i in range(K + 1):
            place = (length + i).clamp(max=tokens.shape[1] - 1).unsqueeze(1)
            is_new = (verdict.accepted_B >= i).unsqueeze(1) & (length + i < tokens.shape[1]).unsqueeze(1)
            tokens.scatter_(1, place, torch.where(is_new, emitted[:, i : i + 1], tokens.gather(1, place)))
        length, last = length + verdict.accepted_B + 1, verdict.bonus_ids_B
    p = processed.double().softmax(-1)
    joint = p[START].view(V, 1, 1) * p[:V].view(V, V, 1) * p[:V].view(1, V, V)
    assert p_value(counts(tokens[:, 0], tokens[:, 1], tokens[:, 2]), joint) >= ALPHA


def test_the_chi_square_of_this_file_knows_a_worked_example() -> None:
    observed, p = torch.tensor([5210, 2930, 1390, 470]), torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert p_value(observed, p) == pytest.approx(1.46e-4, rel=0.01)
    assert p_value(torch.tensor([10, 1]), torch.tensor([1.0, 0.0])) == 0.0
