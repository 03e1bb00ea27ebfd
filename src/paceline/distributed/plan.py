"""What the decider tells every rank before a pass: one message, always of the same shape.

How many rows of the last pass count, by request, so that each stage commits the states of its own layers by as many;
which places change hands; and the rows to run, with what the ranks that hold a part of the output head need to draw.
Whatever a step is (a prompt's, with drafts, without), the message is as wide: ranks that expect another width would
wait for each other for good. B places, T rows, W rows at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

PlanKind = Literal["run", "end", "failed"]
_KINDS: tuple[PlanKind, ...] = ("run", "end", "failed")
_NUM_COLUMNS = 4  # before the tokens: count, whether new, temperature's bits, seed


@dataclass(frozen=True)
class Plan:
    """One pass.

    Attributes:
        kind: whether there is a pass at all.
        counts_B: int64, rows of the pass before that count.
        is_new_B: bool, places that are emptied before this pass.
        temperature_B: float64, effective; below 1e-5 is greedy.
        seed_B: int64.
        token_ids_BT: int64; rows past a place's own hold 0, and count for nothing.
    """

    kind: PlanKind
    counts_B: Tensor
    is_new_B: Tensor
    temperature_B: Tensor
    seed_B: Tensor
    token_ids_BT: Tensor

    @property
    def all_greedy(self) -> bool:
        """Whether no place samples."""
        return not bool((self.temperature_B > 0).any())

    @staticmethod
    def closing(kind: PlanKind, num_places: int) -> Plan:
        """The last message of a run; nothing is committed any more."""
        none_B = torch.zeros(num_places, dtype=torch.int64)
        return Plan(kind, none_B, none_B.bool(), none_B.double(), none_B, none_B.new_zeros(num_places, 0))

    @staticmethod
    def of_rows(
        rows: Sequence[Sequence[int]],
        *,
        counts: Sequence[int],
        new_places: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> Plan:
        """A pass over the rows of every place."""
        ids_BT = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids_BT[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
        is_new_B = torch.zeros(len(rows), dtype=torch.bool)
        is_new_B[list(new_places)] = True
        return Plan(
            "run",
            torch.tensor(list(counts), dtype=torch.int64),
            is_new_B,
            torch.tensor(list(temperatures), dtype=torch.float64),
            torch.tensor(list(seeds), dtype=torch.int64),
            ids_BT,
        )


def tell(plan: Plan, max_rows: int, decider: int) -> None:
    """Send a plan to all ranks; the decider's half of `hear`.

    Args:
        plan: to send.
        max_rows: W.
        decider: this rank.
    """
    num_places, num_rows = plan.token_ids_BT.shape
    message = torch.zeros(num_places + 1, _NUM_COLUMNS + max_rows, dtype=torch.int64)
    message[0, 0], message[0, 1] = _KINDS.index(plan.kind), num_rows
    columns = (plan.counts_B, plan.is_new_B.long(), plan.temperature_B.view(torch.int64), plan.seed_B)
    message[1:, :_NUM_COLUMNS] = torch.stack(columns, dim=1)
    message[1:, _NUM_COLUMNS : _NUM_COLUMNS + num_rows] = plan.token_ids_BT
    dist.broadcast(message, decider)


def hear(num_places: int, max_rows: int, decider: int) -> Plan:
    """Wait for the decider's plan.

    Args:
        num_places: B.
        max_rows: W.
        decider: who sends.
    """
    message = torch.zeros(num_places + 1, _NUM_COLUMNS + max_rows, dtype=torch.int64)
    dist.broadcast(message, decider)
    counts_B, is_new_B, bits_B, seed_B = message[1:, :_NUM_COLUMNS].unbind(1)
    num_rows = int(message[0, 1])
    return Plan(
        _KINDS[int(message[0, 0])],
        counts_B,
        is_new_B.bool(),
        bits_B.contiguous().view(torch.float64),
        seed_B,
        message[1:, _NUM_COLUMNS : _NUM_COLUMNS + num_rows],
    )
