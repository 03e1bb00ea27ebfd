"""Attention of a batch over keys in blocks and over its own new rows: one call of the native library per layer.

B requests, T rows per request, N query heads, M key/value heads, H head size, S positions.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from typing import Final

import torch
from torch import Tensor

from paceline.ops.native.build import loaded_library

LARGEST_HEAD: Final = 1024  # of the C file
_ROWS_OF_SCRATCH: Final = 24 + 4  # QUERY_TILE of layers.h, and the pointers behind
_LANES: Final = 16
_NO_WINDOW: Final = 2**62  # more than any context has


class _Attention(ctypes.Structure):
    """The struct of the C file, field by field."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("new_k", ctypes.c_void_p),
        ("new_v", ctypes.c_void_p),
        ("new_stride", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("write_rows", ctypes.c_void_p),
        ("lows", ctypes.c_void_p),
        ("highs", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("num_requests", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("scratch", ctypes.c_void_p),
        ("scratch_stride", ctypes.c_int64),
    )


class InLayer(ABC):
    """Attention that a whole native layer can run by itself.

    Attributes:
        num_threads: of the pass.
    """

    num_threads: int

    @abstractmethod
    def in_layer(self, layer: int) -> int:
        """The address of what the C files call Attention, for a layer; good until this is called again."""

    def key_stride(self) -> int | None:
        """How many numbers the keys of neighbouring layers lie apart; None where layers differ in what rows see."""
        return None


class BlockedAttention:
    """Attention of one pass, its addresses settled once.

    Attributes:
        num_threads: of every call.

    Args:
        planes: bf16 [layers, 2, M, blocks, block_size, H], keys before values.
        table: int32 [slots, most blocks], contiguous; read at every call.
        slots_B: int64, rows of the table.
        lengths_B: int64, positions below are read from the blocks, those from there on are the new rows.
        num_rows: T.
        end: at least the largest position that anybody sees, plus 1.
        write_rows_BT: int64, physical rows that take in the new keys and values; None leaves them out of the blocks.
    """

    def __init__(
        self,
        planes: Tensor,
        table: Tensor,
        slots_B: Tensor,
        lengths_B: Tensor,
        *,
        num_rows: int,
        end: int,
        write_rows_BT: Tensor | None,
    ) -> None:
        num_kv_heads, block_size, head_size = planes.shape[2], planes.shape[4], planes.shape[5]
        self._planes, self.num_threads = planes, torch.get_num_threads()
        self._of_layer = planes.stride(0) * planes.element_size()
        self._of_values = planes.stride(1) * planes.element_size()
        self._first = planes.data_ptr()
        # What follows reads memory by these numbers alone.
        assert planes.is_contiguous() and table.stride(1) == 1 and table.dtype == torch.int32, "as the cache makes them"
        assert int(lengths_B.max()) + num_rows <= end, "nobody sees further than that"
        assert end - num_rows <= table.shape[1] * block_size, "what is read lies in blocks of the table"
        stride = -(-end // _LANES) * _LANES
        self._scratch = torch.empty(self.num_threads * _ROWS_OF_SCRATCH * stride, dtype=torch.float32)
        self._held = (table, slots_B, lengths_B, write_rows_BT)  # their memory has to outlive this
        run = self._run = _Attention()
        run.head_stride = planes.stride(2)
        run.table, run.table_stride, run.block_size = table.data_ptr(), table.stride(0), block_size
        run.slots, run.lengths = slots_B.data_ptr(), lengths_B.data_ptr()
        run.write_rows = None if write_rows_BT is None else write_rows_BT.data_ptr()
        run.num_requests, run.num_rows = len(slots_B), num_rows
        run.num_kv_heads, run.head_size, run.scale = num_kv_heads, head_size, 1.0 / math.sqrt(head_size)
        run.scratch, run.scratch_stride = self._scratch.data_ptr(), stride
        loaded = loaded_library()
        self._attend = loaded.paceline_attend
        self._address = ctypes.addressof(run)
        self._of_call: tuple[Tensor | None, ...] = ()

    def __call__(
        self,
        layer: int,
        q_BTNH: Tensor,
        k_BTMH: Tensor,
        v_BTMH: Tensor,
        lows_BT: Tensor,
        highs_BT: Tensor,
        *,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer, and keep the new rows where they have places.

        Args:
            layer: its index in the planes.
            q_BTNH: bf16 queries.
            k_BTMH: bf16 keys of the new rows.
            v_BTMH: bf16 values of the new rows.
            lows_BT: int32, the first position that each row sees.
            highs_BT: int32, the first that it does not see any more.
            sink_N: one logit per query head that joins the softmax's denominator.
        Returns:
            bf16 [B, T, N, H], contiguous.
        """
        q_BTNH, k_BTMH, v_BTMH = _heads_together(q_BTNH), _heads_together(k_BTMH), _heads_together(v_BTMH)
        if k_BTMH.stride(1) != v_BTMH.stride(1):
            k_BTMH, v_BTMH = k_BTMH.contiguous(), v_BTMH.contiguous()
        sinks = None if sink_N is None else sink_N.detach().float().contiguous()
        y = torch.empty(q_BTNH.shape, dtype=torch.bfloat16)
        run = self._run
        self.in_layer(layer, lows_BT, highs_BT, sinks)
        run.q, run.q_stride = q_BTNH.data_ptr(), q_BTNH.stride(1)
        run.new_k, run.new_v, run.new_stride = k_BTMH.data_ptr(), v_BTMH.data_ptr(), k_BTMH.stride(1)
        run.y, run.num_heads = y.data_ptr(), q_BTNH.shape[2]
        self._attend(self._address, self.num_threads)
        return y

    @property
    def key_stride(self) -> int:
        """How many numbers the keys of neighbouring layers lie apart."""
        return self._planes.stride(0)

    def in_layer(self, layer: int, lows_BT: Tensor, highs_BT: Tensor, sink_N: Tensor | None = None) -> int:
        """The address of the struct, set up for a layer whose queries and rows whoever runs it fills in.

        Args:
            layer: as for a call.
            lows_BT: as for a call.
            highs_BT: as for a call.
            sink_N: as for a call, in float32.
        """
        run = self._run
        run.keys = keys = self._first + layer * self._of_layer
        run.values = keys + self._of_values
        self._of_call = (lows_BT, highs_BT, sink_N)  # whoever runs it reads their memory
        run.lows, run.highs = lows_BT.data_ptr(), highs_BT.data_ptr()
        run.sinks = None if sink_N is None else sink_N.data_ptr()
        return self._address


def seen_spans(
    starts_B: Tensor, firsts_B: Tensor | None, num_rows: int, window: int | None, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The first position that each row sees, and the first that it does not see any more, int32 [B, T] both.

    Args:
        starts_B: int64, positions of the first rows; behind the last ones there are no keys.
        firsts_B: int64, nothing is seen below; None is 0 for all.
        num_rows: T.
        window: tokens that a row sees to either side, itself included; None is all.
        is_causal: no row sees a later one.
    """
    assert starts_B.dtype == torch.int64 and (firsts_B is None or firsts_B.dtype == torch.int64), "read by addresses"
    starts_B = starts_B.contiguous()
    firsts_B = None if firsts_B is None else firsts_B.contiguous()
    lows_BT, highs_BT = torch.empty(2, len(starts_B), num_rows, dtype=torch.int32).unbind()
    loaded_library().paceline_seen_spans(
        starts_B.data_ptr(),
        None if firsts_B is None else firsts_B.data_ptr(),
        lows_BT.data_ptr(),
        highs_BT.data_ptr(),
        len(starts_B),
        num_rows,
        _NO_WINDOW if window is None else window,
        is_causal,
    )
    return lows_BT, highs_BT


def _heads_together(rows_BTNH: Tensor) -> Tensor:
    """The rows with the heads of each lying together, and all rows equally far apart."""
    B, T, _, H = rows_BTNH.shape
    of_request, of_row, of_head, of_channel = rows_BTNH.stride()
    is_fit = of_channel == 1 and of_head == H and (B == 1 or of_request == T * of_row)
    return rows_BTNH if is_fit else rows_BTNH.contiguous()
