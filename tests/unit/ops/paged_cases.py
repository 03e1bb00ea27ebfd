"""Attention over blocks for tests: shuffled blocks, NaN wherever nothing may be read, and the formula, row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class PagedCase:
    """Arguments of `paged_attention`, and the contiguous texts that they were made of.

    Attributes:
        keys: by request, float64 [L, M, H]: the whole text, the pass's rows included.
        values: the same.
    """

    q_BTNH: Tensor
    planes: Tensor
    table: Tensor
    slots_B: Tensor
    starts_B: Tensor
    tail: Tensor | None
    firsts_B: Tensor | None
    window: int | None
    is_causal: bool
    sink_N: Tensor | None
    scale: float
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def arguments(self, device: torch.device | str = "cpu") -> tuple[object, ...]:
        """In the order of the reference and of the launcher."""
        tensors = (self.q_BTNH, self.planes, self.table, self.slots_B, self.starts_B, self.tail, self.firsts_B)
        sink = None if self.sink_N is None else self.sink_N.to(device)
        there = [None if tensor is None else tensor.to(device) for tensor in tensors]
        return (*there, self.window, self.is_causal, sink, self.scale)

    def expected(self) -> Tensor:
        """[B, T, N, H] in float64."""
        B, T, N, _ = self.q_BTNH.shape
        group = N // self.planes.shape[1]
        rows = torch.zeros(self.q_BTNH.shape, dtype=torch.float64)
        for b in range(B):
            start = int(self.starts_B[b])
            first = 0 if self.firsts_B is None else int(self.firsts_B[b])
            for t in range(T):
                seen = [s for s in range(len(self.keys[b])) if self._sees(start + t, s, start, first)]
                for n in range(N):
                    k, v = self.keys[b][seen, n // group], self.values[b][seen, n // group]
                    scores = k @ self.q_BTNH[b, t, n].double() * self.scale
                    if self.sink_N is not None:
                        scores = torch.cat((scores, self.sink_N[n].double().view(1)))
                    rows[b, t, n] = scores.softmax(0)[: len(seen)] @ v
        return rows

    def _sees(self, p: int, s: int, start: int, first: int) -> bool:
        is_inside = s >= first or (self.tail is not None and s >= start)
        is_later = (self.tail is None or self.is_causal) and s > p
        return is_inside and not is_later and (self.window is None or abs(p - s) < self.window)


def make_case(
    starts: list[int],
    num_rows: int,
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    has_tail: bool = False,
    firsts: list[int] | None = None,
    window: int | None = None,
    is_causal: bool = True,
    has_sink: bool = False,
    dtype: torch.dtype = torch.float32,
    num_trash: int = 0,
    scale: float | None = None,
    spare_columns: int = 1,
) -> PagedCase:
    """Random texts in shuffled blocks; every cell that no row may see is NaN.

    Args:
        num_trash: requests of padding behind the others: the last slot, at position 0.
        spare_columns: of the table, behind the longest request's.
    """
    M, T = num_kv_heads, num_rows
    num_columns = -(-(max(starts) + T) // block_size) + spare_columns
    num_slots = len(starts) + 2
    num_blocks = num_slots * num_columns + 3
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    planes = torch.full((2, M, num_blocks, block_size, head_size), torch.nan, dtype=dtype)
    table = torch.randint(1, num_blocks, (num_slots + 1, num_columns), dtype=torch.int32)  # what is stale names a block
    table[num_slots] = 0
    slots = torch.randperm(num_slots)[: len(starts)].tolist()
    tail = torch.full((2, M, 1, (len(starts) + num_trash) * T, head_size), torch.nan, dtype=dtype) if has_tail else None
    keys, values = [], []
    for b, start in enumerate(starts):
        text = torch.randn(2, start + T, M, head_size).to(dtype)
        first = 0 if firsts is None else firsts[b]
        lowest = max(first, 0 if window is None else start - window + 1)
        end = start if has_tail else start + T
        for begin in range(0, end, block_size):
            block = free.pop()
            table[slots[b], begin // block_size] = block
            inside = range(max(begin, lowest), min(begin + block_size, end))
            for s in inside:
                planes[:, :, block, s - begin] = text[:, s]
        if tail is not None:
            tail[:, :, 0, b * T : (b + 1) * T] = text[:, start:].transpose(1, 2)
        keys.append(text[0].double())
        values.append(text[1].double())
    B = len(starts) + num_trash
    every_start = torch.tensor(starts + [0] * num_trash)
    return PagedCase(
        torch.randn(B, T, num_heads, head_size).to(dtype),
        planes,
        table,
        torch.tensor(slots + [num_slots] * num_trash),
        every_start,
        tail,
        None if firsts is None else torch.tensor(firsts + [0] * num_trash),
        window,
        is_causal,
        torch.randn(num_heads) if has_sink else None,
        1.0 / math.sqrt(head_size) if scale is None else scale,
        keys + [torch.full((T, M, head_size), torch.nan, dtype=torch.float64)] * num_trash,
        values + [torch.full((T, M, head_size), torch.nan, dtype=torch.float64)] * num_trash,
    )
