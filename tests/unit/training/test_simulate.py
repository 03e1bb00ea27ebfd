"""Simulated acceptance: the walk, per-conversation sums, and the same count as serving token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.models.conftest import CachedContext, drafter_contract, positions_of, randomise, target_contract

from paceline.models.attends import WholeSequence
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.taps import TapCollector
from paceline.models.targets.dense import DenseTarget
from paceline.training.data import Conversations
from paceline.training.features import TargetFeatures
from paceline.training.simulate import Simulation, simulate, walk

VOCAB_SIZE = 4  # three tokens and a mask: even a random drafter is right now and then


def test_the_golden_walk() -> None:
    accepted = [3, 0, 0, 0, 1, 4, 2, 0, 1]
    visited = walk(accepted, 10)
    assert visited == [0, 4, 6]
    assert 9 / len(visited) == 3.0  # tokens after the first, per round
    assert 1 + sum(accepted[i] for i in visited) / len(visited) == 3.0
    assert 1 + float(np.mean(accepted)) == pytest.approx(2.2222, abs=1e-4)  # the all-anchor average is another number


@pytest.mark.parametrize(
    ("accepted", "num_tokens", "visited"), [([], 1, []), ([0], 2, [0]), ([1], 2, [0]), ([], 0, [])]
)
def test_short_responses(accepted: list[int], num_tokens: int, visited: list[int]) -> None:
    assert walk(accepted, num_tokens) == visited


@given(drafts=st.lists(st.integers(0, 5), max_size=30))
def test_a_walk_covers_every_token_exactly_once(drafts: list[int]) -> None:
    num_tokens = len(drafts) + 1
    accepted = [min(kept, len(drafts) - index) for index, kept in enumerate(drafts)]
    visited = walk(accepted, num_tokens)
    covered = []
    for anchor in visited:
        covered += range(anchor + 1, min(anchor + accepted[anchor] + 2, num_tokens))
    assert covered == list(range(1, num_tokens))


def models(layer_windows: tuple[int | None, ...] = (None, None)) -> tuple[DFlashDrafter, DenseTarget]:
    sizes = {"vocab_size": VOCAB_SIZE}
    target = DenseTarget(target_contract(**sizes))
    drafter = DFlashDrafter(
        drafter_contract(
            **sizes,
            draft_vocab_size=VOCAB_SIZE,
            target_vocab_size=VOCAB_SIZE,
            mask_token_id=3,
            layer_windows=layer_windows,
        )
    )
    randomise(target, 0)
    randomise(drafter, 3)
    return drafter.requires_grad_(False), target.requires_grad_(False)


def conversations(*texts: str) -> Conversations:
    """Digits are response tokens, letters a, b, c prompt tokens 0, 1, 2."""
    joined = "".join(texts)
    return Conversations(
        np.array([int(c) if c.isdigit() else ord(c) - ord("a") for c in joined], np.int32),
        np.array([c.isdigit() for c in joined]),
        np.cumsum([0, *map(len, texts)]).astype(np.int64),
    )


@torch.no_grad()
def serve(drafter: DFlashDrafter, target: DenseTarget, tokens: Sequence[int], prompt: int) -> list[int]:
    """Accepted drafts of every step when the target says `tokens`, one context that grows by what was kept."""
    ids = torch.tensor([tokens])
    taps = TapCollector.of_layers(drafter.contract.target_layer_ids)
    target(ids, positions_of(ids), WholeSequence(), taps)
    context, steps, anchor = CachedContext(drafter), [], prompt
    while anchor < len(tokens) - 1:
        context.extend([tap[0, context.length : anchor] for tap in taps.collected()])
        rows = drafter.embed(drafter.block_ids(ids[0, anchor], drafter.contract.num_draft_tokens), target)
        drafts = target.logits(context.draft(rows)[1:]).argmax(-1).tolist()
        kept = 0
        while kept < len(drafts) and anchor + kept + 1 < len(tokens) and drafts[kept] == tokens[anchor + kept + 1]:
            kept += 1
        steps.append(kept)
        anchor += kept + 1
    return steps


def run(drafter: DFlashDrafter, target: DenseTarget, data: Conversations, batch_size: int = 2) -> Simulation:
    features = TargetFeatures(target, drafter.contract.target_layer_ids)
    return simulate(drafter, features, data, batch_size=batch_size, max_length=128, mixed_precision=False)


def random_text(seed: int, prompt: int, response: int) -> str:
    random = np.random.default_rng(seed)
    return "".join(random.choice(list("abc"), prompt)) + "".join(random.choice(list("012"), response))


@pytest.mark.parametrize("layer_windows", [(None, None), (3, None)])
def test_the_simulated_walk_is_what_serving_counts(layer_windows: tuple[int | None, ...]) -> None:
    drafter, target = models(layer_windows)
    texts = [random_text(seed, 3 + seed, 61 - 7 * seed) for seed in range(5)]  # the first one fills its batch's width
    data = conversations(*texts)
    found = run(drafter, target, data)
    steps = [serve(drafter, target, data.select([i]).tokens.tolist(), 3 + i) for i in range(len(texts))]
    flat = [kept for served in steps for kept in served]
    assert sum(flat) > 20  # there is something to count
    assert found.acceptance_length == pytest.approx(1 + sum(flat) / len(flat))
    assert found.per_position == pytest.approx([sum(kept > i for kept in flat) / len(flat) for i in range(3)])
    assert found.per_conversation == tuple((60 - 7 * i, len(served)) for i, served in enumerate(steps))
    for batch_size in (1, 5):
        assert run(drafter, target, data, batch_size) == found


def test_responses_of_one_conversation_are_walked_one_by_one() -> None:
    drafter, target = models()
    for seed in range(4):
        text = random_text(seed, 3, 17) + random_text(seed + 10, 2, 12) + random_text(seed + 20, 1, 9)
        data = conversations(text)
        tokens = data.tokens.tolist()
        first, second, third = (
            serve(drafter, target, tokens[:end], start) for start, end in ((3, 20), (22, 34), (35, 44))
        )
        flat = first + second + third
        found = run(drafter, target, data)
        assert found.acceptance_length == pytest.approx(1 + sum(flat) / len(flat))
        assert found.per_conversation == ((16 + 11 + 8, len(flat)),)


def test_the_all_anchor_average_is_kept_apart() -> None:
    drafter, target = models()
    data = conversations(random_text(1, 3, 61))
    found, tokens = run(drafter, target, data), data.tokens.tolist()
    counts = []
    for anchor in range(3, 63):
        counts.append(serve(drafter, target, tokens, anchor)[0])
    assert found.all_anchor_length == pytest.approx(1 + sum(counts) / len(counts))


def greedy_text(target: DenseTarget, prompt: str, response: int) -> str:
    ids = [ord(letter) - ord("a") for letter in prompt]
    for _ in range(response):
        row = torch.tensor([ids])
        ids.append(int(target.logits(target(row, positions_of(row), WholeSequence())[0, -1]).argmax()))
    return prompt + "".join(map(str, ids[len(prompt) :]))


@torch.no_grad()
def test_conversations_that_the_target_wrote_greedily_are_counted_apart() -> None:
    drafter, target = models()
    greedy = [greedy_text(target, "ab", 40), greedy_text(target, "bca", 29)]
    spoiled = greedy[0][:-3] + str((int(greedy[0][-3]) + 1) % 3) + greedy[0][-2:]
    found = run(drafter, target, conversations(greedy[0], random_text(1, 3, 61), spoiled, greedy[1]))
    alone = run(drafter, target, conversations(*greedy))
    assert found.num_greedy_steps == alone.num_greedy_steps == sum(steps for _, steps in alone.per_conversation) > 20
    assert found.greedy_kept == alone.greedy_kept
    assert [kept / alone.num_greedy_steps for kept in alone.greedy_kept] == pytest.approx(alone.per_position)
    assert run(drafter, target, conversations(random_text(1, 3, 61))).num_greedy_steps == 0


def test_unknown_states_make_nothing_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, target = models()
    data = conversations(greedy_text(target, "ab", 40))
    monkeypatch.setattr(TargetFeatures, "has_hidden", False)
    assert run(drafter, target, data).num_greedy_steps == 0


def test_nothing_to_walk() -> None:
    drafter, target = models()
    assert run(drafter, target, conversations("abc", "ab1")) == Simulation(1.0, 1.0, (0.0, 0.0, 0.0), ())
