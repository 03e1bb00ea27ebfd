"""The beginning of a pass through fused layers in one launch: embedding rows, prepared for the first norm, and turns.

    x[t] = embedding[ids[t]],   scaled and squares as in `scale_rows.py`,   turns[t] = table[positions[t]]

T rows, V vocabulary, D width, P positions of the table, R pairs of channels that are turned.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, dependent_launch, kernel, needs_gradient, tl, triton
from paceline.ops.early_launch import wait_for_launch_ahead
from paceline.ops.scale_rows import scale_rows_reference
from paceline.ops.skinny_product import ScaledRows


def embed_rows_reference(
    embedding_VD: Tensor, ids_T: Tensor, gain_D: Tensor, table_P2R: Tensor, positions_T: Tensor
) -> tuple[ScaledRows, Tensor]:
    """The definition."""
    return scale_rows_reference(embedding_VD[ids_T], gain_D), table_P2R[positions_T]


@kernel
def _embed_rows_kernel(
    embedding_ptr: tl.tensor,
    id_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position_ptr: tl.tensor,
    x_ptr: tl.tensor,
    scaled_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    turn_ptr: tl.tensor,
    width: tl.tensor,
    turn_size: tl.tensor,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    column, turn = tl.arange(0, BLOCK), tl.arange(0, TURNS)
    inside, is_turn = column < width, turn < turn_size
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)  # constant: read before the wait
    wait_for_launch_ahead(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    chosen, position = tl.load(id_ptr + row), tl.load(position_ptr + row)
    x = tl.load(embedding_ptr + chosen * width + column, mask=inside, other=0.0)
    turns = tl.load(table_ptr + position * turn_size + turn, mask=is_turn, other=0.0)
    wide = x.to(tl.float32)
    tl.store(x_ptr + row * width + column, x, mask=inside)
    tl.store(scaled_ptr + row * width + column, (wide * gain).to(x.dtype), mask=inside)
    tl.store(squares_ptr + row, tl.sum(wide * wide, axis=0))
    tl.store(turn_ptr + row * turn_size + turn, turns, mask=is_turn)


def embed_rows_triton(
    embedding_VD: Tensor, ids_T: Tensor, gain_D: Tensor, table_P2R: Tensor, positions_T: Tensor
) -> tuple[ScaledRows, Tensor]:
    """Launch one program per row."""
    num_rows, width = ids_T.shape[0], embedding_VD.shape[1]
    x_TD = torch.empty((num_rows, width), dtype=embedding_VD.dtype, device=embedding_VD.device)
    scaled_TD = torch.empty_like(x_TD)
    squares_T1 = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TD.device)
    turns_T2R = torch.empty((num_rows, *table_P2R.shape[1:]), dtype=table_P2R.dtype, device=x_TD.device)
    turn_size = turns_T2R[0].numel()
    is_dependent = dependent_launch(num_rows)
    with torch.cuda.device_of(x_TD):
        _embed_rows_kernel[(num_rows,)](
            embedding_VD,
            ids_T.contiguous(),
            gain_D,
            table_P2R,
            positions_T.contiguous(),
            x_TD,
            scaled_TD,
            squares_T1,
            turns_T2R,
            width,
            turn_size,
            BLOCK=triton.next_power_of_2(width),
            TURNS=triton.next_power_of_2(turn_size),
            USE_PDL=is_dependent,
            launch_pdl=is_dependent,
        )
    return ScaledRows(x_TD, scaled_TD, squares_T1), turns_T2R


def embed_rows(
    embedding_VD: Tensor, ids_T: Tensor, gain_D: Tensor, table_P2R: Tensor, positions_T: Tensor
) -> tuple[ScaledRows, Tensor]:
    """Gather what the first layer of a pass begins with.

    Args:
        embedding_VD: contiguous.
        ids_T: int64, below V.
        gain_D: of the first layer's norm, any float dtype.
        table_P2R: rows of `rotary_table`, contiguous.
        positions_T: int64, below P.
    Returns:
        The rows, prepared for the norm, and the table's rows at the positions, [T, 2, R].
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    if gain_D.shape != embedding_VD.shape[1:]:
        raise ShapeError("gain", expected=embedding_VD.shape[1:], found=gain_D.shape)
    if positions_T.shape != ids_T.shape:
        raise ShapeError("positions", expected=ids_T.shape, found=positions_T.shape)
    if ids_T.numel() == 0:
        return embed_rows_reference(embedding_VD, ids_T, gain_D, table_P2R, positions_T)
    run = choose("embed_rows", embedding_VD, embed_rows_reference, embed_rows_triton)
    return run(embedding_VD, ids_T, gain_D, table_P2R, positions_T)


def gather_rows(embedding_VD: Tensor, ids: Tensor) -> Tensor:
    """Rows of an embedding, as `torch.nn.functional.embedding` gathers them.

    On a GPU and without gradients by indexing: for few ids torch's own takes 6 us there, where this takes 1.4
    (`benchmarks/gpu_profile --kind dflash`).

    Args:
        embedding_VD: any float dtype.
        ids: int64 [...], below V.
    Returns:
        [..., D].
    """
    if embedding_VD.device.type == "cuda" and not needs_gradient(embedding_VD):
        return embedding_VD[ids]
    return functional.embedding(ids, embedding_VD)
