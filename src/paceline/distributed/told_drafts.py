"""Drafts of the rank that decides, on every rank: each rank drafts, and what it came to gives way to the decider's.

The drafter is whole on every rank and reads the same numbers, so drafts agree as far as the arithmetic repeats itself.
Were one to differ, the ranks would verify different texts and mix them in every sum.

B requests, K drafts, C candidates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.mesh import TensorGroup
from paceline.engine.proposal import Proposer
from paceline.models.drafters.proposal import Proposal


class ToldDrafts:
    """A proposer whose drafts are those of the first rank.

    Args:
        inner: this rank's; asked for everything else.
        tensor: the ranks.
    """

    def __init__(self, inner: Proposer, tensor: TensorGroup) -> None:
        self._inner, self._tensor = inner, tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, *arguments: Any, **options: Any) -> Proposal:
        """Draft, and take the first rank's: ids, candidates and what they were drawn with, in one message."""
        own = self._inner.propose(*arguments, **options)
        parts = [own.ids_BK]
        if own.candidate_ids_BKC is not None and own.log_q_BKC is not None:
            parts += [own.candidate_ids_BKC, own.log_q_BKC.float().view(torch.int32).long()]
        if own.confidence_BK is not None:
            parts.append(own.confidence_BK.float().view(torch.int32).long())
        message = torch.cat([part.flatten() for part in parts])
        dist.broadcast(message, group_src=0, group=self._tensor.group)
        told = [
            piece.view(part.shape)
            for piece, part in zip(message.split([part.numel() for part in parts]), parts, strict=True)
        ]
        found = own._replace(ids_BK=told[0])
        if own.candidate_ids_BKC is not None and own.log_q_BKC is not None:
            found = found._replace(candidate_ids_BKC=told[1], log_q_BKC=_numbers(told[2]))
        return found if own.confidence_BK is None else found._replace(confidence_BK=_numbers(told[-1]))


def _numbers(bits: Tensor) -> Tensor:
    return bits.int().view(torch.float32)
