"""Adaptive weights inside the objective: each block's own, for every term of the loss but the confidence's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file
from tests.unit.models.conftest import tiny_drafter, tiny_target
from tests.unit.training.runs import metrics

from paceline.training.anchors import make_blocks
from paceline.training.data import Batch
from paceline.training.drafting import states_after_labels
from paceline.training.features import TargetFeatures
from paceline.training.loop import train
from paceline.training.objective import Objective, Scores, score_drafts
from paceline.training.position_weighting import adaptive_weights

ANCHORS = torch.tensor([[5, 8, 17], [6, 9, 0]])
VALID = torch.tensor([[True, True, True], [True, True, False]])


def scored(**terms: Any) -> tuple[Scores, float, int]:
    """Scores of two conversations, and what the definition says: loss sum and number of drafts."""
    drafter, target = tiny_drafter(), tiny_target()
    features_of = TargetFeatures(target, drafter.contract.target_layer_ids)
    tokens = torch.randint(0, 60, (2, 20), generator=torch.Generator().manual_seed(2))
    marks = torch.ones(2, 20, dtype=torch.bool)
    marks[0, 10] = False
    batch = Batch.of_rows(tokens, marks)
    features, blocks = features_of(batch), make_blocks(tokens, marks, ANCHORS, VALID, 4)
    with torch.no_grad():
        hidden = states_after_labels(drafter, features_of, features, batch, blocks)
        scores = score_drafts(drafter, hidden, features, blocks, features_of.head_VD, Objective(**terms))
        log_q = (hidden @ features_of.head_VD.T).double().log_softmax(-1)
    counts, labels = blocks.counts_BAQ[..., 1:], blocks.labels_BAQ[..., 1:]
    losses = -log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    expected = float((adaptive_weights(losses, counts) * losses).sum())
    return scores, expected, int(counts.sum())


@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
def test_the_loss_is_its_definition_and_is_divided_by_the_number_of_drafts(chunk_rows: int) -> None:
    scores, expected, count = scored(kl=0.0, ce=1.0, gamma=4.0, chunk_rows=chunk_rows, is_adaptive=True)
    assert float(scores.loss_sum) == pytest.approx(expected, rel=1e-5)
    assert float(scores.weight_sum) == count
    fixed, _, _ = scored(kl=0.0, ce=1.0, gamma=4.0, chunk_rows=chunk_rows)
    assert float(fixed.loss_sum) != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    "family",
    [
        {},
        {"drafter_family": "dflash2", "drafter_selector_rank": 8, "drafter_selector_top_k": 4},
        {"drafter_family": "dspark", "drafter_markov_rank": 8},
        {"drafter_family": "eagle3", "drafter_mask_token_id": None, "drafter_own_head": True},
    ],
    ids=["dflash", "dflash2", "dspark", "eagle3"],
)
def test_every_family_trains_with_them(tmp_path: Path, family: dict[str, Any]) -> None:
    target = chat_target(vocab_size=64, hidden_size=32, intermediate_size=48, head_size=8)
    rows = random_rows(4, 20, vocab_size=60) * 6
    data = write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=4)
    run = tiny_settings(
        tmp_path / "run",
        data,
        objective_weighting="adaptive",
        objective_loss="ce",
        optimizer_learning_rate=1e-2,
        schedule_num_steps=60,
        **family,
    )
    train(run, target)
    losses = [row["loss"] for row in metrics(run) if row["kind"] == "train"]
    accuracy = [row for row in metrics(run) if row["kind"] == "train"][-1]["accuracy_by_row"]
    assert losses[-1] < losses[0] and accuracy[0] > 0.2
