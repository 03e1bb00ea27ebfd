"""Which stage of the pipeline a rank runs, and which part of every layer of it.

    rank = stage * tensor_size + part

The ranks of a stage hold parts of the same layers and sum what they computed. A rank hands its stream to the rank of
the same part in the next stage: the stream is whole, and alike to the last bit, on every rank of a stage. The first
rank of the last stage decides: it has the drafter, and tells all others which rows count and what to run next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from paceline.distributed.world import World
from paceline.errors import ConfigError
from paceline.models.targets.kimi_pipeline import stage_ranges


@dataclass(frozen=True)
class Layout:
    """How a target is spread over ranks.

    Attributes:
        borders: first layer of every stage but the first.
        tensor_size: ranks that share each layer.
    """

    borders: tuple[int, ...] = ()
    tensor_size: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.borders) + 1

    @property
    def num_ranks(self) -> int:
        """Processes that this takes."""
        return self.num_stages * self.tensor_size

    def require_size(self, num_processes: int) -> None:
        """Refuse another number of processes.

        Raises:
            ConfigError: says what it takes.
        """
        if num_processes != self.num_ranks:
            raise ConfigError(
                f"{self.num_stages} stages of {self.tensor_size} ranks take {self.num_ranks} processes; this run has "
                f"{num_processes}",
                hint=f"torchrun --nproc-per-node {self.num_ranks} -m paceline ...",
            )

    @staticmethod
    def even(num_layers: int, num_stages: int, tensor_size: int = 1) -> Layout:
        """Stages of equal length, the later ones shorter by one layer where it does not come out even.

        Raises:
            ConfigError: there are more stages than layers.
        """
        if not 1 <= num_stages <= num_layers:
            raise ConfigError(f"{num_stages} stages were asked for; the target has {num_layers} layers")
        length, longer = divmod(num_layers, num_stages)
        borders = [stage * length + min(stage, longer) for stage in range(1, num_stages)]
        return Layout(tuple(borders), tensor_size)


class TensorGroup:
    """The ranks that share each layer, and their sums.

    Args:
        index: which part this rank has, from 0.
        size: parts.
        group: the ranks; None where there is one part.
    """

    def __init__(self, index: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.index, self.size, self.group = index, size, group

    def leave(self) -> None:
        """Refer to the group no longer, which ends with all others; nothing communicates afterwards."""
        self.group = None

    def total(self, partial: Tensor, *, in_order: bool) -> Tensor:
        """The sum over all ranks in the partial's dtype, on every rank the same bits.

        Args:
            partial: of this rank; may be written over.
            in_order: add part after part, in float32, whatever the size of the message. A reduction that the library
                chooses may add in another order elsewhere in a longer message, so a row's bits would depend on how
                many rows there are; it moves fewer bytes.
        """
        if self.size == 1:
            return partial
        if not in_order:
            summed = partial.contiguous()
            dist.all_reduce(summed, group=self.group)
            return summed
        first, *others = self.gathered(partial)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(partial.dtype)

    def gathered(self, own: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all of one shape and dtype."""
        if self.size == 1:
            return [own]
        parts = own.new_empty(self.size, *own.shape)
        dist.all_gather(list(parts.unbind(0)), own.contiguous(), group=self.group)
        return list(parts.unbind(0))


@dataclass(frozen=True)
class Mesh:
    """This rank's place.

    Attributes:
        world: all ranks.
        layout: of the target.
        layers: first layer of this rank's stage, and the one behind its last.
        tensor: the ranks of this stage.
    """

    world: World
    layout: Layout
    layers: tuple[int, int]
    tensor: TensorGroup

    @staticmethod
    def of(world: World, layout: Layout, num_layers: int) -> Mesh:
        """Find this rank's place; a collective call, with the same layout on every rank.

        Raises:
            ConfigError: the layout takes another number of processes, or does not fit the target.
        """
        ranges = stage_ranges(num_layers, layout.borders)
        layout.require_size(world.size)
        size = layout.tensor_size
        tensor = TensorGroup()
        for stage in range(layout.num_stages if size > 1 else 0):
            group = dist.new_group(list(range(stage * size, (stage + 1) * size)))  # by all ranks, members or not
            if world.rank // size == stage:
                tensor = TensorGroup(world.rank % size, size, group)
        return Mesh(world, layout, ranges[world.rank // size], tensor)

    @property
    def stage(self) -> int:
        """Which stage this rank runs, from 0."""
        return self.world.rank // self.layout.tensor_size

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's stage ends with the output head."""
        return self.stage == self.layout.num_stages - 1

    @property
    def decider(self) -> int:
        """The rank that decides."""
        return (self.layout.num_stages - 1) * self.layout.tensor_size

    @property
    def is_decider(self) -> bool:
        """Whether this rank decides."""
        return self.world.rank == self.decider

    @property
    def previous_rank(self) -> int:
        """Who hands this rank its stream."""
        return self.world.rank - self.layout.tensor_size

    @property
    def next_rank(self) -> int:
        """Whom this rank hands its stream to."""
        return self.world.rank + self.layout.tensor_size
