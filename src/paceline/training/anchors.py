"""Which draft blocks a conversation teaches, what they may see, and what they must predict.

Every family drafts the tokens after an anchor, so labels and marks are the same for all: row k of a block stands for
the token at anchor + k, row 0 for the anchor itself. Which row of the network gives draft k is the family's business.

An anchor imitates the moment after a verification: its token is known, its hidden state is not. A block therefore sees
the context strictly before its anchor, and its own rows; seeing more is the classic leak that trains beautifully and
accepts nothing.

B rows, S tokens, A blocks per row, Q rows per block: the anchor and every draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Draft blocks of a batch.

    Attributes:
        anchors_BA: int64 positions, ascending; 0 where invalid.
        valid_BA: bool.
        positions_BAQ: int64, anchor + row: as in serving, rows may lie past the end of the conversation.
        labels_BAQ: int64 token at each position; meaningless where `counts_BAQ` is false.
        counts_BAQ: bool, rows that carry loss: supervised, in the conversation, no gap since the anchor; row 0 never.
    """

    anchors_BA: Tensor
    valid_BA: Tensor
    positions_BAQ: Tensor
    labels_BAQ: Tensor
    counts_BAQ: Tensor


def anchor_candidates(supervised_BS: Tensor) -> Tensor:
    """bool [B, S]: supervised tokens whose successor is supervised too, so that the block has something to predict.

    Never the first token: serving has read one before it drafts, and EAGLE-3 starts from the state of that one.
    """
    follows = torch.zeros_like(supervised_BS)
    follows[:, 1:-1] = supervised_BS[:, 2:]
    return supervised_BS & follows


def sample_anchors(supervised_BS: Tensor, num_anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Choose anchors uniformly without replacement.

    Args:
        supervised_BS: bool, on the CPU, where the generator lives: the choice is the same on every device.
        num_anchors: A; rows with fewer candidates are filled with invalid anchors at 0.
        generator: seeded by (seed, step).
    Returns:
        anchors_BA int64 ascending, valid_BA bool.
    """
    candidates = anchor_candidates(supervised_BS)
    keys = torch.rand(candidates.shape, generator=generator).masked_fill(~candidates, -1.0)
    count = min(num_anchors, candidates.shape[1])
    values, anchors = keys.topk(count, dim=1)
    valid = values >= 0
    anchors = anchors.masked_fill(~valid, candidates.shape[1])  # invalid ones sort to the end
    anchors, order = anchors.sort(dim=1)
    valid = valid.gather(1, order)
    return anchors.masked_fill(~valid, 0), valid


def all_anchors(supervised_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Every candidate of every row, ascending, padded with invalid anchors to the longest row."""
    candidates = anchor_candidates(supervised_BS)
    width = max(int(candidates.sum(1).max()), 1)
    position = torch.arange(candidates.shape[1], device=candidates.device)
    keys = torch.where(candidates, position, candidates.shape[1])
    anchors = keys.sort(dim=1).values[:, :width]
    valid = anchors < candidates.shape[1]
    return anchors.masked_fill(~valid, 0), valid


def make_blocks(
    token_ids_BS: Tensor, supervised_BS: Tensor, anchors_BA: Tensor, valid_BA: Tensor, block_size: int
) -> Blocks:
    """Positions, labels and loss marks of every block row; `valid_BA` blocks only.

    Args:
        token_ids_BS: int64.
        supervised_BS: bool.
        anchors_BA: int64.
        valid_BA: bool.
        block_size: Q, one more than a block drafts, whatever the layout.
    """
    width = token_ids_BS.shape[1]
    offsets = torch.arange(block_size, device=anchors_BA.device)
    positions = anchors_BA.unsqueeze(-1) + offsets
    inside = positions < width
    flat = positions.clamp(max=width - 1).flatten(1)
    labels = token_ids_BS.gather(1, flat).view_as(positions)
    supervised = supervised_BS.gather(1, flat).view_as(positions) & inside
    supervised[..., 0] = True  # the anchor starts the unbroken run
    counts = supervised.cumprod(dim=-1).bool() & valid_BA.unsqueeze(-1)
    counts[..., 0] = False
    return Blocks(anchors_BA, valid_BA, positions, labels, counts)


def block_visibility(
    anchors_BA: Tensor, block_size: int, context_size: int, *, window: int | None, causal: bool
) -> Tensor:
    """Which keys a block row may see.

    Args:
        anchors_BA: int64.
        block_size: Q.
        context_size: S.
        window: tokens visible to a row, itself included, by the serving rule |p - j| < window; None is all.
        causal: whether a row sees only itself and earlier rows of its block.
    Returns:
        bool [B, A * Q, S + A * Q]. Every row sees itself, so no row is empty, valid or not.
    """
    B, A = anchors_BA.shape
    device = anchors_BA.device
    row = torch.arange(block_size, device=device)
    key = torch.arange(context_size, device=device)
    position = anchors_BA.unsqueeze(-1) + row  # [B, A, Q]
    context = (key < anchors_BA[:, :, None, None]).expand(B, A, block_size, context_size)
    inside = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    distance = row[:, None] - row[None, :]
    if causal:
        inside = distance >= 0
    if window is not None:
        context = context & (position.unsqueeze(-1) - key < window)
        inside = inside & (distance.abs() < window)
    same_block = torch.eye(A, dtype=torch.bool, device=device)
    own = (same_block[:, None, :, None] & inside[None, :, None, :]).reshape(A * block_size, A * block_size)
    own = own.expand(B, A * block_size, A * block_size)
    return torch.cat((context.reshape(B, A * block_size, context_size), own), dim=-1)
