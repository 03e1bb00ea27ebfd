"""What is done to whole blocks, whatever their rows mean.

Planes are [layers, kinds of rows, heads, blocks, block_size, width].
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.engine.block_tables import TRASH_BLOCK, BlockTables
from paceline.errors import CapacityError

_BLOCKS = 3  # the dimension of block ids


def allocate_planes(
    tables: BlockTables, *, layers: tuple[int, int, int], width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Planes of zeros.

    Args:
        tables: say how many blocks of how many positions there are.
        layers: the dimensions before the blocks: layers, kinds of rows, heads.
        width: of a row.
        dtype: the model's.
        device: the model's.

    Raises:
        CapacityError: the memory is not there.
    """
    shape = (*layers, tables.num_blocks, tables.block_size, width)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch has one class for a full GPU and another for a full host
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        raise CapacityError(
            f"a cache of {tables.num_blocks} blocks of {tables.block_size} positions needs "
            f"{num_bytes / 2**20:.0f} MiB; {device} does not have them",
            hint="a smaller num_blocks, max_num_seqs or max_model_len",
        ) from error


def fill_blocks(planes: Tensor, blocks: Sequence[int], value: float) -> None:
    """Set every number of some blocks."""
    planes.index_fill_(_BLOCKS, _ids(planes, blocks), value)


def poison_blocks(planes: Tensor, blocks: Sequence[int]) -> None:
    """Fill blocks that nobody should read with NaN."""
    assert TRASH_BLOCK not in blocks, "block 0 is read in place of what must not be seen"
    fill_blocks(planes, blocks, torch.nan)


def are_poisoned(planes: Tensor, blocks: Sequence[int]) -> list[bool]:
    """Whether each of some blocks still has the very bits of `poison_blocks`; another NaN would be somebody's."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[planes.itemsize]
    poison = torch.full((), torch.nan, dtype=planes.dtype).view(word).item()
    contents_PNE = planes.view(word).flatten(0, 2).flatten(2).index_select(1, _ids(planes, blocks))
    # Checks ask before every step, and torch takes several times as long over so many small comparisons.
    untouched: list[bool] = (contents_PNE.cpu().numpy() == poison).all(axis=(0, 2)).tolist()
    return untouched


def are_finite(planes: Tensor, blocks: Sequence[int]) -> bool:
    """Whether there is neither NaN nor infinity in blocks; waits for the device."""
    ids_N = _ids(planes, blocks)
    return all(bool(layer.index_select(1, ids_N).isfinite().all()) for layer in planes.flatten(1, 2).unbind(0))


def copy_blocks(planes: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
    """Copy whole blocks; none is both copied from and copied to."""
    assert len(source) == len(target), "each block is copied to one"
    from_N, to_N = _ids(planes, source), _ids(planes, target)
    for layer in planes.flatten(1, 2).unbind(0):  # one at a time: all at once would need as much memory again
        layer.index_copy_(1, to_N, layer.index_select(1, from_N))


def checksums(planes: Tensor, blocks: Sequence[int]) -> list[bytes]:
    """A digest of everything in each of some blocks, which come over in one copy."""
    if not blocks:
        return []
    contents = planes.index_select(_BLOCKS, _ids(planes, blocks)).movedim(_BLOCKS, 0).flatten(1)
    raw = contents.view(torch.uint8).cpu().numpy()
    return [hashlib.sha1(block, usedforsecurity=False).digest() for block in raw]  # processors have instructions for it


def _ids(planes: Tensor, blocks: Sequence[int]) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=planes.device)
