"""Weights that stay in the codes of their file, as panels for the native product.

For few rows a product takes as long as reading its weight, so a weight of 4 bits is multiplied in a third of the time
of its copy in bf16. What is multiplied is scale * code + minimum as the file means it, in float32: nothing is rounded
to bf16, which is why results are not those of the copy, to the bit.

O outputs, I inputs, C = I / 32 blocks of inputs that share a scale.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paceline.ops.huge_pages import lay_on_huge_pages
from paceline.ops.native.build import library, permutes_bytes
from paceline.ops.native.rows import CODES_4, CODES_8, PANEL, NativeWeight, bias_in_panels, in_panels

BLOCK: Final = 32
_LARGEST_WIDTH: Final = 16384  # of the C file
_PAIRS: Final = BLOCK // 2
_HALF: Final = PANEL // 2


def can_run_quantized() -> bool:
    """Whether this machine has products with codes."""
    return permutes_bytes() and library() is not None


def can_pack_codes(scales_OC: Tensor, minima_OC: Tensor | None, codes_OI: Tensor) -> bool:
    """Whether `pack_codes` takes these: see there."""
    is_one_of_two = codes_OI.dtype == (torch.int8 if minima_OC is None else torch.uint8)
    if not is_one_of_two or scales_OC.dtype != torch.float16 or codes_OI.numel() == 0:
        return False
    if codes_OI.shape[1] % BLOCK or codes_OI.shape[1] > _LARGEST_WIDTH:
        return False
    if minima_OC is not None and not bool(torch.isfinite(minima_OC).all()):
        return False
    least, most = (int(end) for end in torch.aminmax(codes_OI))
    return least >= -127 if minima_OC is None else most < 16


def pack_codes(
    scales_OC: Tensor,
    minima_OC: Tensor | None,
    codes_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    is_gated: bool = False,
) -> NativeWeight:
    """Lay a weight that `can_pack_codes` out in panels.

    Args:
        scales_OC: float16, of each output and block.
        minima_OC: float16, added to what the scale gives; None with codes of 8 bits.
        codes_OI: uint8 below 16, or int8 above -128 where there are no minima.
        bias_O: added to every row.
        is_gated: see `NativeWeight`; all gates come before all that they let pass.
    """
    num_outputs, num_inputs = codes_OI.shape
    num_blocks = num_inputs // BLOCK
    codes = in_panels(codes_OI, is_gated=is_gated)
    # [panel, half, output, block, pair, parity] to [panel, block, pair, half, output, parity]
    codes = codes.view(-1, 2, _HALF, num_blocks, _PAIRS, 2).permute(0, 3, 4, 1, 2, 5)
    parts = [_scales_in_panels(scales_OC, is_gated=is_gated)]
    if minima_OC is not None:
        parts += [_scales_in_panels(minima_OC, is_gated=is_gated), _nibbles(codes)]
    else:
        parts.append(_bytes(codes))
    panels = torch.cat(parts, dim=2)
    lay_on_huge_pages(panels.data_ptr(), panels.numel())
    form = CODES_8 if minima_OC is None else CODES_4
    return NativeWeight(panels, bias_in_panels(bias_O, is_gated=is_gated), num_inputs, num_outputs, is_gated, form=form)


def _scales_in_panels(scales_OC: Tensor, *, is_gated: bool) -> Tensor:
    """Bytes [panels, C, 64]."""
    rows = in_panels(scales_OC, is_gated=is_gated)
    panels: Tensor = rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()
    return panels.view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Words of four pairs each, the first in the lowest bits: bytes [panels, C, 512]."""
    # [panel, block, word of pairs, half, output, parity, pair in the word]
    pairs = codes.unflatten(2, (4, 4)).movedim(3, -1)
    low = pairs[..., 0] | pairs[..., 1] << 4
    high = pairs[..., 2] | pairs[..., 3] << 4
    return torch.stack((low, high), dim=-1).flatten(2)


def _bytes(codes: Tensor) -> Tensor:
    """Signs and magnitudes, two pairs in a register of which each eight bytes take turns: bytes [panels, C, 1024]."""
    signs = (codes < 0).to(torch.uint8) << 7
    coded = codes.abs().to(torch.uint8) | signs
    # [panel, block, register, pair in it, half, eighth of its words, word]
    words: Tensor = coded.unflatten(2, (8, 2)).flatten(5).unflatten(5, (4, 8))
    return words.permute(0, 1, 2, 4, 5, 3, 6).flatten(2)
