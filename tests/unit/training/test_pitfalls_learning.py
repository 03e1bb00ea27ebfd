"""Faults that look like success while training: the drafter learns, and what it has learnt is of no use in serving.

Whole runs on texts whose best possible drafter is known: a cycle, of which everything can be foreseen, and independent
tokens, of which nothing can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file
from tests.unit.training.runs import metrics
from torch import Tensor

from paceline.configuration.run import TrainRun
from paceline.models.loading import LoadedTarget
from paceline.training import objective as objective_module
from paceline.training import step as step_module
from paceline.training.anchors import Blocks, block_visibility, make_blocks
from paceline.training.loop import train

NUM_TOKENS = 24
NUM_KINDS = 8  # of independent tokens: a guess is right once in eight times


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target(vocab_size=64, hidden_size=32, intermediate_size=48, head_size=8)


def learn(
    folder: Path, target: LoadedTarget, rows: Sequence[Sequence[int]], num_steps: int, **changes: Any
) -> TrainRun:
    """Train on texts of which all but four tokens are the answer, by the tokens themselves."""
    folder.mkdir()
    data = write_token_file(folder / "data.npz", rows, num_prompt_tokens=4)
    settings: dict[str, Any] = {
        "drafter_target_layer_ids": [0, 1],
        "objective_loss": "ce",
        "schedule_num_steps": num_steps,
        "schedule_batch_size": 8,
        "schedule_num_anchors": NUM_TOKENS,
        "optimizer_learning_rate": 1e-2,
        "checkpoint_every": 1000,
    }
    run = tiny_settings(folder / "run", data, **(settings | changes))
    train(run, target)
    return run


def training_accuracy(run: TrainRun) -> list[float]:
    """Per draft, over the last rows of metrics."""
    found: list[float] = [row for row in metrics(run) if row["kind"] == "train"][-1]["accuracy_by_row"]
    return found


def acceptance(run: TrainRun) -> float:
    """Along the walk over held-out texts, which the serving code drafts."""
    length: float = [row for row in metrics(run) if row["kind"] == "evaluate"][-1]["data.npz"]["acceptance_length"]
    return length


def cycles() -> list[list[int]]:
    starts = torch.randint(0, 16, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    return [[4 + (start + index) % 16 for index in range(NUM_TOKENS)] for start in starts]


def test_a_cycle_is_foreseen_whole_and_a_label_shift_serves_nothing(
    target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall 3, report B95: block of 4, so 4 tokens a step. Shifted by one, training looks just as good."""
    right = learn(tmp_path / "right", target, cycles(), 120)
    assert min(training_accuracy(right)) > 0.95 and acceptance(right) == 4.0

    def shifted(ids: Tensor, supervised: Tensor, anchors: Tensor, valid: Tensor, *rest: Any, **options: Any) -> Blocks:
        """Row k learns the token at anchor + k + 1."""
        blocks = make_blocks(ids, supervised, anchors, valid, *rest, **options)
        labels = blocks.labels_BAQ.clone()
        labels[..., 1:] = make_blocks(ids, supervised, anchors + 1, valid, *rest, **options).labels_BAQ[..., 1:]
        return dataclasses.replace(blocks, labels_BAQ=labels)

    monkeypatch.setattr(step_module, "make_blocks", shifted)
    wrong = learn(tmp_path / "wrong", target, cycles(), 120)
    assert min(training_accuracy(wrong)) > 0.85 and acceptance(wrong) < 1.2


CHANCE = 1 / NUM_KINDS


@pytest.mark.parametrize("num_anchors", [4, NUM_TOKENS])
def test_nothing_is_learnt_where_there_is_nothing_to_learn(
    target: LoadedTarget, tmp_path: Path, num_anchors: int
) -> None:
    """Pitfall 1, report B96: independent tokens, few anchors and all of them, which overlap."""
    rows = random_rows(1300, NUM_TOKENS, vocab_size=4 + NUM_KINDS)
    run = learn(tmp_path / "run", target, rows, 150, schedule_num_anchors=num_anchors)
    assert max(training_accuracy(run)) < CHANCE + 0.05
    assert acceptance(run) < 1.3


@pytest.mark.parametrize("fault", ["context", "neighbour"])
def test_a_leak_shows_as_accuracy_above_chance_and_alike_in_every_row(
    target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Decided by the index of a block, or not at all, visibility shows a block the very tokens that it must foresee."""

    def leaking(anchors: Tensor, block_size: int, context_size: int, *rest: Any, **kind: Any) -> Tensor:
        visible = block_visibility(anchors, block_size, context_size, *rest, **kind)
        seen = slice(context_size) if fault == "context" else slice(context_size, None)
        visible[..., seen] = True
        return visible

    monkeypatch.setattr(objective_module, "block_visibility", leaking)
    rows = random_rows(1300, NUM_TOKENS, vocab_size=4 + NUM_KINDS)
    accuracy = training_accuracy(learn(tmp_path / "run", target, rows, 150))
    assert min(accuracy) > CHANCE + 0.1
    assert max(accuracy) - min(accuracy) < 0.05, "an honest drafter gets worse from row to row, a leaking one does not"
