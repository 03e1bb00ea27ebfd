"""MXFP4 weights back to numbers: 4-bit floats (E2M1) in runs of 32 that share a power of two (E8M0).

    value[.., 32 j + i] = E2M1(nibble) * 2^(scale[.., j] - 127)

A byte holds two neighbours, the first in its low nibble. A nibble is a sign, two bits of exponent and one of mantissa:
0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale of 255 stands for NaN. Every value has two significant bits, so bf16 and float32
hold it exactly; float16 does not hold all scales.

Source: OCP Microscaling Formats 1.0; `weight_packed` and `weight_scale` of Kimi K3's experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ShapeError

RUN = 32  # values that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SMALLEST_SCALE_BITS = 0x0040_0000  # 2^-127 has no normal form in float32


def _pairs(device: torch.device) -> Tensor:
    """The two values of every byte, [256, 2]."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


def _scales(device: torch.device) -> Tensor:
    """The factor of every scale byte, [256], from its bits: powers of two are exact."""
    bits = torch.arange(256, dtype=torch.int32, device=device) << 23
    bits[0] = _SMALLEST_SCALE_BITS
    factors = bits.view(torch.float32)
    factors[255] = torch.nan
    return factors


def dequantise_mxfp4(packed: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Unpack a tensor.

    Args:
        packed: uint8 [.., width / 2].
        scales: uint8 [.., width / 32].
        dtype: of the result; bfloat16 and float32 lose nothing.
    Returns:
        [.., width].
    Raises:
        ShapeError: there is not one scale per 32 values, or the tensors are not bytes.
    """
    if packed.dtype != torch.uint8 or scales.dtype != torch.uint8:
        found = f"{packed.dtype} and {scales.dtype}"
        raise ShapeError("packed", expected=f"bytes, and scales in bytes (they are {found})", found=packed.shape)
    bytes_per_run = RUN // 2
    if packed.shape != (*scales.shape[:-1], scales.shape[-1] * bytes_per_run):
        expected = [*scales.shape[:-1], scales.shape[-1] * bytes_per_run]
        raise ShapeError("packed", expected=expected, found=packed.shape)
    values = _pairs(packed.device)[packed.int()].view(*scales.shape, RUN)
    factors = _scales(packed.device)[scales.int()]
    return values.mul_(factors.unsqueeze(-1)).view(*packed.shape[:-1], -1).to(dtype)
