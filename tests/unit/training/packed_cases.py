"""Conversations in packed rows and the same ones alone, through a target and a drafter of every family."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from tests.unit.models.conftest import drafter_contract, randomise, tiny_target
from torch import Tensor

from paceline.checkpoint.contract import (
    ConfidenceSettings,
    ConvolutionSettings,
    Eagle3Settings,
    MarkovSettings,
    SelectorSettings,
)
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.table import DRAFTERS, Drafter
from paceline.training.anchors import Blocks, all_anchors, make_blocks
from paceline.training.data import Batch, Conversations
from paceline.training.drafting import states_after_labels
from paceline.training.features import TargetFeatures
from paceline.training.objective import Features, Objective, Scores, only_drafted, score_drafts

MAX_LENGTH = 28
LENGTHS, PROMPTS = (14, 9, 11, 6), (4, 0, 3, 0)  # conversations 1 and 3 are supervised from their first token on
ROWS = ((0, 1), (2, 3))  # 5 and 11 tokens of padding
OBJECTIVE = Objective(kl=0.5, ce=0.5, gamma=4.0, chunk_rows=7)
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"layer_windows": (3, None), "layer_causal": (True, False)},
    "dflash2": {
        "family": "dflash2",
        "convolution": ConvolutionSettings(num_taps=2, group_size=6),
        "selector": SelectorSettings(rank=4, top_k=5),
        "layer_windows": (None, 6),
    },
    "dspark": {
        "family": "dspark",
        "layout": "anchor_sampling",
        "markov": MarkovSettings(5, "vanilla"),
        "confidence": ConfidenceSettings(with_markov=True),
    },
    "dspark-fill-in": {"family": "dspark", "markov": MarkovSettings(5, "rnn")},
    "eagle3": {
        "family": "eagle3",
        "layout": "autoregressive",
        "has_qk_norm": False,
        "num_layers": 2,
        "layer_windows": (None, None),
        "layer_causal": (True, True),
        "eagle3": Eagle3Settings(True, False, True, False),
        "draft_vocab_size": 30,
        "has_own_head": True,
    },
}


def make_drafter(family: str) -> Drafter:
    contract = drafter_contract(**FAMILIES[family])
    drafter: Drafter = DRAFTERS[contract.family](contract)
    randomise(drafter, 1)
    if isinstance(drafter, Eagle3Drafter):
        drafter.vocabulary.set_tables(torch.arange(1, 61, 2), None)
    return drafter


def absolute(model: torch.nn.Module, seed: int) -> None:
    """Make results depend on absolute positions.

    Rotations tell apart distances alone: a document that starts at another position would give the same result.
    """
    for module in model.modules():
        table = getattr(module, "position_table", None)
        if table is not None:
            angles = 7 * torch.rand(table[:, 0].shape, generator=torch.Generator().manual_seed(seed))
            module.position_table = torch.stack((angles.cos(), angles.sin()), dim=1)


class Packed:
    """A target, a drafter, four conversations in two rows, and what training makes of them."""

    def __init__(self, family: str, *, tokens: np.ndarray | None = None, supervised: np.ndarray | None = None) -> None:
        self.drafter, self.target = make_drafter(family), tiny_target()
        absolute(self.drafter, 3), absolute(self.target, 4)
        self.features_of = TargetFeatures(self.target, self.drafter.contract.target_layer_ids)
        self.num_rows = self.drafter.contract.num_draft_tokens + 1
        starts = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
        if tokens is None:
            tokens = np.random.default_rng(5).integers(0, 60, starts[-1]).astype(np.int32)
        if supervised is None:
            supervised = np.ones(starts[-1], bool)
            for start, prompt in zip(starts, PROMPTS, strict=False):
                supervised[start : start + prompt] = False
        self.conversations = Conversations(tokens, supervised, starts)
        self.batch = self.conversations.packed_batch(ROWS, MAX_LENGTH)

    def alone(self, index: int) -> Batch:
        """One conversation as a row of its own."""
        return self.conversations.batch([index], LENGTHS[index])

    def blocks(self, batch: Batch | None = None) -> Blocks:
        batch = batch or self.batch
        anchors, valid = all_anchors(batch.supervised_BS, batch.packing)
        blocks = make_blocks(batch.token_ids_BS, batch.supervised_BS, anchors, valid, self.num_rows, batch.packing)
        return only_drafted(blocks, self.drafter)

    def states(
        self, batch: Batch | None = None, features: Features | None = None, blocks: Blocks | None = None
    ) -> Tensor:
        batch = batch or self.batch
        features = features or self.features_of(batch)
        return states_after_labels(self.drafter, self.features_of, features, batch, blocks or self.blocks(batch))

    def score(self, batch: Batch | None = None) -> Scores:
        batch = batch or self.batch
        features, blocks = self.features_of(batch), self.blocks(batch)
        hidden_BAKD = states_after_labels(self.drafter, self.features_of, features, batch, blocks)
        return score_drafts(self.drafter, hidden_BAKD, features, blocks, self.features_of.head_VD, OBJECTIVE)

    def gradients(self, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
        """Summed loss of some batches and the gradient of every parameter."""
        self.drafter.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            total = total + self.score(batch).loss_sum
        total.backward()
        found = {n: p.grad.clone() for n, p in self.drafter.named_parameters() if p.grad is not None}
        return float(total.detach()), found


def place(index: int) -> tuple[int, slice]:
    """Row of a conversation, and where it lies in it."""
    for row, members in enumerate(ROWS):
        start = 0
        for member in members:
            if member == index:
                return row, slice(start, start + LENGTHS[member])
            start += LENGTHS[member]
    raise IndexError(index)


def agree(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two tensors differ by rounding alone."""
    return float((one - other).norm()) <= tolerance * float(other.norm())


def with_tokens(batch: Batch, token_ids_BS: Tensor) -> Batch:
    return dataclasses.replace(batch, token_ids_BS=token_ids_BS)
