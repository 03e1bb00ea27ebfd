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

from paceline.distributed.choosing import Truncation
from paceline.distributed.places import DecodeRequest
from paceline.engine.slots import SamplingRows
from paceline.ops.target_distribution import effective_temperature

PlanKind = Literal["run", "end", "failed"]
_KINDS: tuple[PlanKind, ...] = ("run", "end", "failed")
_NUM_COLUMNS = 8  # before the tokens: count, whether new, rows judged, seed, top-k; bits of the other three settings


@dataclass(frozen=True)
class Plan:
    """One pass.

    Attributes:
        kind: whether there is a pass at all.
        counts_B: int64, rows of the pass before that count.
        is_new_B: bool, places that are emptied before this pass.
        num_judged_B: int64, rows of this pass behind which a token is chosen, from the first; 0 within a prompt.
        sampling: as `DecodeRequest` has it, temperatures effective.
        token_ids_BT: int64; rows past a place's own hold 0, and count for nothing.
    """

    kind: PlanKind
    counts_B: Tensor
    is_new_B: Tensor
    num_judged_B: Tensor
    sampling: SamplingRows
    token_ids_BT: Tensor

    @property
    def all_greedy(self) -> bool:
        """Whether no place samples."""
        return not bool((self.sampling.temperature_B > 0).any())

    @property
    def truncation(self) -> Truncation:
        """What some place has of top-k, top-p and min-p."""
        _, top_k_B, top_p_B, min_p_B, _ = self.sampling
        return Truncation(int(top_k_B.max()), bool((top_p_B < 1).any()), bool((min_p_B > 0).any()))

    @staticmethod
    def closing(kind: PlanKind, num_places: int) -> Plan:
        """The last message of a run; nothing is committed any more."""
        none_B = torch.zeros(num_places, dtype=torch.int64)
        settings = SamplingRows(none_B.float(), none_B, none_B.float(), none_B.float(), none_B)
        return Plan(kind, none_B, none_B.bool(), none_B, settings, none_B.new_zeros(num_places, 0))

    @staticmethod
    def of_rows(
        rows: Sequence[Sequence[int]],
        *,
        counts: Sequence[int],
        new_places: Sequence[int],
        num_judged: Sequence[int],
        requests: Sequence[DecodeRequest | None],
    ) -> Plan:
        """A pass over the rows of every place.

        Args:
            rows: by place.
            counts: rows of the pass before that count, by place.
            new_places: that change hands before this pass.
            num_judged: rows behind which a token is chosen, by place.
            requests: by place; None where nothing runs.
        """
        ids_BT = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids_BT[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
        is_new_B = torch.zeros(len(rows), dtype=torch.bool)
        is_new_B[list(new_places)] = True
        return Plan(
            "run",
            torch.tensor(list(counts), dtype=torch.int64),
            is_new_B,
            torch.tensor(list(num_judged), dtype=torch.int64),
            _sampling_of(requests),
            ids_BT,
        )


def _sampling_of(requests: Sequence[DecodeRequest | None]) -> SamplingRows:
    """Settings by place, as an engine's slots hold them."""
    some = [request if request is not None else DecodeRequest(()) for request in requests]
    return SamplingRows(
        torch.tensor([effective_temperature(one.temperature) for one in some], dtype=torch.float32),
        torch.tensor([min(one.top_k, 2**31) for one in some], dtype=torch.int64),
        torch.tensor([one.top_p for one in some], dtype=torch.float32),
        torch.tensor([one.min_p for one in some], dtype=torch.float32),
        torch.tensor([one.seed for one in some], dtype=torch.int64),
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
    temperature_B, top_k_B, top_p_B, min_p_B, seed_B = plan.sampling
    bits = [numbers_B.view(torch.int32).long() for numbers_B in (temperature_B, top_p_B, min_p_B)]
    columns = (plan.counts_B, plan.is_new_B.long(), plan.num_judged_B, seed_B, top_k_B, *bits)
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
    counts_B, is_new_B, num_judged_B, seed_B, top_k_B, *bits = message[1:, :_NUM_COLUMNS].unbind(1)
    temperature_B, top_p_B, min_p_B = (bits_B.int().view(torch.float32) for bits_B in bits)
    num_rows = int(message[0, 1])
    return Plan(
        _KINDS[int(message[0, 0])],
        counts_B,
        is_new_B.bool(),
        num_judged_B,
        SamplingRows(temperature_B, top_k_B, top_p_B, min_p_B, seed_B),
        message[1:, _NUM_COLUMNS : _NUM_COLUMNS + num_rows],
    )
