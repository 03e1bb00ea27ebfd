"""A whole decoder layer, or all of them, in one call of the native library, where their attention is native, too.

It gives the bits that the operations of `rows.py` and `attention.py` give one after the other; what is saved is the
way from one to the next. B requests, T rows per request, R flat rows, D width, U convolution taps of both sides.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.ops.native.attention import InLayer
from paceline.ops.native.build import loaded_library
from paceline.ops.native.rows import NativeWeight
from paceline.ops.native.scratch import scratch


class WeightFields(ctypes.Structure):
    """What the C files call Weight, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("form", ctypes.c_int32),
    )

    @classmethod
    def of(cls, weight: NativeWeight) -> WeightFields:
        """The fields of a weight, which has to outlive them."""
        bias = None if weight.bias is None else weight.bias.data_ptr()
        return cls(weight.panels.data_ptr(), bias, weight.num_inputs, weight.num_outputs, weight.form)


class _Convolution(ctypes.Structure):
    """The struct of the C file, field by field."""

    _fields_ = (("projection", WeightFields), ("base", ctypes.c_void_p), ("num_taps", ctypes.c_int64))

    @classmethod
    def of(cls, convolution: NativeConvolution | None) -> _Convolution:
        if convolution is None:
            return cls()
        base_UD = convolution.base_UD
        assert base_UD.dtype == torch.float32 and base_UD.is_contiguous(), "as the native form makes it"
        return cls(WeightFields.of(convolution.projection), base_UD.data_ptr(), base_UD.shape[0] // 2)


class _Layer(ctypes.Structure):
    """The struct of the C file, field by field."""

    _fields_ = (
        ("qkv", WeightFields),
        ("o", WeightFields),
        ("gate_up", WeightFields),
        ("down", WeightFields),
        ("around_attention", _Convolution),
        ("around_mlp", _Convolution),
        ("input_gain", ctypes.c_void_p),
        ("mlp_gain", ctypes.c_void_p),
        ("q_gain", ctypes.c_void_p),
        ("k_gain", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class _Pass(ctypes.Structure):
    """The struct of the C file, field by field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("rotated", ctypes.c_int64),
        ("offset", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
    )


class NativeConvolution(NamedTuple):
    """Both sides of a `GroupedConvolution`.

    Attributes:
        projection: gives what a row adds to the taps of both.
        base_UD: float32, the taps before the sublayer, then as many behind it.
    """

    projection: NativeWeight
    base_UD: Tensor


class LayerCall:
    """A decoder layer's weights, their addresses settled once.

    Attributes:
        address: of all of them.
        scratch_width: numbers per row that a call needs beside its results.

    Args:
        qkv: queries, keys and values of the normed stream.
        o: back into the stream.
        gate_up: gated.
        down: back into the stream.
        gains: of the norms before attention and before the MLP.
        qk_gains: of the norms of queries and keys; None without them.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_size: of both.
        eps: of all norms.
        convolutions: around attention and around the MLP; None without them.
    """

    def __init__(
        self,
        *,
        qkv: NativeWeight,
        o: NativeWeight,
        gate_up: NativeWeight,
        down: NativeWeight,
        gains: tuple[Tensor, Tensor],
        qk_gains: tuple[Tensor, Tensor] | None,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        eps: float,
        convolutions: tuple[NativeConvolution, NativeConvolution] | None = None,
    ) -> None:
        assert gate_up.is_gated and not down.is_gated, "the MLP's first product is the gated one"
        self._held = (qkv, o, gate_up, down, gains, qk_gains, convolutions)  # their memory has to outlive this
        addresses = [gain.data_ptr() for gain in (*gains, *(qk_gains or ()))]
        self._layer = _Layer(
            *(WeightFields.of(weight) for weight in (qkv, o, gate_up, down)),
            *(_Convolution.of(convolution) for convolution in convolutions or (None, None)),
            *addresses,
            *([] if qk_gains else [None, None]),
            o.num_outputs,
            num_heads,
            num_kv_heads,
            head_size,
            eps,
        )
        self.scratch_width = 2 * o.num_outputs + qkv.num_outputs + o.num_inputs + down.num_inputs
        if convolutions is not None:
            self.scratch_width += o.num_outputs + max(each.projection.num_outputs for each in convolutions)
        self._run, self.address = loaded_library().paceline_layer, ctypes.addressof(self._layer)

    def __deepcopy__(self, _memo: object) -> LayerCall:
        """Itself: nothing of it ever changes, and addresses are not to be copied."""
        return self

    def __call__(
        self,
        x_BTD: Tensor,
        rows: tuple[Tensor, Tensor],
        attend: InLayer,
        layer: int,
        offset_R: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the layer.

        Args:
            x_BTD: bf16, the stream before it; stays as it is.
            rows: from `expand_rotary`, in bf16, for channels in halves.
            attend: of this pass.
            layer: its index for `attend`.
            offset_R: int64, each flat row's index in its own block, for convolutions; None where all are one block.
        """
        y_BTD = torch.empty(x_BTD.shape, dtype=torch.bfloat16)
        with _pass(x_BTD, y_BTD, rows, attend, layer, self.scratch_width, offset_R) as given:
            self._run(self.address, given)
        return y_BTD


class LayersCall:
    """Decoder layers of one size, one behind the other.

    Args:
        calls: of each.
    """

    def __init__(self, calls: Sequence[LayerCall]) -> None:
        self.calls = tuple(calls)
        self._addresses = (ctypes.c_void_p * len(calls))(*(call.address for call in calls))
        self._scratch_width = max(call.scratch_width for call in calls)
        self._run = loaded_library().paceline_layers

    def __deepcopy__(self, _memo: object) -> LayersCall:
        """Itself, as with `LayerCall`."""
        return self

    def __call__(
        self,
        x_BTD: Tensor,
        rows: tuple[Tensor, Tensor],
        attend: InLayer,
        key_stride: int,
        offset_R: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after each of the layers, [layers, B, T, D].

        Args:
            x_BTD: as for one layer.
            rows: as for one layer.
            attend: of this pass, in which rows see the same in every layer.
            key_stride: from `attend`.
            offset_R: as for one layer.
        """
        y = torch.empty(len(self.calls), *x_BTD.shape, dtype=torch.bfloat16)
        with _pass(x_BTD, y, rows, attend, 0, self._scratch_width, offset_R) as given:
            self._run(ctypes.addressof(self._addresses), len(self.calls), key_stride, given)
        return y


@contextlib.contextmanager
def _pass(
    x_BTD: Tensor,
    y: Tensor,
    rows: tuple[Tensor, Tensor],
    attend: InLayer,
    layer: int,
    scratch_width: int,
    offset_R: Tensor | None,
) -> Iterator[int]:
    """The address of what a call reads and writes, good as long as the memory behind it is held here."""
    assert offset_R is None or (offset_R.dtype == torch.int64 and offset_R.is_contiguous()), "read by its address"
    x_BTD, cosine, sine = x_BTD.contiguous(), rows[0].contiguous(), rows[1].contiguous()
    num_rows = x_BTD.shape[0] * x_BTD.shape[1]
    working = scratch(num_rows * scratch_width)
    given = _Pass(
        x_BTD.data_ptr(),
        y.data_ptr(),
        working.data_ptr(),
        cosine.data_ptr(),
        sine.data_ptr(),
        num_rows,
        cosine.shape[-1],
        None if offset_R is None else offset_R.data_ptr(),
        attend.in_layer(layer),
        attend.num_threads,
    )
    yield ctypes.addressof(given)
