"""The context keys and values of a drafter, from a target's taps to the rows of the planes, in one native call.

It gives the bits that the operations of `rows.py` give one after the other, and those of `write_context_kv` with keys
that are rounded once less. B requests, T rows of each, K taps, D width of the drafter, X width of a tap, L layers, M
key/value heads, H head size, P positions of the table, R pairs of turned channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.native.attention import LARGEST_HEAD
from paceline.ops.native.build import loaded_library
from paceline.ops.native.layer import WeightFields
from paceline.ops.native.rows import NativeWeight, flat_rows
from paceline.ops.native.scratch import scratch


class _Context(ctypes.Structure):
    """The struct of the C file, field by field."""

    _fields_ = (
        ("features", WeightFields),
        ("kv", WeightFields),
        ("tap_gains", ctypes.c_void_p),
        ("feature_gain", ctypes.c_void_p),
        ("k_gains", ctypes.c_void_p),
        ("num_taps", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("value_scale", ctypes.c_float),
    )


class _Pass(ctypes.Structure):
    """The struct of the C file, field by field."""

    _fields_ = (
        ("taps", ctypes.c_void_p),
        ("tap_strides", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("stored_at", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_positions", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("planes", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("layer_stride", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
    )


def can_store(planes: Tensor, table_P2R: Tensor) -> bool:
    """Whether a call can write to such planes and read such a table of positions."""
    return (
        planes.dtype == torch.bfloat16
        and planes.device.type == "cpu"
        and planes.shape[-1] <= LARGEST_HEAD
        and table_P2R.dtype == torch.float32
        and 2 * table_P2R.shape[-1] <= planes.shape[-1]
    )


class ContextCall:
    """What a drafter projects context with, its addresses settled once.

    Args:
        num_taps: K.
        tap_gains_KX: bf16, of the taps' norms; None where taps are taken as they are.
        features: of the joined taps.
        feature_gain_D: bf16, of their norm.
        kv: of the features, to the keys and values of all layers, a layer's keys before its values.
        k_gain_LH: bf16, of the layers' key norms.
        eps: of all norms.
        value_scale: multiplies the values.
    """

    def __init__(
        self,
        *,
        num_taps: int,
        tap_gains_KX: Tensor | None,
        features: NativeWeight,
        feature_gain_D: Tensor,
        kv: NativeWeight,
        k_gain_LH: Tensor,
        eps: float,
        value_scale: float,
    ) -> None:
        (num_layers, head_size), self._num_taps = k_gain_LH.shape, num_taps
        self._width = features.num_inputs // num_taps
        num_heads = kv.num_outputs // (2 * num_layers * head_size)
        gains = [None if gain is None else gain.contiguous() for gain in (tap_gains_KX, feature_gain_D, k_gain_LH)]
        # What follows reads memory by these numbers alone.
        assert all(gain is None or gain.dtype == torch.bfloat16 for gain in gains), "gains in the dtype of the rows"
        assert tap_gains_KX is None or tap_gains_KX.shape == (num_taps, self._width), "a gain for each tap"
        assert feature_gain_D.shape == (features.num_outputs,) and kv.num_inputs == features.num_outputs, "of features"
        assert kv.num_outputs == 2 * num_layers * num_heads * head_size, "whole heads of all layers"
        self._held = (features, kv, gains)  # their memory has to outlive this
        self._context = _Context(
            WeightFields.of(features),
            WeightFields.of(kv),
            *(None if gain is None else gain.data_ptr() for gain in gains),
            num_taps,
            num_layers,
            num_heads,
            head_size,
            eps,
            value_scale,
        )
        self._of_plane = (num_layers, 2, num_heads, head_size)
        self._scratch_width = features.num_inputs + features.num_outputs + kv.num_outputs
        self._run, self._address = loaded_library().paceline_write_context, ctypes.addressof(self._context)
        self._addresses, self._strides = ctypes.c_void_p * num_taps, ctypes.c_int64 * num_taps

    def __deepcopy__(self, _memo: object) -> ContextCall:
        """Itself: nothing of it ever changes, and addresses are not to be copied."""
        return self

    def __call__(
        self, taps: Sequence[Tensor], rows_BT: Tensor, positions_BT: Tensor, planes: Tensor, table_P2R: Tensor
    ) -> None:
        """Store the context keys and values of all layers in their rows of the planes.

        Args:
            taps: K of [B, T, X], any float dtype; cast to bf16.
            rows_BT: int64, physical rows; one of block 0 for what nobody reads.
            positions_BT: int64, what the keys are turned by; those past the table are turned as its last one.
            planes: that `can_store`, [L, 2, M, blocks, block_size, H], contiguous, written in place.
            table_P2R: float32 rows of `rotary_table`, contiguous, of pairs in halves.
        Raises:
            ShapeError: the tensors do not fit each other.
            IndexError: a row that the planes have not, or a negative position; nothing was written.
        """
        of_plane = (*planes.shape[:3], planes.shape[5])
        if of_plane != self._of_plane:
            raise ShapeError("planes", expected=self._of_plane, found=of_plane)
        if len(taps) != self._num_taps:
            raise ShapeError("taps", expected=f"{self._num_taps} of them", found=[len(taps)])
        num_rows = rows_BT.numel()
        if positions_BT.shape != rows_BT.shape:
            raise ShapeError("positions", expected=rows_BT.shape, found=positions_BT.shape)
        of_tap = (*rows_BT.shape, self._width)
        for tap in taps:
            if tap.shape != of_tap:
                raise ShapeError("tap", expected=of_tap, found=tap.shape)
        if num_rows == 0:
            return
        assert can_store(planes, table_P2R), "the caller asks"
        assert planes.is_contiguous() and table_P2R.is_contiguous(), "as the cache and the backbone make them"
        assert rows_BT.dtype == positions_BT.dtype == torch.int64, "read by their addresses"
        rows_BT, positions_BT = rows_BT.contiguous(), positions_BT.contiguous()
        streams = [_as_rows(tap) for tap in taps]
        addresses = self._addresses(*(stream.data_ptr() for stream, _ in streams))
        strides = self._strides(*(stride for _, stride in streams))
        working = scratch(num_rows * self._scratch_width)
        given = _Pass(
            ctypes.addressof(addresses),
            ctypes.addressof(strides),
            positions_BT.data_ptr(),
            rows_BT.data_ptr(),
            table_P2R.data_ptr(),
            num_rows,
            table_P2R.shape[0],
            table_P2R.shape[-1],
            planes.data_ptr(),
            working.data_ptr(),
            *planes.stride()[:3],
            torch.get_num_threads(),
        )
        if self._run(self._address, ctypes.addressof(given)):
            raise IndexError(f"rows {rows_BT.tolist()} reach beyond the planes, or positions below 0")


def _as_rows(tap_BTX: Tensor) -> tuple[Tensor, int]:
    """A tap in bf16 whose rows are equally far apart, and how far; itself where it can be."""
    if tap_BTX.dtype == torch.bfloat16 and tap_BTX.is_contiguous():
        return tap_BTX, tap_BTX.shape[-1]
    rows = flat_rows(tap_BTX.to(torch.bfloat16), tap_BTX.shape[-1])
    return rows, rows.stride(0)
