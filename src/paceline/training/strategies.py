"""From a batch's features to its scores, alone or shared among ranks: what holds the trained weights, and where.

Every strategy computes the same step. They differ in what a rank keeps: all of the drafter (`ddp`), or its shard of
weights, gradients and moments (`fsdp`). The target stays outside: it is frozen, and whole on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.models.drafters.table import Drafter
from paceline.training.anchors import Blocks
from paceline.training.data import Batch
from paceline.training.drafting import states_after_labels
from paceline.training.features import TargetFeatures
from paceline.training.flex_attend import FlexBlocks
from paceline.training.objective import Features, Objective, Scores, score_drafts
from paceline.training.ranks import Ranks


class DraftScoring(nn.Module):
    """All that a step computes with trained weights, as one module; the drafter is its only part.

    Args:
        drafter: float32 masters.
        target: lends embedding and head.
        objective: weights of the loss.
        flex: attention of the blocks; None takes dense masks.
        touches_all: let every parameter take part in every backward, with gradient 0 where it has no other. A rank
            without a label might leave heads out, and the others wait for its share of their gradients.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: TargetFeatures,
        objective: Objective,
        flex: FlexBlocks | None = None,
        *,
        touches_all: bool,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self._target, self._objective, self._flex, self._touches_all = target, objective, flex, touches_all

    def forward(self, features: Features, batch: Batch, blocks: Blocks) -> Scores:
        """Score every draft of every block."""
        hidden_BAKD = states_after_labels(self.drafter, self._target, features, batch, blocks, self._flex)
        scores = score_drafts(self.drafter, hidden_BAKD, features, blocks, self._target.head_VD, self._objective)
        if not self._touches_all:
            return scores
        nothing = torch.stack([0.0 * parameter.sum() for parameter in self.drafter.parameters()]).sum()
        return scores._replace(loss_sum=scores.loss_sum + nothing)


class Strategy:
    """The drafter whole in this process, and no other process.

    Args:
        scoring: holds the drafter.
        ranks: the processes of the run.

    Attributes:
        num_averaged: ranks whose gradients are averaged where they should be added up: a factor for the loss.
    """

    def __init__(self, scoring: DraftScoring, ranks: Ranks) -> None:
        self.scoring, self.ranks, self.num_averaged = scoring, ranks, 1

    def scores(self, features: Features, batch: Batch, blocks: Blocks) -> Scores:
        """`DraftScoring`, in a way that its gradients reach all ranks."""
        return cast(Scores, self.scoring(features, batch, blocks))

    @contextlib.contextmanager
    def part(self, *, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one accumulation part; the last one pools the gradients of all ranks."""
        yield

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """While it lasts, the drafter's parameters are whole tensors that anybody may read; none may change them."""
        yield


class _Replicated(Strategy):
    """The drafter whole on every rank; gradients are added up after the last part.

    All in one piece and always in the same order. Torch's own `DistributedDataParallel` reorders its buckets after the
    first step of a process; sums over three ranks or more then differ in their last bits, and a resumed run would not
    end in the weights of one left alone. Sending while the backward still runs, as it does, saves little beside a step:
    drafters are small. A parameter without a gradient on this rank counts as zeros, so nobody waits for it.
    """

    def __init__(self, scoring: DraftScoring, ranks: Ranks) -> None:
        super().__init__(scoring, ranks)
        self._parameters = list(scoring.parameters())

    @contextlib.contextmanager
    def part(self, *, is_last: bool) -> Iterator[None]:
        yield
        if is_last:
            self._add_up()

    def _add_up(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        summed = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(summed)
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, summed.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)


class _Sharded(Strategy):
    """A shard on every rank; put together for a part's forward and backward.

    One unit for the whole drafter: context features meet the weights of every layer before the layers run, so layers
    that come and go one by one would not be there.
    """

    def __init__(self, scoring: DraftScoring, ranks: Ranks) -> None:
        super().__init__(scoring, ranks)
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        self._unit: FSDPModule = fully_shard(scoring, mesh=mesh, reshard_after_forward=False)
        self.num_averaged = ranks.size

    @contextlib.contextmanager
    def part(self, *, is_last: bool) -> Iterator[None]:
        self._unit.set_requires_gradient_sync(is_last)
        yield

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        self._unit.unshard()
        try:
            yield
        finally:
            self._unit.reshard()


def make_strategy(
    drafter: Drafter,
    target: TargetFeatures,
    objective: Objective,
    ranks: Ranks,
    name: Literal["ddp", "fsdp"],
    flex: FlexBlocks | None = None,
) -> Strategy:
    """Share a drafter among ranks; make its optimizer afterwards, since parameters may become shards.

    Args:
        drafter: float32 masters, of the same shapes on every rank; the first one's weights count.
        target: lends embedding and head.
        objective: weights of the loss.
        ranks: the processes of the run; a process alone shares nothing.
        name: see `DistributedSettings`.
        flex: attention of the blocks; None takes dense masks.
    """
    is_sharded = ranks.size > 1 and name == "fsdp"
    scoring = DraftScoring(drafter, target, objective, flex, touches_all=is_sharded)
    if ranks.size == 1:
        return Strategy(scoring, ranks)
    for parameter in scoring.parameters():
        dist.broadcast(parameter.detach(), src=0)  # machines may differ in what they make of a seed
    return _Sharded(scoring, ranks) if is_sharded else _Replicated(scoring, ranks)


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor put together from its shards, or itself; of a shard, every rank must ask."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor on the parameter's device, sharded as the parameter is."""
    moved = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return moved
    # Every rank has read the whole tensor, so there is nothing to send.
    sharded: Any = distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return cast(Tensor, sharded)
