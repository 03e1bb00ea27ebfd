"""A batch of conversations that advances one token a step in lockstep: no row is padded and attention needs no mask.

B rows, T tokens of a pass, N query heads, M key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.targets.dense import DenseTarget
from paceline.ops.attention import attention


class Lockstep:
    """Keys and values of a batch whose rows are all equally long."""

    def __init__(self, target: DenseTarget, batch_size: int, length: int) -> None:
        contract, weight = target.contract, target.norm.weight
        shape = (contract.num_layers, 2, batch_size, contract.num_kv_heads, length, contract.head_size)
        self._cache = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.length = 0

    def __call__(self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor) -> Tensor:
        end = self.length + q_BTNH.shape[1]
        k, v = self._cache[layer]
        k[:, :, self.length : end] = k_BTMH.transpose(1, 2)
        v[:, :, self.length : end] = v_BTMH.transpose(1, 2)
        visible = None
        if q_BTNH.shape[1] > 1:
            visible = torch.ones(q_BTNH.shape[1], end, dtype=torch.bool, device=k.device).tril(self.length)
        return attention(q_BTNH.transpose(1, 2), k[:, :, :end], v[:, :, :end], visible=visible).transpose(1, 2)


def draw_tokens(logits_BV: Tensor, temperature_B: Tensor, generator: torch.Generator) -> Tensor:
    """One id per row from softmax(logits / T), by the largest of p / Exponential(1)."""
    p_BV = (logits_BV.float() / temperature_B[:, None]).softmax(-1)
    noise_BV = torch.empty_like(p_BV).exponential_(generator=generator)
    return (p_BV / noise_BV.clamp_(min=1e-30)).argmax(-1)
