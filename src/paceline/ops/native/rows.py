"""A layer's operations between attention and attention on rows of bf16, each one call of the native library.

Each is the operation of the same name elsewhere in `ops` with one rounding at the end where those round in between; a
row's bits depend on that row alone. Tensors are bf16 on a CPU. T rows (any leading dimensions), D width, I inputs, O
outputs, N query heads, M key/value heads, H head size, R turned channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from paceline.ops.huge_pages import lay_on_huge_pages
from paceline.ops.native.build import library, loaded_library

PANEL: Final = 32
_HALF: Final = PANEL // 2
_PLAIN, _ADDED, _GATED = range(3)
BFLOATS, CODES_4, CODES_8, INTEGERS_4, INTEGERS_8 = range(5)  # forms of a weight, as the C files number them


def can_run(weight: Tensor) -> bool:
    """Whether operations with this weight can be native: bf16 on a CPU that has the library."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and library() is not None


def can_pack(weight_OI: Tensor) -> bool:
    """Whether products with this weight can be native: what `can_run` asks, and pairs of inputs."""
    return weight_OI.shape[1] % 2 == 0 and weight_OI.numel() > 0 and can_run(weight_OI)


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight in the order in which products read it.

    Attributes:
        panels: bf16 [O / 32, I / 2, 32, 2], filled up with zeros; or codes, see `quantized.py`.
        bias: float32, filled up alike.
        num_inputs: I.
        num_outputs: O.
        is_gated: a panel holds 16 gates, then the 16 outputs that they let pass.
        form: of the panels.
    """

    panels: Tensor
    bias: Tensor | None
    num_inputs: int
    num_outputs: int
    is_gated: bool = False
    form: int = BFLOATS


def pack(weight_OI: Tensor, bias_O: Tensor | None = None, *, is_gated: bool = False) -> NativeWeight:
    """Copy a weight that `can_pack` into panels.

    Args:
        weight_OI: the weight; where it is gated, all gates before all that they let pass.
        bias_O: added to every row.
        is_gated: see `NativeWeight`.
    """
    num_outputs, num_inputs = weight_OI.shape
    rows = in_panels(weight_OI.detach(), is_gated=is_gated)
    panels = rows.view(-1, PANEL, num_inputs // 2, 2).transpose(1, 2).contiguous()
    lay_on_huge_pages(panels.data_ptr(), panels.numel() * panels.element_size())
    return NativeWeight(panels, bias_in_panels(bias_O, is_gated=is_gated), num_inputs, num_outputs, is_gated)


def bias_in_panels(bias_O: Tensor | None, *, is_gated: bool) -> Tensor | None:
    """A bias in float32 and in the order of the panels."""
    return None if bias_O is None else in_panels(bias_O.detach().float().unsqueeze(1), is_gated=is_gated).flatten()


def in_panels(rows_OI: Tensor, *, is_gated: bool) -> Tensor:
    """The rows in the order of the panels, and zeros to fill the last one."""
    if not is_gated:
        return torch.nn.functional.pad(rows_OI, (0, 0, 0, -rows_OI.shape[0] % PANEL)).contiguous()
    gates, others = (
        torch.nn.functional.pad(part, (0, 0, 0, -part.shape[0] % _HALF)).view(-1, _HALF, part.shape[1])
        for part in rows_OI.chunk(2)
    )
    return torch.stack((gates, others), dim=1).view(-1, rows_OI.shape[1])


def linear(
    x_TI: Tensor,
    weight: NativeWeight,
    *,
    gain_I: Tensor | None = None,
    eps: float = 0.0,
    residual_TO: Tensor | None = None,
) -> Tensor:
    """x @ W^T + b, [..., I] to [..., O]; a gated weight gives silu(first half) * second half, [..., O / 2].

    Args:
        x_TI: rows.
        weight: from `pack`.
        gain_I: rows are first normed with this gain, as `rms_norm` does.
        eps: of that norm.
        residual_TO: added to the result before it is rounded; not beside a gated weight.
    """
    num_inputs = weight.num_inputs
    rows = flat_rows(x_TI, num_inputs)
    num_outputs = weight.num_outputs // 2 if weight.is_gated else weight.num_outputs
    y = torch.empty(*x_TI.shape[:-1], num_outputs, dtype=torch.bfloat16)
    normed = torch.empty_like(rows, memory_format=torch.contiguous_format) if gain_I is not None else None
    if residual_TO is not None:
        residual_TO = residual_TO.contiguous()
    loaded_library().paceline_product(
        rows.data_ptr(),
        rows.stride(0),
        weight.panels.data_ptr(),
        weight.form,
        None if weight.bias is None else weight.bias.data_ptr(),
        None if gain_I is None else gain_I.data_ptr(),
        eps,
        None if normed is None else normed.data_ptr(),
        None if residual_TO is None else residual_TO.data_ptr(),
        y.data_ptr(),
        rows.shape[0],
        num_inputs,
        weight.num_outputs,
        _GATED if weight.is_gated else _ADDED if residual_TO is not None else _PLAIN,
        torch.get_num_threads(),
    )
    return y


def norm(x_TD: Tensor, gain_D: Tensor, *, eps: float) -> Tensor:
    """`rms_norm` of the last dimension."""
    width = x_TD.shape[-1]
    rows = flat_rows(x_TD, width)
    y = torch.empty(x_TD.shape, dtype=torch.bfloat16)
    loaded_library().paceline_norm(
        rows.data_ptr(),
        rows.stride(0),
        gain_D.data_ptr(),
        eps,
        y.data_ptr(),
        rows.shape[0],
        width,
        torch.get_num_threads(),
    )
    return y


def turn_heads_(
    qkv_TC: Tensor,
    rows: tuple[Tensor, Tensor],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    gains: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Norm, where there are gains, and turn the queries and keys of [..., (N + 2 M) * H], in place.

    Args:
        qkv_TC: contiguous rows of queries, keys and values.
        rows: from `expand_rotary`, in bf16, for channels in halves.
        num_heads: N.
        num_kv_heads: M.
        head_size: H.
        gains: of queries and keys, [H].
        eps: of their norms.
    """
    assert qkv_TC.is_contiguous(), "rows are changed in place"
    cosine, sine = (part.contiguous() for part in rows)
    stride = qkv_TC.shape[-1]
    loaded_library().paceline_turn_heads(
        qkv_TC.data_ptr(),
        qkv_TC.numel() // stride,
        stride,
        num_heads,
        num_kv_heads,
        head_size,
        cosine.data_ptr(),
        sine.data_ptr(),
        cosine.shape[-1],
        None if gains is None else gains[0].data_ptr(),
        None if gains is None else gains[1].data_ptr(),
        eps,
        torch.get_num_threads(),
    )


def can_look_up_turns(table_P2R: Tensor, positions: Tensor, dtype: torch.dtype) -> bool:
    """Whether `turns` takes these and gives what is asked for."""
    is_fit = dtype == torch.bfloat16 and table_P2R.dtype == torch.float32 and positions.dtype == torch.int64
    return is_fit and table_P2R.is_cpu and table_P2R.is_contiguous() and library() is not None


def turns(table_P2R: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_turns` for channels in halves: bf16 cosines and signed sines, [..., 1, R] both."""
    num_positions, _, half = table_P2R.shape
    positions = positions.contiguous()
    both = torch.empty(2, *positions.shape, 1, 2 * half, dtype=torch.bfloat16)
    cosines, sines = both.unbind()
    is_outside = loaded_library().paceline_turns(
        table_P2R.data_ptr(),
        positions.data_ptr(),
        cosines.data_ptr(),
        sines.data_ptr(),
        positions.numel(),
        num_positions,
        half,
    )
    if is_outside:  # as torch would say it
        raise IndexError(f"positions reach beyond {num_positions - 1}, the last one of the table")
    return cosines, sines


def convolve(
    x_TD: Tensor,
    base_UD: Tensor,
    delta_TC: Tensor,
    *,
    first_tap: int,
    num_taps: int,
    offset_T: Tensor | None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """`grouped_convolution` of flat rows with some of the taps at hand.

    Args:
        x_TD: rows of draft blocks.
        base_UD: float32, of all taps.
        delta_TC: what each row adds to them: for each tap, one number per group.
        first_tap: the first of the taps to take.
        num_taps: how many of them.
        offset_T: int64, each row's index in its own block; None where all rows are one block.
        residual_TD: added to the result before it is rounded.
    """
    x_TD, delta_TC = x_TD.contiguous(), delta_TC.contiguous()
    width, stride = x_TD.shape[-1], delta_TC.shape[-1]
    num_groups = stride // base_UD.shape[0]
    y = torch.empty(x_TD.shape, dtype=torch.bfloat16)
    if residual_TD is not None:
        residual_TD = residual_TD.contiguous()
    loaded_library().paceline_convolve(
        x_TD.data_ptr(),
        base_UD.data_ptr() + first_tap * width * base_UD.element_size(),
        delta_TC.data_ptr() + first_tap * num_groups * delta_TC.element_size(),
        stride,
        None if offset_T is None else offset_T.data_ptr(),
        None if residual_TD is None else residual_TD.data_ptr(),
        y.data_ptr(),
        x_TD.numel() // width,
        width,
        num_groups,
        num_taps,
        torch.get_num_threads(),
    )
    return y


def flat_rows(x: Tensor, width: int) -> Tensor:
    """x as rows [T, width] whose numbers lie together; a view where it can be one."""
    assert x.shape[-1] == width and x.dtype == torch.bfloat16, "rows of the weight's width, in bf16"
    rows = x.reshape(-1, width)
    return rows if rows.stride(1) == 1 or width == 1 else rows.contiguous()
