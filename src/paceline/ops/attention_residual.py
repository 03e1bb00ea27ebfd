"""Attention residuals: what a sub-layer reads is a mixture of earlier states instead of their running sum.

    p       = round(prefix + delta)                                 the sum of the current block of layers
    v_i     = bank row i for i < m, v_m = p                         closed blocks, then the open one
    score_i = sum_d v_i[d] * score[d] / sqrt(mean(v_i^2) + eps)     with score = norm gain * projection
    mix     = sum_i softmax(score)_i * v_i                          the raw sources, not the normed ones

All in float32; the mixture is rounded once, or normed unrounded and then rounded. One kernel serves with a delta and
without, with a bank row to write and without, and for a tap, which is this with nothing but the mixture: what a capture
id means, to the last bit, must not depend on where a pipeline is cut, so not on whether a delta was folded before.

Source: Kimi K3; spec 4.2 and 4.5. T rows (any leading dimensions), D width, J bank rows, m of them valid, Q = m + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.dispatch import choose, kernel, needs_gradient, tl, triton
from paceline.ops.elementwise import widen


class OutputNorm(NamedTuple):
    """The norm behind a mixture: the sub-layer's own."""

    weight_D: Tensor
    eps: float


def score_weights(norm_D: Tensor, projection_D: Tensor) -> Tensor:
    """Multiply a mixture's two vectors in float32, once after loading; the projection may be stored as [1, D]."""
    return widen(norm_D) * widen(projection_D.reshape(-1))


def fold_delta(prefix_TD: Tensor, delta_TD: Tensor | None) -> Tensor:
    """The running sum with its pending addition, rounded once: a new tensor, with the bits that the mixture sees.

    Args:
        prefix_TD: [..., D].
        delta_TD: the same shape and dtype, or None.
    """
    if delta_TD is None:
        return prefix_TD.clone()
    if needs_gradient(prefix_TD, delta_TD):
        return prefix_TD + delta_TD
    # Zero changes nothing, not even the sign of a zero: -0.0 + 0.0 is 0.0, and a stage's first layer has no delta.
    return torch.where(delta_TD == 0, prefix_TD, prefix_TD + delta_TD)


def attention_residual_reference(
    prefix_TD: Tensor,
    bank_TJD: Tensor,
    num_sources: int,
    score_D: Tensor,
    eps: float,
    delta_TD: Tensor | None,
    write_row: int | None,
    norm: OutputNorm | None,
) -> tuple[Tensor, Tensor]:
    """The definition."""
    folded_TD = prefix_TD if delta_TD is None else fold_delta(prefix_TD, delta_TD)
    # Rows past the valid ones are left out, not masked: they were never written, and 0 * NaN is NaN. Stages have banks
    # of different sizes; the copy makes the sums below independent of their strides.
    sources_TQD = widen(torch.cat((bank_TJD[:, :num_sources], folded_TD.unsqueeze(1)), dim=1))
    scores_TQ = (sources_TQD * score_D).sum(-1) * torch.rsqrt(sources_TQD.square().mean(-1) + eps)
    mixed_TD = (scores_TQ.softmax(-1).unsqueeze(-1) * sources_TQD).sum(1)
    if norm is not None:
        scale_T1 = torch.rsqrt(mixed_TD.square().mean(-1, keepdim=True) + norm.eps)
        mixed_TD = mixed_TD * scale_T1 * widen(norm.weight_D)
    if write_row is not None:
        bank_TJD[:, write_row] = folded_TD
    return folded_TD, mixed_TD.to(prefix_TD.dtype)


@kernel
def _attention_residual_kernel(
    prefix_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    score_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    folded_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    has_delta: tl.tensor,
    write_row: tl.tensor,
    width: tl.tensor,
    token_stride: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    NUM_SOURCES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    adds = inside & (has_delta > 0.0)
    prefix = tl.load(prefix_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + token * width + column, mask=adds, other=0.0).to(tl.float32)
    summed = (prefix + delta).to(prefix_ptr.dtype.element_ty).to(tl.float32)
    folded = tl.where(delta == 0.0, prefix, summed)
    stored = folded.to(prefix_ptr.dtype.element_ty)
    tl.store(folded_ptr + token * width + column, stored, mask=adds)
    score_weight = tl.load(score_ptr + column, mask=inside, other=0.0)
    bank_at = bank_ptr + token * token_stride + column
    largest, total = float("-inf"), 0.0
    mixed = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(NUM_SOURCES + 1):
        if source < NUM_SOURCES:
            value = tl.load(bank_at + source * row_stride, mask=inside, other=0.0).to(tl.float32)
        else:
            value = folded
        score = tl.sum(value * score_weight) * tl.rsqrt(tl.sum(value * value) / width + eps)
        raised = tl.maximum(largest, score)
        kept, weight = tl.exp(largest - raised), tl.exp(score - raised)
        total = total * kept + weight
        mixed = mixed * kept + value * weight
        largest = raised
    mixed = mixed / total
    if HAS_NORM:
        gain = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed) / width + norm_eps) * gain
    tl.store(mixed_ptr + token * width + column, mixed.to(mixed_ptr.dtype.element_ty), mask=inside)
    tl.store(bank_at + write_row * row_stride, stored, mask=inside & (write_row >= 0))


def attention_residual_triton(
    prefix_TD: Tensor,
    bank_TJD: Tensor,
    num_sources: int,
    score_D: Tensor,
    eps: float,
    delta_TD: Tensor | None,
    write_row: int | None,
    norm: OutputNorm | None,
) -> tuple[Tensor, Tensor]:
    """Launch one program per row."""
    prefix_TD = prefix_TD.contiguous()
    num_rows, width = prefix_TD.shape
    mixed_TD = torch.empty_like(prefix_TD)
    folded_TD = prefix_TD if delta_TD is None else torch.empty_like(prefix_TD)
    with torch.cuda.device_of(prefix_TD):
        _attention_residual_kernel[(num_rows,)](
            prefix_TD,
            prefix_TD if delta_TD is None else delta_TD.contiguous(),
            bank_TJD,
            score_D.contiguous(),
            score_D if norm is None else norm.weight_D.contiguous(),
            folded_TD,
            mixed_TD,
            0.0 if delta_TD is None else 1.0,  # a float: an integer 1 would be compiled in, and make a second kernel
            -1 if write_row is None else write_row,
            width,
            bank_TJD.stride(0),
            bank_TJD.stride(1),
            eps,
            0.0 if norm is None else norm.eps,
            NUM_SOURCES=num_sources,
            HAS_NORM=norm is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=8 if width > 2048 else 4,
        )
    return folded_TD, mixed_TD


def attention_residual(
    prefix_TD: Tensor,
    bank_TJD: Tensor,
    num_sources: int,
    score_D: Tensor,
    *,
    eps: float,
    delta_TD: Tensor | None = None,
    write_row: int | None = None,
    norm: OutputNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """Fold what is pending into the running sum and mix it with the closed blocks.

    Args:
        prefix_TD: [..., D], the sum of the current block, any float dtype.
        bank_TJD: [..., J, D] in the same dtype; what stands in rows past the valid ones is never read.
        num_sources: m, how many bank rows are mixed.
        score_D: float32, from `score_weights`.
        eps: of the norm inside the scores.
        delta_TD: [..., D], to be added to the prefix first.
        write_row: the bank row that gets the folded prefix, after the mixture was formed: row m or none.
        norm: what follows the mixture, on its unrounded values.
    Returns:
        The folded prefix (a new tensor with a delta, else `prefix_TD` itself) and the mixture, [..., D] in its dtype.
    Raises:
        ShapeError: the tensors do not fit each other, or a bank row does not exist or is not the next one.
    """
    width, num_rows = prefix_TD.shape[-1], bank_TJD.shape[-2]
    if bank_TJD.shape != (*prefix_TD.shape[:-1], num_rows, width):
        raise ShapeError("bank", expected=[*prefix_TD.shape[:-1], num_rows, width], found=bank_TJD.shape)
    if delta_TD is not None and delta_TD.shape != prefix_TD.shape:
        raise ShapeError("delta", expected=prefix_TD.shape, found=delta_TD.shape)
    if score_D.shape != (width,):
        raise ShapeError("score", expected=[width], found=score_D.shape)
    if not 0 <= num_sources <= num_rows:
        raise ShapeError("bank", expected=f"at least {num_sources} rows, and no fewer than 0", found=bank_TJD.shape)
    if write_row is not None and not (write_row == num_sources < num_rows):
        expected = f"a row {write_row} to write, right behind the {num_sources} valid ones"
        raise ShapeError("bank", expected=expected, found=bank_TJD.shape)
    prefix, bank = prefix_TD.reshape(-1, width), bank_TJD.view(prefix_TD.numel() // width, num_rows, width)
    delta = None if delta_TD is None else delta_TD.reshape(-1, width)
    run = attention_residual_reference
    if prefix.numel() and not needs_gradient(prefix, bank, score_D, *(() if delta is None else (delta,))):
        run = choose("attention_residual", prefix, attention_residual_reference, attention_residual_triton)
    folded, mixed = run(prefix, bank, num_sources, score_D, eps, delta, write_row, norm)
    return prefix_TD if delta_TD is None else folded.view(prefix_TD.shape), mixed.view(prefix_TD.shape)


def tap_attention_residual(
    prefix_TD: Tensor, bank_TJD: Tensor, num_sources: int, score_D: Tensor, *, eps: float
) -> Tensor:
    """The mixture as a feature: a pure read, rounded once, without the consumer's norm.

    Args:
        prefix_TD: [..., D], with nothing pending (`fold_delta`).
        bank_TJD: as for `attention_residual`.
        num_sources: as there.
        score_D: of the layer that consumes this stream.
        eps: as there.
    Returns:
        [..., D], which shares no memory with the prefix.
    """
    _, mixed_TD = attention_residual(prefix_TD, bank_TJD, num_sources, score_D, eps=eps)
    return mixed_TD
