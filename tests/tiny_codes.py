"""Tiny targets whose weights are stored in codes, as those of a quantised file are."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.checkpoint.gguf_codes import BlockCodes
from paceline.models.layers import Linear
from paceline.models.stored_codes import StoredCodes
from paceline.models.targets.dense import DenseTarget

BLOCK = 32


class CodesInMemory:
    """A source of one weight."""

    def __init__(self, held: BlockCodes) -> None:
        self._held = held

    def code_kind(self, name: str) -> str | None:
        return "Q8_0" if self._held.minima_OC is None else "Q4_1"

    def codes(self, name: str) -> BlockCodes:
        return self._held


def coded(weight_OI: Tensor, bits: int) -> BlockCodes:
    """The nearest codes of a weight, of 4 or 8 bits."""
    blocks = weight_OI.detach().float().unflatten(1, (-1, BLOCK))
    if bits == 8:
        scales = (blocks.abs().amax(-1) / 127).half()
        codes = (blocks / scales.float().clamp(min=1e-7).unsqueeze(-1)).round().clamp(-127, 127)
        return BlockCodes(scales, None, codes.to(torch.int8).flatten(1))
    minima = blocks.amin(-1).half()
    scales = ((blocks.amax(-1) - minima.float()) / 15).half()
    codes = ((blocks - minima.float().unsqueeze(-1)) / scales.float().clamp(min=1e-7).unsqueeze(-1)).round()
    return BlockCodes(scales, minima, codes.clamp(0, 15).to(torch.uint8).flatten(1))


def meant(held: BlockCodes) -> Tensor:
    """The weight that codes mean, in float32."""
    blocks = held.codes_OI.float().unflatten(1, (-1, BLOCK)) * held.scales_OC.float().unsqueeze(-1)
    return (blocks if held.minima_OC is None else blocks + held.minima_OC.float().unsqueeze(-1)).flatten(1)


def store_in_codes(linear: Linear, bits: int) -> BlockCodes:
    """Round a linear's weight to what codes can say, and tell it where they are."""
    held = coded(linear.weight, bits)
    with torch.no_grad():
        linear.weight.copy_(meant(held))
    linear.keep_codes(StoredCodes(CodesInMemory(held), ("weight",), linear.weight))
    return held


def store_target_in_codes(target: DenseTarget) -> None:
    """All of a target's linears: layers with 4 bits, the head with 8."""
    for part in target.modules():
        if isinstance(part, Linear):
            store_in_codes(part, 8 if part is target.lm_head else 4)
