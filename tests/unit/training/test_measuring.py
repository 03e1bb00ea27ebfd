"""Held-out conversations that ranks share are counted as if one had walked them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target
from tests.tiny_run import random_rows, write_token_file

from paceline.checkpoint.calibration import Calibration
from paceline.training.data import read_conversations
from paceline.training.features import TargetFeatures
from paceline.training.measuring import calibration_of, pooled
from paceline.training.simulate import Simulation, simulate


def test_counts_are_added() -> None:
    """Ten steps that kept 5 and 2 drafts, and two that kept 2 and 2; means of means would give 2.35."""
    many = Simulation(1.7, 1.5, (0.5, 0.2), ((17, 8), (3, 2)), 8, (5, 1))
    few = Simulation(3.0, 2.25, (1.0, 1.0), ((8, 2),), 2, (2, 2))
    both = pooled([many, few])
    assert both.acceptance_length == pytest.approx(1 + 11 / 12)
    assert both.all_anchor_length == pytest.approx(1 + 20 / 28)
    assert both.per_position == pytest.approx((7 / 12, 4 / 12))
    assert both.per_conversation == ((17, 8), (3, 2), (8, 2))
    assert (both.num_greedy_steps, both.greedy_kept) == (10, (7, 3))


def test_a_rank_with_nothing_to_walk_changes_nothing() -> None:
    some, none = Simulation(1.7, 1.5, (0.5, 0.2), ((20, 10),)), Simulation(1.0, 1.0, (0.0, 0.0), ())
    assert pooled([some, none]) == pooled([none, some]) == some
    assert pooled([none, none]) == none


def test_a_calibration_is_of_greedy_text_alone() -> None:
    row = {
        "kind": "evaluate",
        "step": 7,
        "runs/greedy.npz": {"per_position": [0.6, 0.2], "num_greedy_steps": 150, "greedy_kept": [90, 30]},
        "mixed.npz": {"per_position": [0.5, 0.1], "num_greedy_steps": 50, "greedy_kept": [40, 0]},
        "sampled.npz": {"per_position": [0.4, 0.1], "num_greedy_steps": 0, "greedy_kept": []},
    }
    found = calibration_of(row)
    assert isinstance(found, Calibration)
    assert (found.method, found.num_blocks, found.per_position) == ("walk", 200, (0.65, 0.15))
    assert found.texts == ("greedy.npz", "mixed.npz")
    del row["mixed.npz"]
    assert calibration_of(row) is None, "150 blocks say too little"
    assert calibration_of({"kind": "evaluate", "step": 7}) is None


@torch.no_grad()
def test_shares_of_conversations_make_up_the_whole(tmp_path: Path) -> None:
    path = write_token_file(tmp_path / "data.npz", random_rows(7, 24, vocab_size=8), num_prompt_tokens=4)
    conversations = read_conversations(path, vocab_size=512)
    model = tiny_target()
    drafter = tiny_drafter(model.contract)
    features = TargetFeatures(model, drafter.contract.target_layer_ids)

    def walked(indices: range) -> Simulation:
        chosen = conversations.select(indices)
        return simulate(drafter, features, chosen, batch_size=2, max_length=24, mixed_precision=False)

    whole, shares = walked(range(7)), pooled([walked(range(rank, 7, 2)) for rank in range(2)])
    assert shares.acceptance_length == pytest.approx(whole.acceptance_length)
    assert shares.all_anchor_length == pytest.approx(whole.all_anchor_length)
    assert shares.per_position == pytest.approx(whole.per_position)
    assert sorted(shares.per_conversation) == sorted(whole.per_conversation)
