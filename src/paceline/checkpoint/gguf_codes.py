"""Quantised tensors of a GGUF file as whole numbers with scales, for products that need no dequantised copy.

O outputs, I inputs, C = I / 32 blocks of inputs that share a scale.
Source: ggml, `block_q4_0`, `block_q4_1` and `block_q8_0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

BLOCK = 32
_SCALE_BYTES = 2
_LARGEST_CODE = 127
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-20, 65504.0  # of half precision: from where it still has four bits
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class BlockCodes:
    """A weight as scale * code, or scale * code + minimum.

    Attributes:
        scales_OC: float16, of each output and block.
        minima_OC: float16; None where there are none.
        codes_OI: uint8 below 16 where there are minima, else int8.
    """

    scales_OC: Tensor
    minima_OC: Tensor | None
    codes_OI: Tensor

    def rows(self, ids: Tensor) -> BlockCodes:
        """Some outputs alone, in order."""
        minima = None if self.minima_OC is None else self.minima_OC[ids]
        return BlockCodes(self.scales_OC[ids], minima, self.codes_OI[ids])


@runtime_checkable
class HoldsCodes(Protocol):
    """A source of which some tensors are stored in codes."""

    def code_kind(self, name: str) -> str | None:
        """How a tensor is stored, if `codes` gives it: tensors of one kind can be joined."""
        ...

    def codes(self, name: str) -> BlockCodes:
        """A tensor that has a kind, its rows in the order of `load`."""
        ...


def has_codes(kind: str) -> bool:
    """Whether tensors of a GGUF type can be read as `BlockCodes`."""
    return kind in ("Q4_0", "Q4_1", "Q8_0")


def read_codes(blocks_OCX: Tensor, kind: str) -> BlockCodes:
    """Take stored blocks apart.

    Args:
        blocks_OCX: uint8, the bytes of each block.
        kind: one that `has_codes`.
    """
    scales_OC = _halves(blocks_OCX[..., :_SCALE_BYTES])
    if kind == "Q8_0":
        return BlockCodes(scales_OC, None, blocks_OCX[..., _SCALE_BYTES:].flatten(1).view(torch.int8))
    has_minima = kind == "Q4_1"
    minima_OC = _halves(blocks_OCX[..., _SCALE_BYTES : 2 * _SCALE_BYTES]) if has_minima else scales_OC * -8.0
    bytes_OCX = blocks_OCX[..., _SCALE_BYTES * (1 + has_minima) :]
    codes = torch.cat((bytes_OCX & 15, bytes_OCX >> 4), dim=-1)  # the first half of a block in the low bits
    return BlockCodes(scales_OC, minima_OC, codes.flatten(1))


def nearest_codes(weight_OI: Tensor) -> BlockCodes | None:
    """A weight rounded to codes of 8 bits; None where rows are no whole blocks, or half precision has no such scale.

    Scales are rounded up, so no code is cut off; far below the normal numbers that would be by too much.
    """
    if weight_OI.shape[1] % BLOCK:
        return None
    parts = []
    for rows_OI in weight_OI.detach().split(_ROWS_AT_ONCE):  # in float32 they are many times as large
        blocks_OCX = rows_OI.float().unflatten(1, (-1, BLOCK))
        scales_OC = blocks_OCX.abs().amax(-1) / _LARGEST_CODE
        is_fit = (scales_OC == 0) | ((scales_OC >= _LEAST_SCALE) & (scales_OC <= _LARGEST_SCALE))
        if not bool(is_fit.all()):
            return None
        held_OC = scales_OC.half()
        is_less_OC = held_OC.float() < scales_OC
        held_OC = (held_OC.view(torch.int16) + is_less_OC).view(torch.float16)  # the next number up
        steps_OCX = blocks_OCX / held_OC.float().clamp(min=_LEAST_SCALE).unsqueeze(-1)
        codes = steps_OCX.round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)
        parts.append(BlockCodes(held_OC, None, codes.flatten(1)))
    return join(parts)


def join(parts: Sequence[BlockCodes]) -> BlockCodes:
    """Weights of one kind and width, one under the other."""
    minima = [part.minima_OC for part in parts if part.minima_OC is not None]
    return BlockCodes(
        torch.cat([part.scales_OC for part in parts]),
        torch.cat(minima) if minima else None,
        torch.cat([part.codes_OI for part in parts]),
    )


def _halves(bytes_OCX: Tensor) -> Tensor:
    return bytes_OCX.contiguous().view(torch.float16).squeeze(-1)
