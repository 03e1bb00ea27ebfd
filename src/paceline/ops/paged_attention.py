"""Attention of a pass's rows over keys and values in blocks, found through a table, and over a dense tail.

    y[b, t, n] = sum_s w[s] v[s],  w = softmax_s(scale q[b, t, n] . k[s]),  p = starts[b] + t
    without a tail  s from firsts[b] to p: the rows of the pass lie in the blocks already
    with a tail     s from firsts[b] to starts[b] - 1 in the blocks, then the pass's own T rows: all, or causal: up to p
    with a window   of these, |p - s| < window

A sink is one more key per head, of that score and with the value 0. Every range is read from the device, and the launch
follows from shapes alone, so a captured one can be replayed with other lengths. What a table names outside a request's
range is never used: free blocks, cells behind a request's last row and those that no row of it sees may hold NaN.

B requests, T rows of each, N query heads, M key/value heads (N = M * G), H head size, J blocks of a table's row,
S slots, L context positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose
from paceline.ops.elementwise import widen
from paceline.ops.paged_attention_kernel import is_page, paged_attention_triton


class PagedAttend(ABC):
    """An `Attend` whose rows may be stored by whoever computes them.

    Attributes:
        counters: from `skinny_launch.new_counters`, for the products around; None leaves them to the layers, which
            are not one engine's alone.
    """

    counters: Tensor | None = None

    @abstractmethod
    def cells(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where keys and values of this pass's rows go.

        Args:
            layer: which.

        Returns:
            Planes [2, M, blocks, block_size, H], contiguous in the last three dimensions, keys before values; and the
            physical row in them of each of the pass's rows, int64 [B * T].
        """

    @abstractmethod
    def stored(self, layer: int, q_BTNH: Tensor, *, sink_N: Tensor | None = None) -> Tensor:
        """Attend once keys and values lie in `cells(layer)`; returns [B, T, N, H], contiguous."""

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Store the rows, then attend."""
        planes, rows_T = self.cells(layer)
        for plane, rows_BTMH in zip(planes.flatten(2, 3), (k_BTMH, v_BTMH), strict=True):
            plane.index_copy_(1, rows_T, rows_BTMH.flatten(0, 1).transpose(0, 1))
        return self.stored(layer, q_BTNH, sink_N=sink_N)


def can_page(planes: Tensor) -> bool:
    """Whether the operation takes planes [..., block_size, H] where they are: on a GPU pages are powers of two."""
    return planes.device.type != "cuda" or is_page(planes.shape[-2])


def paged_attention_reference(
    q_BTNH: Tensor,
    planes: Tensor,
    table: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    tail: Tensor | None,
    firsts_B: Tensor | None,
    window: int | None,
    is_causal: bool,
    sink_N: Tensor | None,
    scale: float,
    num_parts: int | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """The definition: gathers the longest context of the batch, in float32, or in float64 for what came in it."""
    del num_parts, arrivals  # how the work is shared
    B, T = q_BTNH.shape[:2]
    num_kv_heads, block_size = planes.shape[1], planes.shape[3]
    device = q_BTNH.device
    positions_BT = starts_B.unsqueeze(1) + torch.arange(T, device=device)
    ends_B1 = starts_B.unsqueeze(1) + (T if tail is None else 0)
    position_L = torch.arange(max(1, int(ends_B1.max())), device=device).clamp(max=table.shape[1] * block_size - 1)
    firsts_B1 = torch.zeros_like(ends_B1) if firsts_B is None else firsts_B.unsqueeze(1)
    is_read_BL = (position_L < ends_B1) & (position_L >= firsts_B1)
    if window is not None:
        is_read_BL &= position_L > starts_B.unsqueeze(1) - window
    blocks_BL = table[slots_B][:, position_L // block_size].long()
    rows_BL = blocks_BL * block_size + position_L % block_size
    # Not only masked in the scores: 0 * NaN is NaN in the sum of values.
    both = widen(planes.flatten(2, 3)[:, :, rows_BL]).masked_fill(~is_read_BL.unsqueeze(-1), 0.0)
    at_BL = position_L.expand(B, -1)
    if tail is not None:
        tail_rows = torch.arange(B * T, device=device).view(B, T)
        both = torch.cat((both, widen(tail.flatten(2, 3)[:, :, tail_rows])), dim=3)
        at_BL = torch.cat((at_BL, positions_BT), dim=1)
        is_read_BL = torch.cat((is_read_BL, torch.ones_like(positions_BT, dtype=torch.bool)), dim=1)
    ahead_BTL = positions_BT.unsqueeze(2) - at_BL.unsqueeze(1)
    is_seen_BTL = is_read_BL.unsqueeze(1).expand_as(ahead_BTL)
    if is_causal or tail is None:
        is_seen_BTL = is_seen_BTL & (ahead_BTL >= 0)
    if window is not None:
        is_seen_BTL = is_seen_BTL & (ahead_BTL.abs() < window)
    keys_BMLH, values_BMLH = both.transpose(1, 2).unbind(0)
    q_BMGTH = widen(q_BTNH).transpose(1, 2).unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("bmgth,bmlh->bmgtl", q_BMGTH, keys_BMLH) * scale
    scores = scores.masked_fill(~is_seen_BTL[:, None, None], -torch.inf)
    if sink_N is not None:
        sinks = widen(sink_N).view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
    weights = scores.softmax(-1)[..., : at_BL.shape[1]]
    mixed_BMGTH = torch.einsum("bmgtl,bmlh->bmgth", weights, values_BMLH)
    return mixed_BMGTH.flatten(1, 2).transpose(1, 2).to(q_BTNH.dtype).contiguous()


def paged_attention(
    q_BTNH: Tensor,
    planes: Tensor,
    table: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    *,
    tail: Tensor | None = None,
    firsts_B: Tensor | None = None,
    window: int | None = None,
    is_causal: bool = True,
    sink_N: Tensor | None = None,
    scale: float | None = None,
    num_parts: int | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Attend over blocks, and over the pass's own rows in them or in a tail.

    Args:
        q_BTNH: queries, not scaled; the channels of a head lie together.
        planes: one layer's keys and values, [2, M, blocks, block_size, H] in the queries' dtype.
        table: int32 [S + 1, J], which block holds which positions of a slot.
        slots_B: int64, rows of the table.
        starts_B: int64, positions of the first rows.
        tail: [2, M, 1, B * T, H], keys and values of the pass's rows, request b's from b * T on; None where they are in
            the blocks.
        firsts_B: int64, nothing is read below these positions, which lie at or below `starts_B`; None is 0 for all.
        window: positions that a row may see, itself included; None is all.
        is_causal: no row sees a later one of the tail. Without a tail none does anyway.
        sink_N: one logit per query head that joins the softmax's denominator.
        scale: of the scores; None is H^-1/2.
        num_parts: programs that share a context, at most; None follows from the shapes. For tests and measurements.
        arrivals: from `new_arrivals`, for launches that follow each other; without, one that counts makes its own.

    Returns:
        [B, T, N, H] in the queries' dtype, contiguous.

    Raises:
        ShapeError: the tensors do not fit each other.
    """
    _check(q_BTNH, planes, table, slots_B, starts_B, tail, firsts_B, sink_N)
    if q_BTNH.numel() == 0:
        return torch.empty(q_BTNH.shape, dtype=q_BTNH.dtype, device=q_BTNH.device)
    scale = q_BTNH.shape[3] ** -0.5 if scale is None else scale
    run = choose("paged_attention", q_BTNH, paged_attention_reference, paged_attention_triton)
    form = (tail, firsts_B, window, is_causal, sink_N, scale)
    y_BTNH: Tensor = run(q_BTNH, planes, table, slots_B, starts_B, *form, num_parts, arrivals=arrivals)
    return y_BTNH


def _check(
    q_BTNH: Tensor,
    planes: Tensor,
    table: Tensor,
    slots_B: Tensor,
    starts_B: Tensor,
    tail: Tensor | None,
    firsts_B: Tensor | None,
    sink_N: Tensor | None,
) -> None:
    B, T, N, H = q_BTNH.shape
    if planes.dim() != 5 or planes.shape[0] != 2 or planes.shape[4] != H or N % planes.shape[1] != 0:
        raise ShapeError("planes", expected=f"[2, a divisor of {N}, blocks, block_size, {H}]", found=planes.shape)
    if table.dim() != 2:
        raise ShapeError("table", expected="[slots, J]", found=table.shape)
    for name, numbers in (("slots", slots_B), ("starts", starts_B), ("firsts", firsts_B)):
        if numbers is not None and numbers.shape != (B,):
            raise ShapeError(name, expected=[B], found=numbers.shape)
    if tail is not None and tail.shape != (2, planes.shape[1], 1, B * T, H):
        raise ShapeError("tail", expected=[2, planes.shape[1], 1, B * T, H], found=tail.shape)
    if sink_N is not None and sink_N.shape != (N,):
        raise ShapeError("sink", expected=[N], found=sink_N.shape)
