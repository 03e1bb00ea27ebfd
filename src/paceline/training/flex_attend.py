"""Flex attention of training blocks: tiles of rows and keys in which nothing is seen are neither computed nor stored.

The mask is the rule of `anchors.py`, asked for one pair of a row and a key at a time. Sizes are those of the largest
batch of a run and multiples of a tile: context and rows are padded to them. So one compilation serves the whole run,
and no length is special. A padded row sees itself, so that it is a number; a padded key is seen by no other row.

B rows, S tokens, A blocks per row, Q rows per block, R = A * Q padded, K = S padded + R, N query heads, M key/value
heads, H head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from paceline.training.anchors import sees_context, sees_row

TILE = 128  # rows and keys of a tile of the mask

Kind = tuple[int | None, bool]  # window and causality of a layer, as `block_visibility` takes them
PairRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def padded(length: int) -> int:
    """A length in whole tiles."""
    return -(-length // TILE) * TILE


def pair_rule(
    anchors_BA: Tensor,
    block_size: int,
    context_size: int,
    num_rows: int,
    *,
    window: int | None,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> PairRule:
    """`block_visibility` as a function of a batch row, a head, a block row and a key, all of them indices.

    Args:
        anchors_BA: int64.
        block_size: Q.
        context_size: S, padded; the blocks' own keys begin here.
        num_rows: R.
        window: as for `block_visibility`.
        causal: likewise.
        documents_BS: likewise; of as many tokens as there are, padded or not.
    """
    Q = block_size
    missing = num_rows - anchors_BA.shape[1] * Q
    anchor_BR = functional.pad(anchors_BA.repeat_interleave(Q, dim=1), (0, missing))  # from 0, no context is seen
    document_BR = document_BK = None
    if documents_BS is not None:
        document_BR = documents_BS.gather(1, anchor_BR)
        document_BK = functional.pad(documents_BS, (0, context_size + num_rows - documents_BS.shape[1]), value=-1)

    def visible(b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        documents = None
        if document_BR is not None and document_BK is not None:
            documents = document_BR[b, row], document_BK[b, key]
        context = sees_context(anchor_BR[b, row], row % Q, key, window=window, documents=documents)
        own = key - context_size
        block = sees_row(row // Q, row % Q, own // Q, own % Q, window=window, causal=causal)
        return torch.where(key < context_size, context, block)

    return visible


@dataclass(frozen=True)
class FlexBlocks:
    """How the blocks of a run attend by flex attention.

    Attributes:
        context_size: tokens of the longest row; shorter batches are padded to it.
        num_blocks: blocks of the fullest row; likewise.
        is_compiled: false computes every pair, which a test can do on a CPU.
    """

    context_size: int
    num_blocks: int
    is_compiled: bool = True

    def over_context(
        self,
        context: Sequence[tuple[Tensor, Tensor]],
        kinds: Sequence[Kind],
        anchors_BA: Tensor,
        block_size: int,
        documents_BS: Tensor | None = None,
    ) -> FlexBlocksOverContext:
        """Attention of one batch; layers of one kind share a mask.

        Args:
            context: per layer, keys and values of the context, each [B, S, M, H].
            kinds: per layer.
            anchors_BA: int64.
            block_size: Q.
            documents_BS: int, of packed rows.
        """
        size = context[0][0].shape[1]
        masks = {
            kind: self.mask(anchors_BA, block_size, size, window=kind[0], causal=kind[1], documents_BS=documents_BS)
            for kind in dict.fromkeys(kinds)
        }
        return FlexBlocksOverContext(list(context), [masks[kind] for kind in kinds], self.is_compiled)

    def mask(
        self,
        anchors_BA: Tensor,
        block_size: int,
        context_size: int,
        *,
        window: int | None,
        causal: bool,
        documents_BS: Tensor | None = None,
    ) -> BlockMask:
        """Which tiles are computed, and what is seen in those that are seen in part; arguments as `block_visibility`'s.

        Returns:
            [B, 1, R, K].
        """
        S = padded(max(self.context_size, context_size))
        R = padded(max(self.num_blocks, anchors_BA.shape[1]) * block_size)
        rule = pair_rule(anchors_BA, block_size, S, R, window=window, causal=causal, documents_BS=documents_BS)
        build = _compiled()[0] if self.is_compiled else create_block_mask
        mask: BlockMask = build(rule, len(anchors_BA), None, R, S + R, device=anchors_BA.device, BLOCK_SIZE=TILE)
        return mask


@dataclass(frozen=True)
class FlexBlocksOverContext:
    """`BlocksOverContext` with tiles in place of a dense mask.

    Attributes:
        context: per layer, keys and values of the context, each [B, S, M, H].
        masks: per layer; layers may share one.
        is_compiled: as in `FlexBlocks`.
    """

    context: list[tuple[Tensor, Tensor]]
    masks: list[BlockMask]
    is_compiled: bool

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend from the T = A * Q slots of each row."""
        assert sink_N is None, "drafters with attention sinks take dense masks"
        mask, device, T = self.masks[layer], q_BTNH.device.type, q_BTNH.shape[1]
        # Fused kernels of torch choose their dtype under autocast; these must be given it.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q_BTNH.dtype
        R, K = mask.shape[-2:]
        context_k, context_v = self.context[layer]
        q = functional.pad(q_BTNH.to(dtype), (0, 0, 0, 0, 0, R - T)).transpose(1, 2)
        k, v = (
            _keys(context.to(dtype), own.to(dtype), K - R, R)
            for context, own in ((context_k, k_BTMH), (context_v, v_BTMH))
        )
        attend = _compiled()[1] if self.is_compiled else flex_attention
        with torch.autocast(device, enabled=False):
            mixed: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=True)
        return mixed.transpose(1, 2)[:, :T]


def _keys(context_BSMH: Tensor, own_BTMH: Tensor, context_size: int, num_rows: int) -> Tensor:
    """[B, M, K, H]: context and blocks, each with zeros behind it."""
    (B, S, M, H), T = context_BSMH.shape, own_BTMH.shape[1]
    nothing = context_BSMH.new_zeros((1, 1, 1, 1))
    parts = [context_BSMH, nothing.expand(B, context_size - S, M, H), own_BTMH, nothing.expand(B, num_rows - T, M, H)]
    return torch.cat(parts, dim=1).transpose(1, 2)


@functools.cache
def _compiled() -> tuple[Any, Any]:
    """`create_block_mask` and `flex_attention`, once per process.

    Whole graphs or none: what is not compiled makes every pair, at a hundred times the memory, and says so in a warning
    alone.
    """
    return (
        torch.compile(create_block_mask, dynamic=False, fullgraph=True),
        torch.compile(flex_attention, dynamic=False, fullgraph=True),
    )
