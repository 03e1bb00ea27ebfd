"""Bytes of the masks that a run's drafter attends by: dense ones in pairs of a row and a key, flex ones in tiles.

From a dense mask torch makes a number per pair for every group of query heads that share keys; a training step keeps
those of each layer for its gradient. G query heads per key head, S tokens, A blocks per row, Q rows per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.checkpoint.contract import DrafterContract
    from paceline.training.flex_attend import FlexBlocks

_INDEX = (
    4  # bytes of a tile's number; flex attention keeps it in four lists: seen in part or whole, by rows and by keys
)


def dense_bytes(
    drafter: DrafterContract, num_rows: int, length: int, num_blocks: float, activation: int, *, is_trained: bool
) -> float:
    """Of dense masks over `num_rows` conversations, and of what torch makes of them.

    Args:
        drafter: its sizes.
        num_rows: of the batch.
        length: S.
        num_blocks: A.
        activation: bytes of an activation.
        is_trained: every layer's numbers stay for the gradient; else one layer's exist at a time.
    """
    kinds = len(set(zip(drafter.layer_windows, drafter.layer_causal, strict=True)))
    group = max(1, drafter.num_heads // drafter.num_kv_heads)
    num_kept = drafter.num_layers if is_trained else 1
    if drafter.family == "eagle3":  # a row per block and further draft, over all rows of its pass and those before it
        passes = range(1, drafter.num_draft_tokens)
        pairs = [num_rows * num_blocks * (length + num_blocks * number) for number in passes]
        if not pairs:
            return 0.0
        kept = sum(pairs) if is_trained else pairs[-1]
        return pairs[-1] * (1 + group) + kept * group * activation * num_kept
    rows = num_blocks * drafter.block_size
    pairs_of_a_kind = num_rows * rows * (length + rows)
    return pairs_of_a_kind * (kinds + group * (1 + activation * num_kept))


def flex_bytes(drafter: DrafterContract, flex: FlexBlocks, num_rows: int) -> int:
    """Of the lists of tiles that take their place, of every kind of layer."""
    from paceline.training.flex_attend import TILE, padded

    kinds = len(set(zip(drafter.layer_windows, drafter.layer_causal, strict=True)))
    rows = padded(flex.num_blocks * drafter.block_size) // TILE
    keys = padded(flex.context_size) // TILE + rows
    return kinds * num_rows * _INDEX * (4 * rows * keys + 2 * (rows + keys))
