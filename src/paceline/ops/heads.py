"""What is done with the heads of a q/k/v projection, whoever makes it: their form, where keys and values go, and what
`project_heads.py` and `place_heads.py` launch alike.

    q, k = turn( round( q / sqrt(mean(q^2) + eps) * q_gain ), position )      (without q/k norms: turn(round(q)))

T rows, D width, N query heads, M key/value heads, H head size, R pairs that are turned, X = (N + 2M) * H.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.rms_norm import rms_norm_reference
from paceline.ops.rotary import expand_rotary, turn_heads


class HeadForm(NamedTuple):
    """What a layer does with its heads, the same at every call.

    Attributes:
        num_heads: N.
        eps: of all norms.
        is_neox_style: the pairing of turned channels.
        value_scale: multiplies the values.
    """

    num_heads: int
    eps: float
    is_neox_style: bool = True
    value_scale: float = 1.0


class Cells(NamedTuple):
    """Where keys and values go.

    Attributes:
        planes: [2, M, blocks, block_size, H], rows of a head contiguous; written in place.
        rows_T: int64, block * block_size + offset. None twice, but where nobody reads.
    """

    planes: Tensor
    rows_T: Tensor


def finish_heads_reference(
    qkv_TX: Tensor,
    qk_gains: tuple[Tensor, Tensor] | None,
    turns_T2R: Tensor,
    cells: Cells,
    form: HeadForm,
    dtype: torch.dtype,
) -> Tensor:
    """What follows the projection, whose sums may be wider than the rows' dtype."""
    num_kv_heads, head_size = cells.planes.shape[1], cells.planes.shape[4]
    q, k, v = qkv_TX.unflatten(-1, (-1, head_size)).split((form.num_heads, num_kv_heads, num_kv_heads), dim=-2)
    if qk_gains is not None:
        q, k = (rms_norm_reference(heads.float(), gain, form.eps) for heads, gain in zip((q, k), qk_gains, strict=True))
    turns = expand_rotary(turns_T2R, dtype, is_neox_style=form.is_neox_style)
    q, k = (turn_heads(heads.to(dtype), turns, is_neox_style=form.is_neox_style) for heads in (q, k))
    v = v.to(dtype)
    if form.value_scale != 1.0:
        v = v * form.value_scale
    by_row = cells.planes.flatten(2, 3)
    by_row[0].index_copy_(1, cells.rows_T, k.transpose(0, 1))
    by_row[1].index_copy_(1, cells.rows_T, v.transpose(0, 1))
    return q.contiguous()


def check_heads(num_outputs: int, num_rows: int, turns_T2R: Tensor, cells: Cells, form: HeadForm) -> None:
    """Refuse what does not fit.

    Raises:
        ShapeError: the projection does not have these heads, or rows, turns and cells differ in number.
    """
    num_kv_heads, head_size = cells.planes.shape[1], cells.planes.shape[4]
    needed = (form.num_heads + 2 * num_kv_heads) * head_size
    if num_outputs != needed or head_size % 2:
        raise ShapeError("heads", expected=f"{needed} outputs for heads of {head_size}", found=[num_outputs])
    if turns_T2R.shape[:2] != (num_rows, 2) or 2 * turns_T2R.shape[2] > head_size:
        expected = f"[{num_rows}, 2, at most {head_size // 2}]"
        raise ShapeError("turns", expected=expected, found=turns_T2R.shape)
    if cells.rows_T.shape != (num_rows,):
        raise ShapeError("rows", expected=[num_rows], found=cells.rows_T.shape)


class HeadsLaunch(NamedTuple):
    """The common part of a launch.

    Attributes:
        q_TNH: the queries, which the kernel writes.
        operands: both gains, turns, cells' rows, planes, queries. Without norms the rows stand in place of the gains,
            and are not read as such.
        numbers: strides of the planes' sides and heads, eps, what multiplies the values.
        constants: sizes, the pairing, and whether there are norms.
    """

    q_TNH: Tensor
    operands: tuple[Tensor, ...]
    numbers: tuple[int, int, float, float]
    constants: dict[str, Any]


def heads_launch(
    x_TX: Tensor, qk_gains: tuple[Tensor, Tensor] | None, turns_T2R: Tensor, cells: Cells, form: HeadForm
) -> HeadsLaunch:
    """Prepare a launch; arguments as for `place_heads`, but for `x_TX`, which are the rows that the kernel reads."""
    num_kv_heads, head_size = cells.planes.shape[1], cells.planes.shape[4]
    q_TNH = torch.empty((x_TX.shape[0], form.num_heads, head_size), dtype=x_TX.dtype, device=x_TX.device)
    constants = {
        "NUM_HEADS": form.num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_SIZE": head_size,
        "TURNED": turns_T2R.shape[2],
        "IS_NEOX": form.is_neox_style,
        "HAS_QK_NORM": qk_gains is not None,
    }
    return HeadsLaunch(
        q_TNH,
        (*(qk_gains or (x_TX, x_TX)), turns_T2R.contiguous(), cells.rows_T.contiguous(), cells.planes, q_TNH),
        (cells.planes.stride(0), cells.planes.stride(1), form.eps, form.value_scale),
        constants,
    )
