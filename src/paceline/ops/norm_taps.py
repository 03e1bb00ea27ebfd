"""The taps of a drafter side by side, as they are or each normed on its own, in one launch.

    y[t, k * D : (k + 1) * D] = tap_k[t] / sqrt(mean(tap_k[t]^2) + eps) * gain[k],   or tap_k[t]

Rounded once. T rows, K taps, D width of a tap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, dependent_launch, kernel, tl, triton
from paceline.ops.early_launch import wait_for_launch_ahead
from paceline.ops.rms_norm import rms_norm_reference


def norm_taps_reference(taps: Sequence[Tensor], gain_KD: Tensor, eps: float) -> Tensor:
    """The definition."""
    normed = [rms_norm_reference(tap.to(gain_KD.dtype), gain, eps) for tap, gain in zip(taps, gain_KD, strict=True)]
    return torch.cat(normed, dim=-1)


def join_taps_reference(taps: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The definition."""
    return torch.cat([tap.to(dtype) for tap in taps], dim=-1)


@kernel
def _norm_taps_kernel(
    tap_ptrs: tl.tuple,
    gain_ptr: tl.tensor,
    y_ptr: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    NUM_TAPS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    row, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wait_for_launch_ahead(USE_PDL)
    dtype = y_ptr.dtype.element_ty
    x = tl.zeros([BLOCK], dtype=tl.float32)
    for index in tl.static_range(NUM_TAPS):
        if tap == index:
            x = tl.load(tap_ptrs[index] + row * width + column, mask=inside, other=0.0).to(dtype).to(tl.float32)
    y = x
    if HAS_NORMS:
        gain = tl.load(gain_ptr + tap * width + column, mask=inside, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * gain
    tl.store(y_ptr + (row * NUM_TAPS + tap) * width + column, y.to(dtype), mask=inside)


def norm_taps_triton(taps: Sequence[Tensor], gain_KD: Tensor, eps: float) -> Tensor:
    """Launch one program per row and tap."""
    return _launch(taps, gain_KD, eps, gain_KD.dtype)


def join_taps_triton(taps: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The same without norms."""
    return _launch(taps, None, 0.0, dtype)


def _launch(taps: Sequence[Tensor], gain_KD: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    num_taps, width = len(taps), taps[0].shape[-1]
    num_rows = taps[0].numel() // width
    y = torch.empty((*taps[0].shape[:-1], num_taps * width), dtype=dtype, device=taps[0].device)
    is_dependent = dependent_launch(num_rows)
    with torch.cuda.device_of(y):
        _norm_taps_kernel[num_rows, num_taps](
            tuple(tap.contiguous() for tap in taps),
            y if gain_KD is None else gain_KD,
            y,
            width,
            eps,
            NUM_TAPS=num_taps,
            HAS_NORMS=gain_KD is not None,
            BLOCK=triton.next_power_of_2(width),
            USE_PDL=is_dependent,
            launch_pdl=is_dependent,
        )
    return y


def norm_taps(taps: Sequence[Tensor], gain_KD: Tensor, *, eps: float) -> Tensor:
    """Norm each tap and lay them side by side.

    Args:
        taps: K of [..., D], any float dtype.
        gain_KD: of their norms, contiguous, in the result's dtype.
        eps: added to each mean square.
    Returns:
        [..., K * D].
    Raises:
        ShapeError: the tensors do not fit each other.
    """
    if len(taps) != gain_KD.shape[0]:
        raise ShapeError("gain", expected=f"[{len(taps)}, D]", found=gain_KD.shape)
    _check(taps, gain_KD.shape[1])
    if taps[0].numel() == 0:
        return norm_taps_reference(taps, gain_KD, eps)
    return choose("norm_taps", gain_KD, norm_taps_reference, norm_taps_triton)(taps, gain_KD, eps)


def join_taps(taps: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Lay taps side by side.

    Args:
        taps: K of [..., D], any float dtype.
        dtype: of the result.
    Returns:
        [..., K * D].
    Raises:
        ShapeError: the taps differ.
    """
    _check(taps, taps[0].shape[-1])
    if taps[0].numel() == 0:
        return join_taps_reference(taps, dtype)
    return choose("join_taps", taps[0], join_taps_reference, join_taps_triton)(taps, dtype)


def _check(taps: Sequence[Tensor], width: int) -> None:
    for tap in taps:
        if tap.shape != (*taps[0].shape[:-1], width):
            raise ShapeError("tap", expected=[*taps[0].shape[:-1], width], found=tap.shape)
