"""One optimizer step: batches in, updated drafter and pooled sums out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.models.drafters.table import Drafter
from paceline.training.anchors import Blocks, make_blocks, sample_anchors
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures
from paceline.training.flex_attend import FlexBlocks
from paceline.training.objective import Objective, Scores, only_drafted
from paceline.training.ranks import Ranks
from paceline.training.strategies import Strategy, full_tensor, make_strategy


@dataclass(frozen=True)
class StepSettings:
    """What a step needs besides data.

    Attributes:
        objective: loss weights.
        num_anchors: blocks per row.
        clip_norm: largest gradient norm.
        mixed_precision: bf16 products on float32 masters (a GPU, or a target in bf16); false computes all in float32.
        flex: attention of the blocks; None takes dense masks.
    """

    objective: Objective
    num_anchors: int
    clip_norm: float
    mixed_precision: bool
    flex: FlexBlocks | None = None


@dataclass(frozen=True)
class StepResult:
    """Numbers of a step; tensors stay on the device until somebody reads them.

    Attributes:
        loss, gradient_norm, is_finite: of all ranks.
        correct_Q, counted_Q, num_tokens, counters: counts of this rank, to be summed over ranks when they are reported.
    """

    loss: Tensor
    gradient_norm: Tensor
    correct_Q: Tensor
    counted_Q: Tensor
    is_finite: Tensor
    num_tokens: int
    counters: Mapping[str, Tensor] = field(default_factory=dict)


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
    strategy: Strategy | None = None,
) -> StepResult:
    """Accumulate the gradient of all batches, clip it, update.

    Loss weights are pooled over the whole step and all ranks before any backward, so a step cut into parts, or shared
    among ranks, gives the same gradient.

    Args:
        drafter: float32 masters, trained in place.
        target: frozen; runs, or has stored, what the batches need of it.
        optimizer: over the drafter's parameters.
        batches: one per accumulation part, on the CPU, the same on every rank: each takes its own rows.
        generators: part index to a seeded CPU generator for its anchors.
        rate: learning rate of this step.
        settings: see above.
        strategy: how ranks share the drafter; None is a process alone.
    Returns:
        Sums and means; if the loss or the gradient norm is not finite on any rank, nothing was updated on all.
    """
    if strategy is None:
        alone = Ranks.alone(next(drafter.parameters()).device)
        strategy = make_strategy(drafter, target, settings.objective, alone, "ddp", settings.flex)
    ranks, device = strategy.ranks, strategy.ranks.device
    num_rows = drafter.contract.num_draft_tokens + 1
    weights_Q = settings.objective.denominators(num_rows).to(device)
    prepared = [
        _own_share(batch, generators(part), drafter, num_rows, settings.num_anchors, ranks)
        for part, batch in enumerate(batches)
    ]
    total_weight = torch.zeros((), device=device)
    for _, blocks in prepared:
        total_weight = total_weight + (blocks.counts_BAQ * weights_Q).sum()
    total_weight = ranks.total(total_weight).clamp(min=1e-6)

    parts: list[Scores] = []
    for part, (here, blocks) in enumerate(prepared, start=1):
        with strategy.part(is_last=part == len(prepared)):
            with autocast(device, settings.mixed_precision):
                scores = strategy.scores(target(here), here, blocks)
            (scores.loss_sum / total_weight * strategy.num_averaged).backward()
        parts.append(scores)
    loss = ranks.total(sum((s.loss_sum.detach() for s in parts), torch.zeros((), device=device))) / total_weight
    norm = _clip(drafter, settings.clip_norm)
    is_finite = torch.isfinite(loss) & torch.isfinite(norm)
    is_finite = ranks.total((~is_finite).long()) == 0
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
        num_tokens=sum(int(batch.lengths_B[ranks.rows(len(batch.lengths_B))].sum()) for batch in batches),
        counters=_counters(prepared),
    )


def _own_share(
    batch: Batch, generator: torch.Generator, drafter: Drafter, num_rows: int, num_anchors: int, ranks: Ranks
) -> tuple[Batch, Blocks]:
    """This rank's rows of a batch and their blocks, on its device.

    Anchors are drawn for the whole batch before it is cut: a row's anchors are then the same on whatever rank it is.
    """
    anchors, valid = sample_anchors(batch.supervised_BS, num_anchors, generator, batch.packing)
    mine = ranks.rows(len(anchors))
    here = _rows(batch, mine).to(ranks.device)
    anchors, valid = anchors[mine].to(ranks.device), valid[mine].to(ranks.device)
    blocks = make_blocks(here.token_ids_BS, here.supervised_BS, anchors, valid, num_rows, here.packing)
    return here, only_drafted(blocks, drafter)


def _rows(batch: Batch, rows: slice) -> Batch:
    return replace(
        batch,
        token_ids_BS=batch.token_ids_BS[rows],
        supervised_BS=batch.supervised_BS[rows],
        lengths_B=batch.lengths_B[rows],
        positions_BS=batch.positions_BS[rows],
        documents_BS=batch.documents_BS[rows],
        rows=None if batch.rows is None else batch.rows[rows],
    )


def _counters(prepared: Sequence[tuple[Batch, Blocks]]) -> dict[str, Tensor]:
    """How much there was to learn from: blocks, places for a block that a row was too short for, response tokens."""
    valid = [blocks.valid_BA for _, blocks in prepared]
    return {
        "num_anchors": torch.stack([valid_BA.sum() for valid_BA in valid]).sum(),
        "num_dummy_anchors": torch.stack([(~valid_BA).sum() for valid_BA in valid]).sum(),
        "num_supervised": torch.stack([batch.supervised_BS.sum() for batch, _ in prepared]).sum(),
    }


def _clip(drafter: Drafter, clip_norm: float) -> Tensor:
    """Scale the gradient to at most `clip_norm`, as one vector over all parameters and shards; its norm before that."""
    parameters = list(drafter.parameters())
    norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm
