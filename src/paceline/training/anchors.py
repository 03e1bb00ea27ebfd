"""Which draft blocks a conversation teaches, what they may see, and what they must predict.

Every family drafts the tokens after an anchor, so labels and marks are the same for all: row k of a block stands for
the token at anchor + k, row 0 for the anchor itself. Which row of the network gives draft k is the family's business.

An anchor imitates the moment after a verification: its token is known, its hidden state is not. A block therefore sees
the context strictly before its anchor, and its own rows; seeing more is the classic leak that trains beautifully and
accepts nothing.

In a packed row every rule holds within one conversation: a block reads nothing of another, neither as context nor as a
label, and padding belongs to none.

B rows, S tokens, A blocks per row, Q rows per block: the anchor and every draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.training.data import Packing


@dataclass(frozen=True)
class Blocks:
    """Draft blocks of a batch.

    Attributes:
        anchors_BA: int64 indices in the row, ascending; 0 where invalid.
        valid_BA: bool.
        positions_BAQ: int64 in the conversation: as in serving, rows may lie past its end.
        labels_BAQ: int64 token at each position; meaningless where `counts_BAQ` is false.
        counts_BAQ: bool, rows that carry loss: supervised, in the conversation, no gap since the anchor; row 0 never.
        packing: where conversations lie, if a row may hold several.
    """

    anchors_BA: Tensor
    valid_BA: Tensor
    positions_BAQ: Tensor
    labels_BAQ: Tensor
    counts_BAQ: Tensor
    packing: Packing | None = None


def same_document(documents_BS: Tensor, anchors_BA: Tensor) -> Tensor:
    """bool [B, A, S]: whether a token belongs to the conversation of an anchor."""
    return documents_BS.unsqueeze(1) == documents_BS.gather(1, anchors_BA).unsqueeze(2)


def anchor_candidates(supervised_BS: Tensor, packing: Packing | None = None) -> Tensor:
    """bool [B, S]: supervised tokens whose successor is supervised too, so that the block has something to predict.

    Never the first token: serving has read one before it drafts, and EAGLE-3 starts from the state of that one.
    """
    follows = torch.zeros_like(supervised_BS)
    follows[:, 1:-1] = supervised_BS[:, 2:]
    if packing is not None:
        documents_BS = packing.documents_BS
        follows[:, :-1] &= documents_BS[:, 1:] == documents_BS[:, :-1]
        follows &= packing.positions_BS > 0
    return supervised_BS & follows


def sample_anchors(
    supervised_BS: Tensor, num_anchors: int, generator: torch.Generator, packing: Packing | None = None
) -> tuple[Tensor, Tensor]:
    """Choose anchors uniformly without replacement.

    Args:
        supervised_BS: bool, on the CPU, where the generator lives: the choice is the same on every device.
        num_anchors: A; rows with fewer candidates are filled with invalid anchors at 0.
        generator: seeded by (seed, step).
        packing: of packed rows, on the CPU too.
    Returns:
        anchors_BA int64 ascending, valid_BA bool.
    """
    candidates = anchor_candidates(supervised_BS, packing)
    keys = torch.rand(candidates.shape, generator=generator).masked_fill(~candidates, -1.0)
    count = min(num_anchors, candidates.shape[1])
    values, anchors = keys.topk(count, dim=1)
    valid = values >= 0
    anchors = anchors.masked_fill(~valid, candidates.shape[1])  # invalid ones sort to the end
    anchors, order = anchors.sort(dim=1)
    valid = valid.gather(1, order)
    return anchors.masked_fill(~valid, 0), valid


def all_anchors(supervised_BS: Tensor, packing: Packing | None = None) -> tuple[Tensor, Tensor]:
    """Every candidate of every row, ascending, padded with invalid anchors to the longest row."""
    candidates = anchor_candidates(supervised_BS, packing)
    width = max(int(candidates.sum(1).max()), 1)
    position = torch.arange(candidates.shape[1], device=candidates.device)
    keys = torch.where(candidates, position, candidates.shape[1])
    anchors = keys.sort(dim=1).values[:, :width]
    valid = anchors < candidates.shape[1]
    return anchors.masked_fill(~valid, 0), valid


def make_blocks(
    token_ids_BS: Tensor,
    supervised_BS: Tensor,
    anchors_BA: Tensor,
    valid_BA: Tensor,
    block_size: int,
    packing: Packing | None = None,
) -> Blocks:
    """Positions, labels and loss marks of every block row; `valid_BA` blocks only.

    Args:
        token_ids_BS: int64.
        supervised_BS: bool.
        anchors_BA: int64.
        valid_BA: bool.
        block_size: Q, one more than a block drafts, whatever the layout.
        packing: of packed rows.
    """
    width = token_ids_BS.shape[1]
    offsets = torch.arange(block_size, device=anchors_BA.device)
    indices = anchors_BA.unsqueeze(-1) + offsets
    inside = indices < width
    flat = indices.clamp(max=width - 1).flatten(1)
    labels = token_ids_BS.gather(1, flat).view_as(indices)
    positions = indices
    if packing is not None:
        positions = packing.positions_BS.gather(1, anchors_BA).unsqueeze(-1) + offsets
        documents_BA = packing.documents_BS.gather(1, anchors_BA)
        inside &= packing.documents_BS.gather(1, flat).view_as(indices) == documents_BA.unsqueeze(-1)
    supervised = supervised_BS.gather(1, flat).view_as(indices) & inside
    supervised[..., 0] = True  # the anchor starts the unbroken run
    counts = supervised.cumprod(dim=-1).bool() & valid_BA.unsqueeze(-1)
    counts[..., 0] = False
    return Blocks(anchors_BA, valid_BA, positions, labels, counts, packing)


def sees_context(
    anchor: Tensor,
    row: Tensor,
    key: Tensor,
    *,
    window: int | None,
    documents: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Whether a row of a block may see a token of the context; all tensors are indices that broadcast.

    Args:
        anchor: int64, of the block, in its row of tokens.
        row: int64, of the block.
        key: int64, of the token.
        window: as in `block_visibility`.
        documents: of the anchor and of the token, in packed rows.
    """
    visible = key < anchor
    if documents is not None:
        visible = visible & (documents[0] == documents[1])
    if window is not None:
        visible = visible & (anchor + row - key < window)
    return visible


def sees_row(
    block: Tensor, row: Tensor, other_block: Tensor, other_row: Tensor, *, window: int | None, causal: bool
) -> Tensor:
    """Whether a row of a block may see another block row; all tensors are int64 indices that broadcast."""
    distance = row - other_row
    inside = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        inside = inside & (distance.abs() < window)
    return (block == other_block) & inside


def block_visibility(
    anchors_BA: Tensor,
    block_size: int,
    context_size: int,
    *,
    window: int | None,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """Which keys a block row may see.

    Args:
        anchors_BA: int64.
        block_size: Q.
        context_size: S.
        window: tokens visible to a row, itself included, by the serving rule |p - j| < window; None is all. Within a
            conversation indices lie as far apart as positions.
        causal: whether a row sees only itself and earlier rows of its block.
        documents_BS: int, of packed rows: context of another conversation than the anchor's is invisible.
    Returns:
        bool [B, A * Q, S + A * Q]. Every row sees itself, so no row is empty, valid or not.
    """
    B, A = anchors_BA.shape
    row_Q = torch.arange(block_size, device=anchors_BA.device)
    key_S = torch.arange(context_size, device=anchors_BA.device)
    block_A = torch.arange(A, device=anchors_BA.device)
    documents = None
    if documents_BS is not None:
        documents = documents_BS.gather(1, anchors_BA)[:, :, None, None], documents_BS[:, None, None, :]
    context = sees_context(anchors_BA[:, :, None, None], row_Q[:, None], key_S, window=window, documents=documents)
    context = context.expand(B, A, block_size, context_size).reshape(B, A * block_size, context_size)
    own = sees_row(
        block_A[:, None, None, None], row_Q[:, None, None], block_A[:, None], row_Q, window=window, causal=causal
    )
    own = own.reshape(A * block_size, A * block_size).expand(B, A * block_size, A * block_size)
    return torch.cat((context, own), dim=-1)
