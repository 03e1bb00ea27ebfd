"""One optimizer step: batches in, updated drafter and pooled sums out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.drafters.table import Drafter
from paceline.training.anchors import make_blocks, sample_anchors
from paceline.training.data import Batch
from paceline.training.drafting import states_after_labels
from paceline.training.features import TargetFeatures
from paceline.training.objective import Objective, Scores, only_drafted, position_weights, score_drafts


@dataclass(frozen=True)
class StepSettings:
    """What a step needs besides data.

    Attributes:
        objective: loss weights.
        num_anchors: blocks per conversation.
        clip_norm: largest gradient norm.
        mixed_precision: bf16 products on float32 masters (GPU); false computes all in float32.
    """

    objective: Objective
    num_anchors: int
    clip_norm: float
    mixed_precision: bool


@dataclass(frozen=True)
class StepResult:
    """Pooled numbers of a step; tensors stay on the device until somebody reads them."""

    loss: Tensor
    gradient_norm: Tensor
    correct_Q: Tensor
    counted_Q: Tensor
    is_finite: Tensor
    num_tokens: int


def autocast(device: torch.device, enabled: bool) -> contextlib.AbstractContextManager[object]:
    """bf16 autocast where asked for."""
    return torch.autocast(device.type, torch.bfloat16) if enabled else contextlib.nullcontext()


def train_step(
    drafter: Drafter,
    target: TargetFeatures,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    generators: Callable[[int], torch.Generator],
    rate: float,
    settings: StepSettings,
) -> StepResult:
    """Accumulate the gradient of all batches, clip it, update.

    Loss weights are pooled over the whole step before any backward, so a step cut into parts gives the same gradient.

    Args:
        drafter: float32 masters, trained in place.
        target: frozen.
        optimizer: over the drafter's parameters.
        batches: one per accumulation part, on the CPU.
        generators: part index to a seeded CPU generator for its anchors.
        rate: learning rate of this step.
        settings: see above.
    Returns:
        Sums and means; if the loss or the gradient norm is not finite, nothing was updated.
    """
    device = next(drafter.parameters()).device
    num_rows = drafter.contract.num_draft_tokens + 1
    weights_Q = position_weights(num_rows, settings.objective.gamma).to(device)
    prepared = []
    total_weight = torch.zeros((), device=device)
    for part, batch in enumerate(batches):
        anchors, valid = sample_anchors(batch.supervised_BS, settings.num_anchors, generators(part))
        here = batch.to(device)
        blocks = make_blocks(here.token_ids_BS, here.supervised_BS, anchors.to(device), valid.to(device), num_rows)
        blocks = only_drafted(blocks, drafter)
        total_weight = total_weight + (blocks.counts_BAQ * weights_Q).sum()
        prepared.append((here.token_ids_BS, blocks))
    total_weight = total_weight.clamp(min=1e-6)

    parts: list[Scores] = []
    for token_ids_BS, blocks in prepared:
        with autocast(device, settings.mixed_precision):
            features = target(token_ids_BS)
            hidden_BAKD = states_after_labels(drafter, target, features, token_ids_BS, blocks)
            scores = score_drafts(drafter, hidden_BAKD, features, blocks, target.head_VD, settings.objective)
        (scores.loss_sum / total_weight).backward()
        parts.append(scores)
    loss = sum((s.loss_sum.detach() for s in parts), torch.zeros((), device=device)) / total_weight
    norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), settings.clip_norm)
    is_finite = torch.isfinite(loss) & torch.isfinite(norm)
    if bool(is_finite):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(
        loss=loss,
        gradient_norm=norm,
        correct_Q=torch.stack([s.correct_Q for s in parts]).sum(0),
        counted_Q=torch.stack([s.counted_Q for s in parts]).sum(0),
        is_finite=is_finite,
        num_tokens=sum(int(batch.lengths_B.sum()) for batch in batches),
    )
