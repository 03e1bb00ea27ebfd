"""Acceptance on held-out conversations without serving: draft from every anchor, then walk as verification would.

Only the walk equals what greedy serving sees, and only on text the target itself wrote greedily; the average over all
anchors runs up to 70 % higher, since easy spans hold many anchors but are crossed in few steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.models.drafters.table import Drafter
from paceline.training.anchors import Blocks, all_anchors, make_blocks
from paceline.training.data import Conversations
from paceline.training.drafting import greedy_drafts
from paceline.training.features import TargetFeatures
from paceline.training.objective import Features
from paceline.training.step import autocast

_GREEDY_SHARE = 0.98  # of a conversation's tokens; the text of temperature 0.8 has some 0.8, and a near-tie may flip
_SCORES = 2**25  # that exist at the same time


@dataclass(frozen=True)
class Simulation:
    """Counts of one evaluation.

    Attributes:
        acceptance_length: tokens per step along the walk, bonus included: comparable with serving.
        all_anchor_length: mean over every anchor; never quote it as acceptance.
        per_position: share of walk steps that kept draft i, unconditional.
        per_conversation: (tokens, steps) of each conversation's walk.
        num_greedy_steps: steps of the walks over conversations whose tokens are the target's best ones; 0 where the
            target's last states are not known.
        greedy_kept: of them, those that kept draft i; what serving greedy requests is held against.
    """

    acceptance_length: float
    all_anchor_length: float
    per_position: tuple[float, ...]
    per_conversation: tuple[tuple[int, int], ...]
    num_greedy_steps: int = 0
    greedy_kept: tuple[int, ...] = ()


def walk(accepted: Sequence[int], num_tokens: int) -> list[int]:
    """Anchors that a verification walk visits.

    Args:
        accepted: drafts that would be kept from each anchor r0, r1, ..., never more than remain.
        num_tokens: tokens of the response; r0 is given by prefill.
    Returns:
        Visited anchor indices; each step moves on by its accepted drafts and the bonus token.
    """
    visited = []
    position = 0
    while position < num_tokens - 1:
        visited.append(position)
        position += accepted[position] + 1
    return visited


def _walk_responses(accepted: np.ndarray, anchors: np.ndarray) -> list[int]:
    """Indices that the walks of all responses visit; a gap between anchors is a new response."""
    borders = [0, *(np.flatnonzero(np.diff(anchors) != 1) + 1).tolist(), len(anchors)]
    visited = []
    for start, end in itertools.pairwise(borders):
        visited += [start + index for index in walk(accepted[start:end].tolist(), end - start + 1)]
    return visited


@torch.no_grad()
def simulate(
    drafter: Drafter,
    target: TargetFeatures,
    conversations: Conversations,
    *,
    batch_size: int,
    max_length: int,
    mixed_precision: bool,
) -> Simulation:
    """Walk every conversation greedily.

    Args:
        drafter: as it is; its mode is left alone.
        target: frozen.
        conversations: greedy output of the target; every response of a row is walked on its own.
        batch_size: conversations per pass.
        max_length: cut of each conversation.
        mixed_precision: as in training.
    """
    device = next(drafter.parameters()).device
    num_drafts = drafter.contract.num_draft_tokens
    reached, greedy_reached = np.zeros(num_drafts, np.int64), np.zeros(num_drafts, np.int64)
    num_greedy_steps = 0
    all_accepted, num_anchors = 0, 0
    totals: list[tuple[int, int]] = []
    for first in range(0, len(conversations), batch_size):
        indices = range(first, min(first + batch_size, len(conversations)))
        batch = conversations.batch(indices, max_length).to(device)
        anchors, valid = all_anchors(batch.supervised_BS)
        blocks = make_blocks(batch.token_ids_BS, batch.supervised_BS, anchors, valid, num_drafts + 1)
        with autocast(device, mixed_precision):
            features = target(batch)
            ids = greedy_drafts(drafter, target, features, batch, blocks)
            shares = _greedy_shares(target, features, blocks)
        labels = blocks.labels_BAQ[:, :, 1:]
        right = ids.eq(labels) & blocks.counts_BAQ[:, :, 1:]
        accepted_BA = right.long().cumprod(-1).sum(-1).cpu().numpy()
        for row in range(len(indices)):
            kept_anchors = valid[row].cpu().numpy()
            counts = accepted_BA[row][kept_anchors]
            steps = _walk_responses(counts, anchors[row].cpu().numpy()[kept_anchors])
            if not steps:
                continue
            all_accepted, num_anchors = all_accepted + int(counts.sum()), num_anchors + len(counts)
            kept = counts[steps]
            reached_here = (kept[:, None] > np.arange(num_drafts)).sum(0)
            reached += reached_here
            if shares[row] >= _GREEDY_SHARE:
                num_greedy_steps, greedy_reached = num_greedy_steps + len(steps), greedy_reached + reached_here
            # A step whose bonus would pass the end delivers one token less, exactly as a length limit does in serving.
            totals.append((len(counts), len(steps)))
    num_steps = sum(steps for _, steps in totals)
    if num_steps == 0:
        return Simulation(1.0, 1.0, (0.0,) * num_drafts, ())
    return Simulation(
        acceptance_length=1 + float(reached.sum()) / num_steps,
        all_anchor_length=1 + all_accepted / num_anchors,
        per_position=tuple(float(x) / num_steps for x in reached),
        per_conversation=tuple(totals),
        num_greedy_steps=num_greedy_steps,
        greedy_kept=tuple(greedy_reached.tolist()) if num_greedy_steps else (),
    )


def _greedy_shares(target: TargetFeatures, features: Features, blocks: Blocks) -> list[float]:
    """How much of each conversation is what the target itself thinks best: 1 where it was written greedily."""
    if not target.has_hidden:
        return [0.0] * blocks.valid_BA.shape[0]
    conversation, block = blocks.valid_BA.nonzero(as_tuple=True)
    labels_R = blocks.labels_BAQ[conversation, block, 1]
    hidden_RD = features.hidden_BSD[conversation, blocks.anchors_BA[conversation, block]]
    is_best = torch.zeros(blocks.valid_BA.shape, dtype=torch.float32, device=labels_R.device)
    portion = max(1, _SCORES // target.head_VD.shape[0])
    for some in torch.arange(len(labels_R), device=labels_R.device).split(portion):
        best_R = target.logits(hidden_RD[some]).argmax(-1)
        is_best[conversation[some], block[some]] = best_R.eq(labels_R[some]).float()
    shares: list[float] = (is_best.sum(1) / blocks.valid_BA.sum(1).clamp(min=1)).tolist()
    return shares
