"""The end of the stacked context projection: norm and turn the keys, scale the values, store both for all layers.

    key[t, l, m]   = turn( round( k / sqrt(mean(k^2) + eps) * gain[l] ), position[t] )
    value[t, l, m] = v * value_scale

The norm is computed in float32 and rounded to the model's dtype once; keys are turned with cosines and sines in that
dtype, exactly as a layer treats the keys of its own rows. So kernel and reference differ by the order of float32 sums
alone: in bf16, where a rounding falls the other way, by a unit of the last place of the larger channel of a pair.
T rows, L layers, M key/value heads, H head size, P positions of the table, R rotated channels. A physical row of the
planes is block * block_size + offset; where it lies says nothing of its position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, tl, triton
from paceline.ops.rms_norm import rms_norm
from paceline.ops.rotary import expand_rotary, turn_heads


def write_context_kv_reference(
    kv_TLX: Tensor,
    k_gain_LH: Tensor,
    table_P2R: Tensor,
    positions_T: Tensor,
    rows_T: Tensor,
    planes: Tensor,
    eps: float,
    is_neox_style: bool,
    value_scale: float,
) -> None:
    """The definition."""
    head_size = planes.shape[-1]
    k_TLMH, v_TLMH = kv_TLX.unflatten(-1, (2, -1, head_size)).unbind(2)
    no_gain_H = torch.ones(head_size, dtype=torch.float32, device=planes.device)
    k_TLMH = rms_norm(k_TLMH.float(), no_gain_H, eps=eps) * k_gain_LH.float().unsqueeze(1)
    turned_as_T = positions_T.clamp(max=table_P2R.shape[0] - 1)
    turns = expand_rotary(table_P2R[turned_as_T].unsqueeze(1), kv_TLX.dtype, is_neox_style=is_neox_style)
    k_TLMH = turn_heads(k_TLMH.to(kv_TLX.dtype), turns, is_neox_style=is_neox_style)
    if value_scale != 1.0:
        v_TLMH = v_TLMH * value_scale
    by_row = planes.flatten(3, 4)
    by_row[:, 0].index_copy_(2, rows_T, k_TLMH.permute(1, 2, 0, 3))
    by_row[:, 1].index_copy_(2, rows_T, v_TLMH.permute(1, 2, 0, 3))


@kernel
def _write_context_kv_kernel(
    kv_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position_ptr: tl.tensor,
    row_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    num_positions: tl.tensor,
    num_heads: tl.tensor,
    layer_stride: tl.tensor,
    side_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    value_scale: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    position, stored_at = tl.load(position_ptr + row), tl.load(row_ptr + row)
    head, channel = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    is_channel = channel < HEAD_SIZE
    is_cell = (head < num_heads)[:, None] & is_channel[None, :]
    is_turned = channel < 2 * HALF
    if IS_NEOX:
        frequency = channel % HALF
        partner = tl.where(is_turned, (channel + HALF) % (2 * HALF), channel)
        is_first = channel < HALF
    else:
        frequency = channel // 2
        partner = tl.where(is_turned, channel ^ 1, channel)
        is_first = channel % 2 == 0
    dtype = planes_ptr.dtype.element_ty
    source = kv_ptr + (row * tl.num_programs(1) + layer) * (2 * num_heads * HEAD_SIZE)
    cell = head[:, None] * HEAD_SIZE + channel[None, :]
    partner_cell = head[:, None] * HEAD_SIZE + partner[None, :]
    k = tl.load(source + cell, mask=is_cell, other=0.0).to(tl.float32)
    other_k = tl.load(source + partner_cell, mask=is_cell, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(k * k, axis=1) / HEAD_SIZE + eps)
    gain = tl.load(gain_ptr + layer * HEAD_SIZE + channel, mask=is_channel, other=0.0)
    other_gain = tl.load(gain_ptr + layer * HEAD_SIZE + partner, mask=is_channel, other=0.0)
    k = (k * scale[:, None] * gain[None, :]).to(dtype).to(tl.float32)
    other_k = (other_k * scale[:, None] * other_gain[None, :]).to(dtype).to(tl.float32)
    table_row = table_ptr + tl.minimum(position, num_positions - 1) * (2 * HALF) + frequency
    cosine = tl.load(table_row, mask=is_turned, other=1.0).to(dtype).to(tl.float32)
    sine = tl.load(table_row + HALF, mask=is_turned, other=0.0).to(dtype).to(tl.float32)
    sine = tl.where(is_first, -sine, sine)
    turned = (k * cosine[None, :]).to(dtype).to(tl.float32) + other_k * sine[None, :]
    target = planes_ptr + layer * layer_stride + stored_at * HEAD_SIZE
    target_cell = head[:, None] * head_stride + channel[None, :]
    tl.store(target + target_cell, tl.where(is_turned[None, :], turned, k).to(dtype), mask=is_cell)
    v = tl.load(source + num_heads * HEAD_SIZE + cell, mask=is_cell, other=0.0).to(tl.float32)
    tl.store(target + side_stride + target_cell, (v * value_scale).to(dtype), mask=is_cell)


def write_context_kv_triton(
    kv_TLX: Tensor,
    k_gain_LH: Tensor,
    table_P2R: Tensor,
    positions_T: Tensor,
    rows_T: Tensor,
    planes: Tensor,
    eps: float,
    is_neox_style: bool,
    value_scale: float,
) -> None:
    """Launch one program per row and layer."""
    num_rows, num_layers, _ = kv_TLX.shape
    num_heads, head_size = planes.shape[2], planes.shape[5]
    with torch.cuda.device_of(planes):
        _write_context_kv_kernel[num_rows, num_layers](
            kv_TLX.contiguous(),
            k_gain_LH.float().contiguous(),
            table_P2R.contiguous(),
            positions_T.contiguous(),
            rows_T.contiguous(),
            planes,
            table_P2R.shape[0],
            num_heads,
            planes.stride(0),
            planes.stride(1),
            planes.stride(2),
            eps,
            value_scale,
            HEAD_SIZE=head_size,
            HALF=table_P2R.shape[-1],
            IS_NEOX=is_neox_style,
            HEADS=triton.next_power_of_2(num_heads),
            CHANNELS=triton.next_power_of_2(head_size),
        )


def write_context_kv(
    kv_TLX: Tensor,
    k_gain_LH: Tensor,
    table_P2R: Tensor,
    positions_T: Tensor,
    rows_T: Tensor,
    planes: Tensor,
    *,
    eps: float,
    is_neox_style: bool,
    value_scale: float = 1.0,
) -> None:
    """Store the context keys and values of all drafter layers in their rows of the planes.

    Args:
        kv_TLX: [T, L, 2 * M * H] in the planes' dtype, what the stacked projection gives: a layer's keys, then its
            values.
        k_gain_LH: gains of the layers' key norms.
        table_P2R: float32 rows of `rotary_table`, R here the number of pairs; positions past its end are turned as the
            last one.
        positions_T: int64, what the keys are turned by.
        rows_T: int64, physical rows; one of block 0 for what nobody reads. None twice, but in block 0.
        planes: [L, 2, M, blocks, block_size, H], contiguous, written in place.
        eps: of the key norm.
        is_neox_style: the pairing of turned channels.
        value_scale: multiplies the values.
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    num_layers, num_heads, head_size = planes.shape[0], planes.shape[2], planes.shape[5]
    num_rows = positions_T.shape[0]
    if kv_TLX.shape != (num_rows, num_layers, 2 * num_heads * head_size):
        expected = [num_rows, num_layers, 2 * num_heads * head_size]
        raise ShapeError("kv", expected=expected, found=kv_TLX.shape)
    if k_gain_LH.shape != (num_layers, head_size):
        raise ShapeError("k_gain", expected=[num_layers, head_size], found=k_gain_LH.shape)
    if rows_T.shape != (num_rows,):
        raise ShapeError("rows", expected=[num_rows], found=rows_T.shape)
    if num_rows == 0:
        return
    run = choose("write_context_kv", planes, write_context_kv_reference, write_context_kv_triton)
    run(kv_TLX, k_gain_LH, table_P2R, positions_T, rows_T, planes, eps, is_neox_style, value_scale)
