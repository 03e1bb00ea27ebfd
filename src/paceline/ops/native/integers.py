"""Weights in the codes of their file, as panels for the native product in whole numbers.

Rows are rounded to 8 bits, each block of 32 inputs by its largest magnitude, and multiplied with the bare codes: sums
of a block are exact. So a product is that of the weight as the file means it with the rounded row, in float32. An
instruction multiplies four inputs with 16 outputs, twice as many as in bf16.

O outputs, I inputs, C = I / 32 blocks of inputs that share a scale, T rows.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paceline.ops.huge_pages import lay_on_huge_pages
from paceline.ops.native.build import library, multiplies_bytes
from paceline.ops.native.quantized import BLOCK, can_pack_codes
from paceline.ops.native.rows import INTEGERS_4, INTEGERS_8, PANEL, NativeWeight, bias_in_panels, in_panels

_HALF: Final = PANEL // 2
_QUADS: Final = BLOCK // 4


def can_run_integers() -> bool:
    """Whether this machine has products in whole numbers."""
    return multiplies_bytes() and library() is not None


def pack_integers(
    scales_OC: Tensor,
    minima_OC: Tensor | None,
    codes_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    is_gated: bool = False,
) -> NativeWeight:
    """Lay a weight that `quantized.can_pack_codes` out in panels; arguments as those of `quantized.pack_codes`."""
    assert can_pack_codes(scales_OC, minima_OC, codes_OI), "the caller asks `can_pack_codes`"
    num_outputs, num_inputs = codes_OI.shape
    codes = in_panels(codes_OI, is_gated=is_gated)
    # [panel, half, output, block, quad, input] to [panel, half, block, quad, output, input]
    codes = codes.view(-1, 2, _HALF, num_inputs // BLOCK, _QUADS, 4).permute(0, 1, 3, 4, 2, 5)
    parts = [_scales_in_halves(scales_OC, is_gated=is_gated)]
    if minima_OC is not None:
        pairs_of_quads = codes.unflatten(3, (_QUADS // 2, 2))
        parts.append(_scales_in_halves(minima_OC, is_gated=is_gated))
        parts.append((pairs_of_quads[..., 0, :, :] | pairs_of_quads[..., 1, :, :] << 4).flatten(3))
    else:
        parts.append((codes.to(torch.int16) + 128).to(torch.uint8).flatten(3))
    panels = torch.cat(parts, dim=3)
    lay_on_huge_pages(panels.data_ptr(), panels.numel())
    form = INTEGERS_8 if minima_OC is None else INTEGERS_4
    return NativeWeight(panels, bias_in_panels(bias_O, is_gated=is_gated), num_inputs, num_outputs, is_gated, form=form)


def round_rows(x_TI: Tensor) -> Tensor:
    """Rows as products in whole numbers take them, float32: the definition of how they are rounded."""
    blocks = x_TI.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = largest.new_tensor(127.0).div(largest).clamp(max=3.4e38)  # a plain number over a tensor rounds twice
    rounded: Tensor = ((blocks * inverse).round() * (largest / 127.0)).flatten(-2)
    return rounded


def _scales_in_halves(scales_OC: Tensor, *, is_gated: bool) -> Tensor:
    """Bytes [panels, 2, C, 32]."""
    rows = in_panels(scales_OC, is_gated=is_gated)
    halves: Tensor = rows.view(-1, 2, _HALF, rows.shape[1]).transpose(2, 3).contiguous()
    return halves.view(torch.uint8)
