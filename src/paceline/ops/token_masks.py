"""Forbidden tokens: bit masks over the vocabulary, and lists of ids. R rows, V vocabulary, W = ceil(V / 32) words.

    token v may come iff bit v % 32 of word v // 32 is set, lowest bit first
    forbidden: z + (-inf)        allowed: z + (-0.0)

Forbidding adds instead of overwriting, for two reasons. -0.0 is the addend that changes no bit of any number (0.0 would
turn -0.0 into 0.0), so a mask that allows everything is the same as no mask. And a forbidden NaN or +inf becomes NaN
instead of -inf: logits that are broken can't hide behind a mask and are still found after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOTHING = -0.0
_WORD_BITS = 32
_CPU_BLOCK_BYTES = 2**19


def num_mask_words(vocab_size: int) -> int:
    """Give W, the int32 words that one row's mask takes."""
    return -(-vocab_size // _WORD_BITS)


def pack_token_mask(allowed_RV: Tensor) -> Tensor:
    """Pack which tokens are allowed into bits.

    Args:
        allowed_RV: bool; any number of leading dimensions.

    Returns:
        int32 [R, W]; the bits beyond V are 0.
    """
    vocab_size = allowed_RV.shape[-1]
    num_bits = num_mask_words(vocab_size) * _WORD_BITS
    padded_RV = torch.nn.functional.pad(allowed_RV.to(torch.uint8), (0, num_bits - vocab_size))
    bit_values = 1 << torch.arange(8, dtype=torch.uint8, device=allowed_RV.device)
    bytes_RY = (padded_RV.unflatten(-1, (-1, 8)) * bit_values).sum(dim=-1, dtype=torch.uint8)
    mask_RW: Tensor = bytes_RY.view(torch.int32)  # little-endian, as is every machine that torch runs on
    return mask_RW


def forbid_by_mask_(z_BLV: Tensor, mask_BLW: Tensor) -> Tensor:
    """Add -inf, in place, where a mask does not allow the token.

    Args:
        z_BLV: float32.
        mask_BLW: int32 as from `pack_token_mask`; a size of 1 stands for all rows.

    Returns:
        `z_BLV`.
    """
    # A table row for each byte: 8 times less to look up than there are tokens, and no comparison per token.
    device = mask_BLW.device
    bits = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)) & 1
    addend_of_byte = torch.full((256, 8), _NOTHING, device=device).masked_fill_(bits == 0, -torch.inf)
    bytes_BLY = mask_BLW.contiguous().view(torch.uint8).int()
    for columns in column_blocks(z_BLV):
        block_BLV = z_BLV[..., columns]
        block_BLY = bytes_BLY[..., columns.start // 8 : -(-columns.stop // 8)]
        addend_BLV = torch.nn.functional.embedding(block_BLY, addend_of_byte).flatten(-2)
        block_BLV.add_(addend_BLV[..., : block_BLV.shape[-1]])
    return z_BLV


def column_blocks(z_BLV: Tensor) -> list[slice]:
    """Split the vocabulary so that what is worked out on the way for a block stays in a CPU's cache.

    Memory for tables as wide as a vocabulary comes from the system anew each time, page by page, which can take longer
    than the arithmetic. Other devices get one block.

    Args:
        z_BLV: float32.

    Returns:
        Slices of the last axis that start at multiples of 32.
    """
    vocab_size = z_BLV.shape[-1]
    size = vocab_size
    if z_BLV.device.type == "cpu":
        num_rows = max(z_BLV.shape[:-1].numel(), 1)
        size = max(_CPU_BLOCK_BYTES // (4 * num_rows * _WORD_BITS), 1) * _WORD_BITS
    return [slice(start, min(start + size, vocab_size)) for start in range(0, vocab_size, max(size, 1))]


def forbid_ids_(z_BLV: Tensor, ids_BLM: Tensor, is_forbidden_BLM: Tensor) -> Tensor:
    """Add -inf at the listed ids, in place.

    Args:
        z_BLV: float32.
        ids_BLM: int64 in [0, V), and -1 padding; repeated ids are fine.
        is_forbidden_BLM: bool, which entries to act on.

    Returns:
        `z_BLV`.
    """
    addend_BLM = torch.full(ids_BLM.shape, _NOTHING, device=z_BLV.device)
    addend_BLM.masked_fill_(is_forbidden_BLM, -torch.inf)
    return add_at_ids_(z_BLV, ids_BLM, addend_BLM)


def add_at_ids_(z_BLV: Tensor, ids_BLM: Tensor, values_BLM: Tensor) -> Tensor:
    """Add values at the listed ids, in place; neither padding nor a value of 0 changes any bit.

    Args:
        z_BLV: float32.
        ids_BLM: int64 in [0, V), and -1 padding. Ids that stand for different values have to be unique.
        values_BLM: float32.

    Returns:
        `z_BLV`.
    """
    values_BLM = values_BLM.masked_fill((ids_BLM < 0) | (values_BLM == 0), _NOTHING)
    return z_BLV.scatter_add_(2, ids_BLM.clamp(min=0), values_BLM)
