"""Contiguous key/value planes. One slot index addresses the target's keys and the drafter's context keys alike.

B requests, T new rows, M key/value heads, S positions, H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import CapacityError


class KeyValueCache:
    """Keys and values of every slot: [layers, 2, slots, M, capacity, H], keys before values, zero at first.

    A slot's context is a view, head-major, ready for attention. Zeros matter: a padded batch reads beyond a request's
    own length, where a masked key counts nothing but a NaN would (0 * NaN is NaN).

    Args:
        num_layers: layers that keep keys.
        num_slots: requests at the same time; one more slot is added for padding rows to write to.
        num_kv_heads: M.
        capacity: positions per slot, rows in flight included.
        head_size: H.
        dtype: the model's.
        device: the model's.

    Raises:
        CapacityError: the memory is not there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        capacity: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_slots + 1, num_kv_heads, capacity, head_size)
        try:
            self.planes = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch has one class for a full GPU and another for a full host
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            raise CapacityError(
                f"a cache of {num_slots} slots of {capacity} positions needs {num_bytes / 2**20:.0f} MiB; "
                f"{device} does not have them",
                hint="a smaller max_num_seqs or max_model_len",
            ) from error
        self.capacity = capacity
        self._layers: list[tuple[Tensor, Tensor]] = [(plane[0], plane[1]) for plane in self.planes]
        # Made once, each as the batch of one that attention takes: a decode step on a CPU feels every view it makes.
        self._slots = [list(zip(keys.split(1), values.split(1), strict=True)) for keys, values in self._layers]

    @property
    def num_bytes(self) -> int:
        """Memory of the planes."""
        return self.planes.numel() * self.planes.element_size()

    def write_rows(self, layer: int, slot: int, start: int, k_TMH: Tensor, v_TMH: Tensor) -> None:
        """Store one request's rows, [T, M, H] or as a batch of one, at positions start, start + 1, ..."""
        keys, values = self._slots[layer][slot]
        num_rows = k_TMH.shape[-3]
        keys.narrow(2, start, num_rows).copy_(k_TMH.transpose(-3, -2))
        values.narrow(2, start, num_rows).copy_(v_TMH.transpose(-3, -2))

    def write_batch(self, layer: int, slots_B: Tensor, positions_BT: Tensor, k_BTMH: Tensor, v_BTMH: Tensor) -> None:
        """Store rows of several requests at given positions, without reading a tensor on the host."""
        keys, values = self._layers[layer]
        slots_B1 = slots_B.unsqueeze(1)
        keys[slots_B1, :, positions_BT] = k_BTMH
        values[slots_B1, :, positions_BT] = v_BTMH

    def context(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of one slot's first `length` keys and values, each [1, M, length, H]."""
        keys, values = self._slots[layer][slot]
        return keys.narrow(2, 0, length), values.narrow(2, 0, length)

    def gather(self, layer: int, slots_B: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copies of several slots' first `length` keys and values, each [B, M, length, H]."""
        keys, values = self._layers[layer]
        return keys[:, :, :length].index_select(0, slots_B), values[:, :, :length].index_select(0, slots_B)

    def clear_rows(self, slot: int, start: int = 0) -> None:
        """Zero a slot's rows from a position on; needed only after NaN or infinity got into them."""
        self.planes[:, :, slot, :, start:] = 0
