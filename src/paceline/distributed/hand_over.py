"""What one stage sends to the next: one message of a shape that both know.

    per token   [prefix, bank rows that are closed at the cut, taps of all stages before it], each of the model's width

So a cut at layer s with n tapped ids up to s costs (1 + closed blocks + n) * width * bytes per token. Values cross as
they are stored, without a change of dtype. B requests, T rows, D width, J bank rows, P planes of the message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.contract import CaptureId, TargetContract
from paceline.models.targets.kimi_layer import num_closed_blocks
from paceline.models.targets.stage import HandOver


def num_bank_rows(contract: TargetContract, border: int) -> int:
    """J: closed blocks that cross a border."""
    block_size = None if contract.kimi is None else contract.kimi.residual_block_size
    return 0 if block_size is None else num_closed_blocks(border, block_size)


def pack(handed: HandOver) -> Tensor:
    """The message, [B, T, P, D]."""
    taps = [handed.taps[capture].unsqueeze(-2) for capture in sorted(handed.taps)]
    bank = [] if handed.bank_BTJD is None else [handed.bank_BTJD]
    return torch.cat([handed.prefix_BTD.unsqueeze(-2), *bank, *taps], dim=-2).contiguous()


def unpack(message_BTPD: Tensor, num_rows: int, capture_ids: Sequence[CaptureId], *, has_bank: bool) -> HandOver:
    """What was handed over.

    Args:
        message_BTPD: from `pack`.
        num_rows: J.
        capture_ids: those that earlier stages tapped, ascending.
        has_bank: whether the target has attention residuals.
    """
    prefix, bank, taps = message_BTPD.split_with_sizes((1, num_rows, len(capture_ids)), dim=-2)
    return HandOver(
        prefix.squeeze(-2),
        bank if has_bank else None,
        dict(zip(capture_ids, taps.unbind(-2), strict=True)),
    )


def send(handed: HandOver, to_rank: int) -> None:
    """Hand over to the rank of the same part in the next stage."""
    dist.send(pack(handed), to_rank)


def receive(
    contract: TargetContract,
    border: int,
    capture_ids: Sequence[CaptureId],
    shape: tuple[int, int],
    like: Tensor,
    from_rank: int,
) -> HandOver:
    """Wait for what the stage before hands over.

    Args:
        contract: of the target.
        border: this stage's first layer.
        capture_ids: of the whole target; those up to the border come along.
        shape: B and T of the pass.
        like: gives dtype and device.
        from_rank: who sends.
    """
    upstream = [capture for capture in capture_ids if capture <= border]
    num_rows = num_bank_rows(contract, border)
    message_BTPD = like.new_empty(*shape, 1 + num_rows + len(upstream), contract.hidden_size)
    dist.recv(message_BTPD, from_rank)
    has_bank = contract.kimi is not None and contract.kimi.residual_block_size is not None
    return unpack(message_BTPD, num_rows, upstream, has_bank=has_bank)
