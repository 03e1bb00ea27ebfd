"""Short causal convolution of each channel by itself, then SiLU; what lies before the rows comes from a kept history.

    y[t, c] = SiLU( sum over j < W of weight[c, j] * x[t - W + 1 + j, c] )

Weights and sums are float32, rounded once. A request's history is the last W - 1 rows that went in, so the rows of a
pass continue where the committed text ended; before the start of a text it is zero. `SiLU` is meant, whatever the
activation of the model's MLPs is called.

B requests, T rows, C channels, W taps, H = W - 1 rows of history (oldest first), S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, needs_gradient, tl, triton
from paceline.ops.elementwise import sigmoid, widen

_LARGEST_BLOCK = 512  # channels per program


def histories_of(histories_SHC: Tensor, slots_B: Tensor) -> Tensor:
    """Each request's history, [B, H, C]; zeros for a slot below 0, whatever lies at the end of the store."""
    found_BHC = histories_SHC[slots_B.clamp(min=0)]
    return found_BHC.masked_fill((slots_B < 0).view(-1, 1, 1), 0.0)


def causal_convolution_reference(
    x_BTC: Tensor, weight_CW: Tensor, histories_SHC: Tensor, slots_B: Tensor | None
) -> Tensor:
    """The definition: tap by tap, the oldest row first."""
    history_BHC = histories_SHC if slots_B is None else histories_of(histories_SHC, slots_B)
    rows_BXC = widen(torch.cat((history_BHC.to(x_BTC.dtype), x_BTC), dim=1))
    num_rows, weight_WC = x_BTC.shape[1], weight_CW.t().contiguous()
    y_BTC = rows_BXC[:, :num_rows] * weight_WC[0]
    for tap in range(1, weight_WC.shape[0]):
        y_BTC = y_BTC + rows_BXC[:, tap : tap + num_rows] * weight_WC[tap]
    return (y_BTC * sigmoid(y_BTC)).to(x_BTC.dtype)


@kernel
def _causal_convolution_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    history_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_channels: tl.tensor,
    request_stride: tl.tensor,
    row_stride: tl.tensor,
    slot_stride: tl.tensor,
    history_stride: tl.tensor,
    HAS_SLOTS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < num_channels
    slot = request
    if HAS_SLOTS:
        slot = tl.load(slot_ptr + request).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1) + tap
        is_own, is_kept = is_channel & (source >= 0), is_channel & (source < 0) & (slot >= 0)
        x_at = x_ptr + request * request_stride + source * row_stride + channel
        kept_at = history_ptr + slot * slot_stride + (row + tap) * history_stride + channel
        own = tl.load(x_at, mask=is_own, other=0.0).to(tl.float32)
        kept = tl.load(kept_at, mask=is_kept, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += tl.where(source >= 0, own, kept) * weight
    y = total / (1.0 + tl.exp(-total))
    y_at = y_ptr + (request * num_rows + row) * num_channels + channel
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_channel)


def causal_convolution_triton(
    x_BTC: Tensor, weight_CW: Tensor, histories_SHC: Tensor, slots_B: Tensor | None
) -> Tensor:
    """Launch one program per row and run of channels; x may be a part of a joint projection."""
    num_requests, num_rows, num_channels = x_BTC.shape
    if x_BTC.stride(2) != 1:
        x_BTC = x_BTC.contiguous()
    if histories_SHC.stride(2) != 1:
        histories_SHC = histories_SHC.contiguous()
    y_BTC = torch.empty(x_BTC.shape, dtype=x_BTC.dtype, device=x_BTC.device)
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(num_channels))
    with torch.cuda.device_of(x_BTC):
        _causal_convolution_kernel[num_requests, num_rows, triton.cdiv(num_channels, block)](
            x_BTC,
            weight_CW.contiguous(),
            histories_SHC,
            histories_SHC if slots_B is None else slots_B.contiguous(),
            y_BTC,
            num_rows,
            num_channels,
            x_BTC.stride(0),
            x_BTC.stride(1),
            histories_SHC.stride(0),
            histories_SHC.stride(1),
            HAS_SLOTS=slots_B is not None,
            TAPS=weight_CW.shape[1],
            BLOCK=block,
        )
    return y_BTC


def causal_convolution(
    x_BTC: Tensor, weight_CW: Tensor, histories_SHC: Tensor | None = None, slots_B: Tensor | None = None
) -> Tensor:
    """Convolve the rows of each request behind its history.

    Args:
        x_BTC: rows before the convolution, any float dtype.
        weight_CW: float32, the newest row's weight last; [C, 1, W], as checkpoints store it, is taken too.
        histories_SHC: in x's dtype; without slots, one per request. None: zeros.
        slots_B: int64, each request's place in the histories; below 0 for one that has none.
    Returns:
        [B, T, C] in x's dtype. The histories are not changed. Differentiable.
    Raises:
        ShapeError: the tensors do not fit each other.
    Source: Kimi-Linear, the short convolutions of KDA; spec 3.3, step 2.
    """
    num_requests, _, num_channels = x_BTC.shape
    if weight_CW.dim() == 3:
        weight_CW = weight_CW.squeeze(1)
    if weight_CW.dim() != 2 or weight_CW.shape[0] != num_channels:
        raise ShapeError("weight", expected=f"[{num_channels}, W]", found=weight_CW.shape)
    kept = weight_CW.shape[1] - 1
    if histories_SHC is None:
        histories_SHC, slots_B = x_BTC.new_zeros(num_requests, kept, num_channels), None
    if histories_SHC.shape[1:] != (kept, num_channels):
        raise ShapeError("histories", expected=f"[S, {kept}, {num_channels}]", found=histories_SHC.shape)
    if slots_B is None and histories_SHC.shape[0] != num_requests:
        raise ShapeError("histories", expected=[num_requests, kept, num_channels], found=histories_SHC.shape)
    if slots_B is not None and slots_B.shape != (num_requests,):
        raise ShapeError("slots", expected=[num_requests], found=slots_B.shape)
    if x_BTC.numel() == 0 or needs_gradient(x_BTC, weight_CW, histories_SHC):
        return causal_convolution_reference(x_BTC, weight_CW, histories_SHC, slots_B)
    run = choose("causal_convolution", x_BTC, causal_convolution_reference, causal_convolution_triton)
    return run(x_BTC, weight_CW, histories_SHC, slots_B)


def next_history(x_BTC: Tensor, history_BHC: Tensor, lengths_B: Tensor | None = None) -> Tensor:
    """The history behind the first rows of a pass: the last H of what was kept and what came.

    Args:
        x_BTC: rows before the convolution.
        history_BHC: what was kept before them.
        lengths_B: int64, how many rows of each request count; None: all.
    Returns:
        [B, H, C] in the history's dtype, a new tensor.
    """
    rows_BXC = torch.cat((history_BHC, x_BTC.to(history_BHC.dtype)), dim=1)
    num_kept = history_BHC.shape[1]
    if lengths_B is None:
        return rows_BXC[:, rows_BXC.shape[1] - num_kept :].clone()
    at_BH = lengths_B.unsqueeze(1) + torch.arange(num_kept, device=x_BTC.device)
    return rows_BXC.gather(1, at_BH.unsqueeze(2).expand(-1, -1, x_BTC.shape[2]))
