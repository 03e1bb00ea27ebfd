"""Does verification leave the target's distribution alone? Chi-square tests, and planted faults that they catch.

The vocabulary is tiny; target and drafter are random tables, in which the next token depends on the last one. 200,000
requests are judged as one batch. Seeds are fixed, so a pass stays a pass; each check has a fault that it has to find.
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

from paceline.ops import acceptance, noise
from paceline.ops.acceptance import residual_log_weights
from paceline.ops.sample_tokens import sample_tokens
from paceline.ops.target_distribution import process_logits
from paceline.ops.verify_block import VerifyMethod, verify_block

K, N = 3, 200_000
START = -1  # the last row of the tables stands for the anchor
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
    method: VerifyMethod = "standard"
    vocab_size: int = 8
    tells: str = "the truth"  # or "a uniform", "bfloat16", "another row"
    redraws: bool = False  # a refused draft is replaced by a fresh draw of p
    num_requests: int = N


@dataclass(frozen=True)
class Outcome:
    tokens: torch.Tensor  # [N, K + 1], completed from the exact target
    drafts: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor
    p: torch.Tensor  # [V + 1, V], float64
    q: torch.Tensor  # the distribution that drafts were drawn from
    method: VerifyMethod


def draw_tables(setup: Setup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(setup.tables)
    V = setup.vocab_size
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


def told_log_q(setup: Setup, scores: torch.Tensor) -> torch.Tensor:
    """What the drafter says that it drew from; one row per context."""
    log_q = (scores / (setup.told_temperature or setup.temperature)).log_softmax(-1)
    if setup.tells == "a uniform":
        return torch.zeros_like(log_q).log_softmax(-1)
    if setup.tells == "bfloat16":  # of scores around 18, whose last digit is an eighth
        return ((scores + 18).bfloat16().float() / setup.temperature).log_softmax(-1)
    return log_q.roll(1, 0) if setup.tells == "another row" else log_q


def keys_of(setup: Setup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeds, anchor positions and steps."""
    counter = torch.arange(setup.num_requests)
    seed = counter * 7919 if setup.vary == "seed" else torch.full_like(counter, 20240607)
    anchor = torch.full_like(counter, 4000) if setup.vary == "seed" else counter * (K + 1)
    return seed, anchor, torch.full_like(counter, 5)


def run(setup: Setup) -> Outcome:
    processed, drafter, candidates = draw_tables(setup)
    scores = drafter.gather(1, candidates)
    log_q, told = (scores / setup.temperature).log_softmax(-1), told_log_q(setup, scores)
    dense_log_q = torch.full(drafter.shape, -torch.inf).scatter(1, candidates, log_q)
    is_argmax = setup.draft == "one-hot"
    seed, anchor, step = keys_of(setup)
    domain = noise.TARGET if setup.method == "coupled" else setup.draft_domain
    context = [torch.full_like(seed, START)]
    for i in range(K):
        context.append(
            sample_tokens(
                dense_log_q[context[-1]],
                temperature_R=torch.full(seed.shape, 0.0 if is_argmax else setup.temperature),
                seed_R=seed,
                position_R=anchor + i,
                domain=domain,
                step_R=None if domain == noise.TARGET else step,
            )
        )
    rows = torch.stack(context, dim=1)
    drafts = rows[:, 1:]
    q_arguments: dict[str, Any] = {}
    if setup.draft in ("full", "few"):
        q_arguments = {"candidate_ids_BKC": candidates[rows[:, :K]], "log_q_BKC": told[rows[:, :K]]}
    keys: dict[str, Any] = {
        "temperature_B": torch.full(seed.shape, setup.temperature),
        "seed_B": seed,
        "anchor_position_B": anchor,
        "step_B": step,
        "method": setup.method,
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
    bonus = verdict.bonus_ids_B
    if setup.redraws:
        stop_rows = logits.gather(1, accepted.view(-1, 1, 1).expand(-1, 1, logits.shape[2])).squeeze(1)
        bonus = sample_tokens(
            stop_rows, temperature_R=torch.ones(seed.shape), seed_R=seed + 1, position_R=anchor + accepted
        )
    p = processed.double().softmax(-1)
    tokens = complete(drafts, accepted, bonus, p)
    q = dense_log_q.double().exp()
    if is_argmax:
        q = torch.nn.functional.one_hot(dense_log_q.argmax(-1), q.shape[1]).double()
    return Outcome(tokens, drafts, accepted, bonus, p, q, setup.method)


def complete(drafts: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(99)
    upper_edges = p.cumsum(-1)
    upper_edges[:, -1] = 1.0
    last, tokens = torch.full_like(bonus, START), []
    for i in range(K + 1):
        spot = torch.rand(len(bonus), 1, generator=generator, dtype=torch.float64)
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


def counts(vocab_size: int, *columns: torch.Tensor) -> torch.Tensor:
    index = torch.zeros_like(columns[0])
    for column in columns:
        index = index * vocab_size + column
    return torch.bincount(index, minlength=vocab_size ** len(columns))


def first_token(outcome: Outcome) -> float:
    return p_value(counts(outcome.p.shape[1], outcome.tokens[:, 0]), outcome.p[START])


def first_two(outcome: Outcome) -> float:
    joint = outcome.p[START].unsqueeze(1) * outcome.p[:-1]
    return p_value(counts(outcome.p.shape[1], outcome.tokens[:, 0], outcome.tokens[:, 1]), joint)


def last_two(outcome: Outcome) -> float:
    before = outcome.p[START] @ outcome.p[:-1] @ outcome.p[:-1]
    joint = before.unsqueeze(1) * outcome.p[:-1]
    return p_value(counts(outcome.p.shape[1], outcome.tokens[:, 2], outcome.tokens[:, 3]), joint)


def after_refusal(outcome: Outcome) -> float:
    """The smallest p-value, corrected for their number, of the emitted token given that draft x was refused at 0.

    For `standard` alone: `block` refuses for what comes later, too.
    """
    log_p, q = outcome.p[START].log(), outcome.q[START]
    values = []
    for x in range(len(q)):
        is_refused = (outcome.accepted == 0) & (outcome.drafts[:, 0] == x)
        if is_refused.sum() < 1000:
            continue
        residual = residual_log_weights(log_p, q.log()).exp()
        values.append(p_value(counts(len(q), outcome.bonus[is_refused]), residual))
    return min(1.0, min(values) * len(values))


CHECKS = {"first token": first_token, "first two": first_two, "last two": last_two}


def mean_rates(outcome: Outcome, is_one_hot: bool) -> list[float]:
    """The exact share of requests that keep more than i drafts."""
    p, q = outcome.p, outcome.q
    if outcome.method == "block" and not is_one_hot:
        return block_rates(p, q)
    survives = q * (p / q).clamp(max=1).nan_to_num(0.0)
    if is_one_hot or outcome.method == "match":
        survives = q * p
    elif outcome.method == "coupled":  # x is kept with 1 / sum over y of max(p_y / p_x, q_y / q_x)
        ratios = torch.maximum(p.unsqueeze(1) / p.unsqueeze(2), q.unsqueeze(1) / q.unsqueeze(2))
        survives = torch.where((p > 0) & (q > 0), 1 / ratios.nan_to_num(0.0, posinf=torch.inf).sum(-1), 0.0)
    reached, rates = survives[START], []
    for _ in range(K):
        rates.append(reached.sum().item())
        reached = reached @ survives[:-1]
    return rates


def block_rates(p: torch.Tensor, q: torch.Tensor) -> list[float]:
    """At least i drafts of a block are kept with probability pi_i, whatever they are."""
    drawn, weight, before = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), torch.tensor([-1])
    rates = []
    for _ in range(K):
        weight = (weight.unsqueeze(1) * (p / q).nan_to_num(0.0, posinf=0.0)[before]).clamp(max=1).flatten()
        drawn = (drawn.unsqueeze(1) * q[before]).flatten()
        before = torch.arange(q.shape[1]).repeat(len(before))
        rates.append((drawn * weight).sum().item())
    return rates


def acceptance_errors(outcome: Outcome, is_one_hot: bool) -> list[float]:
    """How many standard errors each position's accepted count lies from its exact expectation."""
    errors = []
    num_requests = len(outcome.accepted)
    for position, rate in enumerate(mean_rates(outcome, is_one_hot)):
        observed = (outcome.accepted > position).sum().item()
        errors.append((observed - num_requests * rate) / math.sqrt(num_requests * rate * (1 - rate)))
    return errors


def describe(setup: Setup) -> str:
    return f"{setup.method}-{setup.draft}-{setup.temperature}-{setup.vary}-{setup.vocab_size}"


def configurations() -> list[Any]:
    """All temperatures, drafts and ways to vary the key; the second way of a pair is slow except at temperature 1."""
    usual = {"full": "position", "few": "seed", "one-hot": "seed", "hidden": "position"}
    found = []
    for temperature in (0.5, 1.0, 1.5):
        for draft in usual:
            for vary in ("seed", "position"):
                marks = [] if temperature == 1.0 or vary == usual[draft] else [pytest.mark.slow]
                setup = Setup(temperature=temperature, draft=draft, vary=vary, tables=int(temperature * 10))
                found.append(pytest.param(setup, marks=marks))
    return found


def other_methods() -> list[Any]:
    """Each method with the proposals that it treats differently; match and coupled never look at q."""
    drafts: dict[VerifyMethod, dict[str, str]] = {
        "block": {"full": "seed", "few": "position", "one-hot": "seed"},
        "match": {"hidden": "position", "one-hot": "seed"},
        "coupled": {"full": "position", "few": "seed"},
    }
    found = []
    for method, ways in drafts.items():
        for temperature in (0.5, 1.0, 1.5):
            for draft, vary in ways.items():
                marks = [pytest.mark.slow] if temperature == 1.5 else []
                setup = Setup(temperature, draft, vary, tables=int(temperature * 10), method=method)
                found.append(pytest.param(setup, marks=marks))
    wide = [replace(setup.values[0], vocab_size=16) for setup in found if setup.values[0].temperature == 1.0]
    return found + wide + [Setup(vocab_size=16)]


@pytest.mark.parametrize("setup", configurations() + other_methods(), ids=describe)
def test_output_follows_the_target(setup: Setup) -> None:
    outcome = run(setup)
    assert {name: value for name, check in CHECKS.items() if (value := check(outcome)) < ALPHA} == {}
    if setup.draft in ("full", "few") and setup.method == "standard":
        assert after_refusal(outcome) >= ALPHA
    assert max(map(abs, acceptance_errors(outcome, setup.draft in ("one-hot", "hidden")))) < 5


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


def residual_of_standard(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    accepted_B, log_pi_B = acceptance_count_by_ratio(*arguments)
    return accepted_B, torch.zeros_like(log_pi_B)


acceptance_count_by_ratio = acceptance.count_by_ratio
BLOCK = Setup(method="block")
Check = Callable[[Outcome], float]
FAULTS: dict[str, tuple[Setup, tuple[object, str, object] | None, Check]] = {
    "residual drawn from p": (Setup(), (acceptance, "residual_log_weights", residual_from_p), first_token),
    "one-hot residual keeps x": (
        Setup(draft="one-hot"),
        (acceptance, "one_hot_residual", keep_the_refused),
        first_token,
    ),
    "everything accepted": (Setup(), (acceptance, "accepts_draft", accept_all), first_token),
    "draft shares the target's noise": (Setup(draft_domain=noise.TARGET), None, after_refusal),
    "u is a word of the draft noise": (Setup(), (noise, "ACCEPT", noise.DRAFT), first_two),
    "q told at another temperature": (Setup(temperature=0.5, told_temperature=1.0), None, first_token),
    "q never written": (Setup(tells="a uniform"), None, first_token),
    "q told in bfloat16": (Setup(tables=3, tells="bfloat16"), None, first_two),
    "q of another row": (Setup(tells="another row"), None, first_two),
    "q of another row, block": (replace(BLOCK, tells="another row"), None, first_two),
    "block stops at the first failure": (BLOCK, (acceptance, "count_to_last", acceptance.count_leading), first_token),
    "block draws standard's residual": (
        replace(BLOCK, tables=3, top_p=1.0),
        (acceptance, "count_by_ratio", residual_of_standard),
        first_two,
    ),
    "block: u is a word of the draft noise": (BLOCK, (noise, "ACCEPT", noise.DRAFT), first_two),
    "block shares the target's noise": (replace(BLOCK, draft_domain=noise.TARGET), None, first_token),
    "match draws afresh": (Setup(draft="hidden", method="match", redraws=True), None, first_token),
    "coupled draws afresh": (Setup(method="coupled", redraws=True), None, first_token),
    "first draft never judged": (Setup(unverified_first=True), None, first_token),
    "first draft never judged, one-hot": (Setup(draft="one-hot", unverified_first=True), None, first_token),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, patch, check = FAULTS[name]
    truth: dict[str, Any] = {"told_temperature": None, "tells": "the truth", "draft_domain": noise.DRAFT}
    sound = replace(setup, unverified_first=False, redraws=False, **truth)
    assert check(run_sound(sound)) >= ALPHA
    if patch is not None:
        monkeypatch.setattr(*patch)
    num_requests = N if setup.tells == "bfloat16" else N // 4  # all but the mildest fault show in fewer, too
    assert check(run(replace(setup, num_requests=num_requests))) < ALPHA


def test_wasteful_acceptance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging sampled drafts as one-hot is lossless; only the acceptance counts can tell."""
    outcome = run(Setup(draft="hidden"))
    assert first_two(outcome) >= ALPHA
    assert abs(acceptance_errors(outcome, is_one_hot=False)[0]) > 5


def test_the_chi_square_of_this_file_knows_a_worked_example() -> None:
    observed, p = torch.tensor([5210, 2930, 1390, 470]), torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert p_value(observed, p) == pytest.approx(1.46e-4, rel=0.01)
    assert p_value(torch.tensor([10, 1]), torch.tensor([1.0, 0.0])) == 0.0
