"""Faults of what is measured: an average that nobody serves, a product of averages, a selector judged without pairs.

Each check stands beside the fault that it has to find.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_run import chat_target, tiny_settings, write_token_file
from tests.unit.models.conftest import tiny_drafter, tiny_target
from tests.unit.training.runs import files_below, metrics
from torch import Tensor

from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.loading import load_drafter
from paceline.training import simulate as simulate_module
from paceline.training.data import Conversations, read_conversations
from paceline.training.features import TargetFeatures
from paceline.training.loop import train
from paceline.training.simulate import Simulation, simulate, walk

# --- golden numbers 5: the mean of products, not the product of means ---

RIGHT = ["1101", "1011", "0111", "1111"]


def simulation_of_rows(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """Four conversations with one anchor each, whose four drafts are right where the text above says 1."""
    right = torch.tensor([[[int(mark) for mark in row]] for row in RIGHT])
    conversations = Conversations(
        np.tile(np.arange(8, dtype=np.int32), 4), np.tile(np.arange(8) > 1, 4), np.arange(0, 33, 8)
    )
    drafter = tiny_drafter(block_size=5)
    features = TargetFeatures(tiny_target(), drafter.contract.target_layer_ids)

    def one_anchor(supervised_BS: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.full((4, 1), 2), torch.ones(4, 1, dtype=torch.bool)

    def drafts(drafter: Any, target: Any, features: Any, batch: Any, blocks: Any) -> Tensor:
        return torch.where(right.bool(), blocks.labels_BAQ[..., 1:], 60)

    with monkeypatch.context() as patch:
        patch.setattr(simulate_module, "all_anchors", one_anchor)
        patch.setattr(simulate_module, "greedy_drafts", drafts)
        return simulate(drafter, features, conversations, batch_size=4, max_length=64, mixed_precision=False)


def test_drafts_behind_a_wrong_one_are_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulation_of_rows(monkeypatch)
    assert found.all_anchor_length == found.acceptance_length == 2.75
    marks = torch.tensor([[float(mark) for mark in row] for row in RIGHT])
    # What other averages of the same rows say, and how far off they are.
    assert 1 + float(marks.mean(0).cumprod(0).sum()) == pytest.approx(3.1562, abs=5e-5)
    assert float(marks.mean()) == 0.8125
    assert found.per_position == (0.75, 0.5, 0.25, 0.25), "unconditional: row 3 lost its first draft and all after it"


# --- 42, golden numbers 6: only anchors that a walk visits ---


def test_the_walk_counts_the_steps_that_serving_takes() -> None:
    accepted = [3, 0, 0, 0, 1, 4, 2, 0, 1]
    visited = walk(accepted, 10)
    assert visited == [0, 4, 6] and 9 / len(visited) == 3.0
    every_anchor = list(range(9))  # the fault: each anchor once, whether serving stops there or not
    assert 1 + sum(accepted[index] for index in every_anchor) / 9 == pytest.approx(2.2222, abs=5e-5)


# --- 39: a selector is judged by what it chooses ---


def pairs(count: int) -> list[list[int]]:
    """s X Y s X Y ...: X is a (.4), c (.3) or e (.3) at random, Y is b after a and d after the other two.

    The most likely X is a and the most likely Y is d, so whoever picks each by itself is never right about both.
    """
    random = np.random.default_rng(0)
    text = []
    for _ in range(count):
        firsts = random.choice([11, 12, 13], size=8, p=[0.4, 0.3, 0.3])
        text.append([token for x in firsts for token in (10, int(x), 21 if x == 11 else 22)])
    return text


@torch.no_grad()
def unary_only(drafter: DFlash2Drafter) -> DFlash2Drafter:
    """The same drafter without a score for any pair: every row's own best id."""
    drafter.candidate_selector.successor_codebook.zero_()
    return drafter


def test_the_selector_walks_further_than_its_unary_part(tmp_path: Path) -> None:
    target = chat_target(vocab_size=64, hidden_size=32, intermediate_size=48, head_size=8)
    data = write_token_file(tmp_path / "data.npz", pairs(230), num_prompt_tokens=3)
    run = tiny_settings(
        tmp_path / "run",
        data,
        drafter_family="dflash2",
        drafter_selector_rank=16,
        drafter_selector_top_k=4,
        drafter_block_size=5,
        objective_loss="ce",
        objective_gamma=None,
        data_hold_out=30,
        evaluate_num_conversations=30,
        schedule_num_steps=120,
        schedule_batch_size=16,
        schedule_num_anchors=12,
        optimizer_learning_rate=1e-2,
        checkpoint_every=1000,
    )
    train(run, target)
    logged = metrics(run)[-1]["data.npz"]["acceptance_length"]
    drafter = load_drafter(str(run.output / "drafter"), target).model
    assert isinstance(drafter, DFlash2Drafter)
    features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
    held_out = read_conversations(data, vocab_size=64).select(range(200, 230))

    def length() -> float:
        found = simulate(drafter, features, held_out, batch_size=16, max_length=64, mixed_precision=False)
        return found.acceptance_length

    with_pairs = length()
    assert logged == pytest.approx(with_pairs, abs=0.05), "what a run logs is the selector's choice"
    unary_only(drafter)
    without = length()
    assert with_pairs > without + 0.1


# --- 43: a number means what it is called, and no number picks a checkpoint ---


def test_the_last_weights_are_exported_and_figures_carry_their_definitions(tmp_path: Path) -> None:
    target = chat_target(vocab_size=64, hidden_size=32, intermediate_size=48, head_size=8)
    data = write_token_file(tmp_path / "data.npz", pairs(24), num_prompt_tokens=3)
    run = tiny_settings(tmp_path / "run", data, evaluate_every=5, schedule_num_steps=10, checkpoint_every=5)
    train(run, target)
    rows = [row["data.npz"] for row in metrics(run) if row["kind"] == "evaluate"]
    assert len(rows) == 2
    for row in rows:
        assert {"acceptance_length", "all_anchor_length", "per_position", "num_conversations"} <= set(row)
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["per_position"])), "along the walk, bonus included"
    assert not [name for name in files_below(run.output) if "best" in name]
    assert '"step": 10' in (run.output / "drafter" / "provenance.json").read_text()
